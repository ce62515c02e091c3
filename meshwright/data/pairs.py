"""What an encoder-decoder reads: pairs of texts (pairs_samples.py), or spans of a text (span_corruption.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.config import Config
from meshwright.config.data_rules import objective_of
from meshwright.data.dataset import CorpusDataset, Dataset, Opened, check_held_out
from meshwright.data.format import open_packed
from meshwright.data.pairs_packed import pair_material
from meshwright.data.pairs_samples import pair_samples
from meshwright.data.span_corruption import span_samples
from meshwright.data.split import SPLITS


class PairDataset(CorpusDataset):
    """Packed pairs. How many of them are too long for `data.sequence` is noted."""

    def __init__(self) -> None:
        super().__init__(pair_samples, "pairs", pair_material)

    def open(self, config: Config, folder: Path) -> Opened:
        corpus = open_packed(folder)
        wanted = SPLITS if config.validation.every else SPLITS[:1]
        splits = {split: pair_samples(config, corpus, split) for split in wanted}
        held_out = splits.get("validation")
        if held_out is not None:
            check_held_out(held_out, config)
        longer = f"longer than data.sequence={config.data.sequence} tokens on one side"
        notes = (
            f"{split}: {pairs.left_out} of {pairs.num_pairs} pairs left out, {longer}"
            for split, pairs in splits.items()
            if pairs.left_out
        )
        return Opened(splits["train"], held_out, corpus.tokenizer.to_json(), tuple(notes))


class SequenceDataset:
    """Either objective of an encoder-decoder."""

    def __init__(self) -> None:
        self._of: dict[str, Dataset] = {"pairs": PairDataset(), "spans": CorpusDataset(span_samples)}

    def prepare(self, config: Config, report: Any) -> Path:
        return self._of[objective_of(config)].prepare(config, report)

    def open(self, config: Config, folder: Path) -> Opened:
        return self._of[objective_of(config)].open(config, folder)


PAIRS: Dataset = SequenceDataset()
