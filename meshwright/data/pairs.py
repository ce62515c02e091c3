"""What an encoder-decoder reads: pairs of texts (pairs_samples.py), or spans of a text (span_corruption.py)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from meshwright.config import Config
from meshwright.config.data_rules import objective_of
from meshwright.data.dataset import CorpusDataset, Dataset, Opened
from meshwright.data.format import open_packed
from meshwright.data.pairs_packed import pair_material
from meshwright.data.pairs_samples import pair_samples
from meshwright.data.span_corruption import span_samples
from meshwright.data.split import SPLITS

_PAIRS, _SPANS = CorpusDataset(pair_samples, "pairs", pair_material), CorpusDataset(span_samples)


class SequenceDataset:
    """Either objective of an encoder-decoder. How many pairs are too long for `data.sequence` is reported."""

    def prepare(self, config: Config, report: Any) -> Path:
        if objective_of(config) == "spans":
            return _SPANS.prepare(config, report)
        folder = _PAIRS.prepare(config, report)
        corpus = open_packed(folder)
        for split in SPLITS:
            pairs = pair_samples(config, corpus, split)
            if pairs.left_out:
                longer = f"with a side of more than data.sequence={config.data.sequence} tokens"
                report(f"the {split} split: {pairs.left_out} of {pairs.num_pairs} pairs {longer} left out", None)
        return folder

    def open(self, config: Config, folder: Path) -> Opened:
        return (_SPANS if objective_of(config) == "spans" else _PAIRS).open(config, folder)


PAIRS: Dataset = SequenceDataset()
