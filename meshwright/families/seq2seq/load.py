"""Loading of an encoder-decoder's checkpoint for evaluation and generation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from meshwright.families.seq2seq.specials import SequenceSpecials, specials_for, specials_with_room
from meshwright.tools.evaluate.load import LoadedText, load_text


@dataclass(frozen=True)
class LoadedSequence(LoadedText):
    """A loaded encoder-decoder. `context`: the most tokens of a source, and of a target, including the end token."""

    specials: SequenceSpecials


def load_sequence(path: Path, device: str = "auto", context: int | None = None) -> LoadedSequence:
    """Load the Transformer or T5 of a step folder, or of a run's newest checkpoint. Raises as `load_text`."""
    loaded = load_text(path, device, context, "sequences")
    config, tokenizer = loaded.config, loaded.tokenizer
    specials = specials_for(config, tokenizer) if loaded.steps else specials_with_room(config.model, tokenizer)
    return LoadedSequence(**vars(loaded), specials=specials)
