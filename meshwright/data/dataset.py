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
    """The splits of a prepared data set, and the tokenizer, if there is one."""

    train: Samples
    held_out: Samples | None
    """None if the run does not validate."""
    tokenizer: Tokenizer | None
    notes: tuple[str, ...] = ()
    """Facts about the splits, printed when a run begins."""


def open_splits(
    config: Config, samples: Callable[[Split], tuple[Samples, str]], tokenizer: Tokenizer | None = None
) -> Opened:
    """Open the train split, and the validation split if the run validates.

    Args:
        config: the run's config.
        samples: samples(split) returns (samples, note for the user).
        tokenizer: the tokenizer, if there is one.

    Raises:
        DataError: the validation split does not fill one global batch, the minimum for a validation.
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
    """Open the splits of a packed corpus.

    Raises:
        DataError: a split is too small.
    """
    packed = open_packed(folder)
    opened = open_splits(config, lambda split: data.samples(config, packed, split), packed.tokenizer)
    return replace(opened, notes=(*read_lines(packed), *opened.notes))
