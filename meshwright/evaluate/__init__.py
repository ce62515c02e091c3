"""Measures of a trained model: perplexity of a text, LAMBADA's cloze accuracy. One process, one device."""

from meshwright.evaluate.lambada import Cloze, cloze_accuracy
from meshwright.evaluate.model import LoadedModel, load_model
from meshwright.evaluate.perplexity import Perplexity, text_perplexity
from meshwright.evaluate.text import TokenStream, stream_for

__all__ = [
    "Cloze",
    "LoadedModel",
    "Perplexity",
    "TokenStream",
    "cloze_accuracy",
    "load_model",
    "stream_for",
    "text_perplexity",
]
