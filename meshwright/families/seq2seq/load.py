"""A checkpoint of an encoder-decoder as a model that can be asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.families.seq2seq.specials import SequenceSpecials, specials_for, specials_with_room
from meshwright.tools.evaluate.load import LoadedText, load_text


@dataclass(frozen=True)
class LoadedSequence(LoadedText):
    """An encoder-decoder. `context`: of source and of target, each with its end token."""

    specials: SequenceSpecials


def load_sequence(path: Path, device: str = "auto", context: int | None = None) -> LoadedSequence:
    """The Transformer or T5 of a step folder, or of a run's newest checkpoint. Raises as `load_text`."""
    loaded = load_text(path, device, context, "sequences")
    config, tokenizer = loaded.config, loaded.tokenizer
    specials = specials_for(config, tokenizer) if loaded.steps else specials_with_room(config.model, tokenizer)
    return LoadedSequence(**vars(loaded), specials=specials)
