"""The data of a run behind one door: the launcher prepares it once, every rank opens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshwright.config import Config
from meshwright.data.packed import PackedCorpus, open_packed
from meshwright.data.packing import corpus_for
from meshwright.data.progress import ShowProgress
from meshwright.data.split import SPLITS, Split
from meshwright.environment import cache_folder
from meshwright.errors import DataError
from meshwright.model import Samples
from meshwright.models.section import TextTransformer


@dataclass(frozen=True)
class Opened:
    """The splits of a prepared data set, and the tokenizer's JSON where there is one."""

    train: Samples
    held_out: Samples | None
    """None where the run does not validate."""
    tokenizer: str | None
    notes: tuple[str, ...] = ()
    """Facts about them that a user should know: said when a run begins."""


class Dataset(Protocol):
    """One kind of data, prepared and opened."""

    def prepare(self, config: Config, progress: ShowProgress) -> Path:
        """Build the data set, or find it built; the folder. Raises DataError where it does not suit the run."""

    def open(self, config: Config, folder: Path) -> Opened:
        """The splits in a prepared folder. Raises DataError where they are too small."""


class CorpusDataset:
    """A packed corpus; `reader(config, corpus, split)` makes the samples of one split of it."""

    def __init__(self, reader: Callable[[Config, PackedCorpus, Split], Samples], *, pairs: bool = False) -> None:
        self._reader, self._pairs = reader, pairs

    def prepare(self, config: Config, progress: ShowProgress) -> Path:
        corpus = corpus_for(config.data, cache_folder(), progress, pairs=self._pairs)
        assert isinstance(config.model, TextTransformer), config.model
        corpus.check_vocabulary(config.model.vocabulary)
        self.open(config, corpus.folder)
        return corpus.folder

    def open(self, config: Config, folder: Path) -> Opened:
        corpus = open_packed(folder)
        splits = opened_splits(config, lambda split: self._reader(config, corpus, split))
        notes = self.notes(config, splits)
        return Opened(splits["train"], splits.get("validation"), corpus.tokenizer.to_json(), notes)

    def notes(self, config: Config, splits: Mapping[Split, Any]) -> tuple[str, ...]:
        """The notes on the samples of the splits."""
        return ()


def opened_splits(config: Config, reader: Callable[[Split], Samples]) -> dict[Split, Samples]:
    """The samples of both splits, or of the train split alone where the run does not validate.

    Raises DataError where the validation split does not fill one global batch.
    """
    splits = {split: reader(split) for split in (SPLITS if config.validation.every else SPLITS[:1])}
    rows = config.batch.global_
    if "validation" in splits and len(splits["validation"]) < rows:
        has = f"has {len(splits['validation'])} samples"
        raise DataError(f"the validation split {has}, fewer than batch.global={rows}: raise data.validation")
    return splits
