"""The data of a run: prepared once by the launcher, opened by every rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.config import Config
from meshwright.data.packed import open_packed
from meshwright.data.section import TokenSection
from meshwright.data.split import Split
from meshwright.data.tokenizer import Tokenizer
from meshwright.data.told import read_lines
from meshwright.ranks.errors import DataError

if TYPE_CHECKING:  # the launcher prepares data without torch
    from meshwright.compute.model import Samples


@dataclass(frozen=True)
class Opened:
    """The splits of a prepared data set, and its tokenizer if it has one."""

    train: Samples
    held_out: Samples | None
    """None where the run does not validate."""
    tokenizer: Tokenizer | None
    notes: tuple[str, ...] = ()
    """Facts about the splits, printed when a run begins."""


def open_splits(
    config: Config, samples: Callable[[Split], tuple[Samples, str]], tokenizer: Tokenizer | None = None
) -> Opened:
    """Open the train split, and the validation split where the run validates. `samples(split)`: a split and its note.

    Raises DataError where the validation split does not fill one global batch, the least that a validation takes.
    """
    train, note = samples("train")
    if not config.validation.every:
        return Opened(train, None, tokenizer, (f"train: {note}",) if note else ())
    held_out, held_out_note = samples("validation")
    if len(held_out) < config.batch.global_:
        has = f"has {len(held_out)} samples, fewer than batch.global={config.batch.global_}"
        raise DataError(f"the validation split {has}: raise data.validation, or lower batch.global")
    notes = (f"{split}: {text}" for split, text in (("train", note), ("validation", held_out_note)) if text)
    return Opened(train, held_out, tokenizer, tuple(notes))


def open_corpus(data: TokenSection, config: Config, folder: Path) -> Opened:
    """The splits of a packed corpus. Raises DataError where they are too small."""
    packed = open_packed(folder)
    opened = open_splits(config, lambda split: data.samples(config, packed, split), packed.tokenizer)
    return replace(opened, notes=(*read_lines(packed), *opened.notes))
