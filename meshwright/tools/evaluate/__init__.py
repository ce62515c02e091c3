"""Measures of a trained model: perplexity, LAMBADA's cloze, masked tokens, BLEU, classes of images. On one device."""

from meshwright.tools.evaluate.images import ImageAccuracy, ImageModel, image_accuracy, load_image_model
from meshwright.tools.evaluate.lambada import Cloze, cloze_accuracy
from meshwright.tools.evaluate.masked import LoadedBert, MaskedAccuracy, load_bert, masked_accuracy
from meshwright.tools.evaluate.model import LoadedModel, load_model
from meshwright.tools.evaluate.perplexity import Perplexity, text_perplexity
from meshwright.tools.evaluate.text import TokenStream, stream_for

__all__ = [
    "Cloze",
    "ImageAccuracy",
    "ImageModel",
    "LoadedBert",
    "LoadedModel",
    "MaskedAccuracy",
    "Perplexity",
    "TokenStream",
    "cloze_accuracy",
    "image_accuracy",
    "load_bert",
    "load_image_model",
    "load_model",
    "masked_accuracy",
    "stream_for",
    "text_perplexity",
]
