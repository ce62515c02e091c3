"""What a run reads, behind one door: the launcher prepares it once, every rank opens it.

A model's family says which `Dataset` feeds it (build.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from meshwright.config import Config
from meshwright.config.schema import Data
from meshwright.data.format import Kind
from meshwright.data.packed import Material, corpus_for, open_packed, text_material
from meshwright.data.sampler import TokenBatches
from meshwright.data.split import Split
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
    """What a user should know of them: said when a run begins."""


class Dataset(Protocol):
    """How one kind of data is prepared and opened."""

    def prepare(self, config: Config, report: Any) -> Path:
        """Build the data set, or find it built; the folder. Raises DataError where it does not suit the run."""

    def open(self, config: Config, folder: Path) -> Opened:
        """The splits in a prepared folder. Raises DataError where they hold too little."""


class CorpusDataset:
    """A packed corpus of `material`; `reader` makes the samples of one split of it."""

    def __init__(
        self,
        reader: Callable[[Config, Any, Split], Samples],
        kind: Kind = "text",
        material: Callable[[Data], Material] = text_material,
    ) -> None:
        self._reader, self._kind, self._material = reader, kind, material

    def prepare(self, config: Config, report: Any) -> Path:
        corpus = corpus_for(config.data, cache_folder(), report, self._kind, self._material)
        assert isinstance(config.model, TextTransformer), config.model
        corpus.check_vocabulary(config.model.vocabulary)
        self.open(config, corpus.folder)
        return corpus.folder

    def open(self, config: Config, folder: Path) -> Opened:
        corpus = open_packed(folder)
        train = self._reader(config, corpus, "train")
        held_out = None
        if config.validation.every:
            held_out = self._reader(config, corpus, "validation")
            check_held_out(held_out, config)
        return Opened(train, held_out, corpus.tokenizer.to_json())


def check_held_out(held_out: Samples, config: Config) -> None:
    """Raises DataError where a split does not fill one global batch."""
    rows = config.batch.global_
    if len(held_out) < rows:
        has = f"has {len(held_out)} samples"
        raise DataError(f"the validation split {has}, fewer than batch.global={rows}: raise data.validation")


def next_tokens(config: Config, corpus: Any, split: Split) -> Samples:
    """Windows of tokens, each labelled with the one that follows."""
    return TokenBatches(corpus, split, config.data.sequence, config.seed)


TEXT = CorpusDataset(next_tokens)
