"""The data of a run, prepared once by the launcher and opened by every rank; a packed corpus as such data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.config import Config
from meshwright.data.files import ShowProgress
from meshwright.data.packed import open_packed
from meshwright.data.packing import corpus_for
from meshwright.data.section import TokenSection
from meshwright.data.split import Split
from meshwright.environment import cache_folder
from meshwright.errors import DataError

if TYPE_CHECKING:  # the launcher prepares data without torch
    from meshwright.model import Samples


@dataclass(frozen=True)
class Opened:
    """The splits of a prepared data set, and the tokenizer's JSON where there is one."""

    train: Samples
    held_out: Samples | None
    """None where the run does not validate."""
    tokenizer: str | None
    notes: tuple[str, ...] = ()
    """Facts about them that a user should know: said when a run begins."""


def opened_splits(config: Config, samples: Callable[[Split], Samples]) -> tuple[Samples, Samples | None]:
    """The train split, and the validation split where the run validates.

    Raises DataError where that does not fill one global batch.
    """
    train = samples("train")
    if not config.validation.every:
        return train, None
    held_out, rows = samples("validation"), config.batch.global_
    if len(held_out) < rows:
        has = f"has {len(held_out)} samples"
        raise DataError(f"the validation split {has}, fewer than batch.global={rows}: raise data.validation")
    return train, held_out


def prepare_corpus(data: TokenSection, config: Config, progress: ShowProgress) -> Path:
    """The folder of a run's packed corpus."""
    corpus = corpus_for(data, cache_folder(), progress)
    corpus.check_vocabulary(config.model.num_tokens)
    open_corpus(data, config, corpus.folder)
    return corpus.folder


def open_corpus(data: TokenSection, config: Config, folder: Path) -> Opened:
    """The samples that the kind of data makes of a packed corpus."""
    corpus = open_packed(folder)
    notes: list[str] = []

    def samples(split: Split) -> Samples:
        split_samples, note = data.samples(config, corpus, split)
        notes.extend([f"{split}: {note}"] if note else [])
        return split_samples

    train, held_out = opened_splits(config, samples)
    return Opened(train, held_out, corpus.tokenizer.to_json(), tuple(notes))
