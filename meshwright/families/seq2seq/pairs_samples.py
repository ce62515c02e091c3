"""The batches of an encoder-decoder, and the samples of packed pairs.

| entry       | shape  | holds                                                                   |
|-------------|--------|-------------------------------------------------------------------------|
| source      | [B, S] | the source with an end token; padding                                   |
| source_mask | [B, S] | 1, in the padding 0                                                     |
| target      | [B, T] | a start token, then the target without its end token; padding           |
| labels      | [B, T] | the target with an end token; in the padding -100                       |

All int64. A pair with a side of more than `data.sequence` tokens, end token included, is left out. This is common in
the training of translation: half a target would teach the model to stop early.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from meshwright.compute.model import IGNORED, Batch, Samples
from meshwright.config import Config
from meshwright.data.packed import PackedCorpus, document_ends
from meshwright.data.section import Lengths
from meshwright.data.split import Split
from meshwright.families.seq2seq.data_section import PairData
from meshwright.families.seq2seq.pairs_order import PairOrder
from meshwright.families.seq2seq.specials import SequenceSpecials, specials_for
from meshwright.ranks.errors import DataError


def sequence_batch(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], specials: SequenceSpecials, lengths: Lengths
) -> Batch:
    """Build a batch from the ids of sources and targets, each with an end token, padded to `lengths`."""
    read_shape, written_shape = (len(sources), lengths.source), (len(targets), lengths.target)
    source, source_mask = np.full(read_shape, specials.padding, dtype=np.int64), np.zeros(read_shape, dtype=np.int64)
    target, labels = (
        np.full(written_shape, specials.padding, dtype=np.int64),
        np.full(written_shape, IGNORED, dtype=np.int64),
    )
    target[:, 0] = specials.start
    for row, (read, written) in enumerate(zip(sources, targets, strict=True)):
        source[row, : len(read)] = read
        source_mask[row, : len(read)] = 1
        # The decoder's input is the target, shifted one place to the right behind the start token.
        target[row, 1 : len(written)] = written[:-1]
        labels[row, : len(written)] = written
    entries = {"source": source, "source_mask": source_mask, "target": target, "labels": labels}
    return {name: torch.from_numpy(entry) for name, entry in entries.items()}


class PairSamples:
    """The pairs of a stream of documents: source, target, source, ..., each followed by the end token."""

    def __init__(
        self,
        tokens: np.ndarray,
        specials: SequenceSpecials,
        sequence: int,
        *,
        buckets: int,
        batch: int,
        seed: int,
        name: str,
    ) -> None:
        """Find the pairs that are short enough.

        Args:
            tokens: the stream [n].
            specials: the model's special tokens.
            sequence: the most tokens of a side.
            buckets: the most lengths of batches.
            batch: pairs in a global batch.
            seed: the run's seed.
            name: the name of the data in messages.

        Raises:
            DataError: for an odd number of documents, or if no pair is short enough.
        """
        self._tokens, self._specials = tokens, specials
        ends = document_ends(tokens, specials.end) + 1
        # Sources and targets alternate, so a missing text would turn all later targets into sources.
        if len(ends) % 2:
            raise DataError(f"{name}: has {len(ends)} texts, which do not pair up; prepare it again")
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        lengths = (ends - starts).reshape(-1, 2)  # of source and target, with the end token
        fits = lengths.max(axis=1) <= sequence
        longer = f"longer than data.sequence={sequence} tokens on one side"
        self.note = "" if fits.all() else f"{(~fits).sum()} of {len(fits)} pairs left out, {longer}"
        if not fits.any():
            has = f"has no pair of at most data.sequence={sequence} tokens a side"
            shortest = int(lengths.max(axis=1).min()) if len(lengths) else 0
            raise DataError(f"{name}: {has}; the shortest of its {len(fits)} has {shortest}")
        self._starts, self._lengths = starts.reshape(-1, 2)[fits], lengths[fits]
        self._order = PairOrder(self._lengths.max(axis=1), sequence, buckets, batch, seed)

    def __len__(self) -> int:
        """Count the pairs of the split that are short enough."""
        return len(self._lengths)

    def samples(self, first: int, count: int) -> Batch:
        return self._read(*self._order.samples(first, count))

    def held_out(self, first: int, count: int) -> Batch:
        assert 0 <= first <= first + count <= len(self), (first, count, len(self))
        return self._read(*self._order.held_out(first, count))

    def _read(self, pairs: np.ndarray, rows: int) -> Batch:
        sides = [
            [
                self._tokens[start : start + length]
                for start, length in zip(self._starts[pairs, side], self._lengths[pairs, side], strict=True)
            ]
            for side in (0, 1)
        ]
        return sequence_batch(sides[0], sides[1], self._specials, Lengths(rows, rows))


def pair_samples(data: PairData, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
    """Open the samples of a split of a run's pairs, with a note. Raises DataError or ConfigError for unfit pairs."""
    pairs = PairSamples(
        packed.tokens(split), specials_for(config, packed.tokenizer), data.sequence,
        buckets=data.buckets, batch=config.batch.global_, seed=config.seed, name=packed.name(split),
    )  # fmt: skip
    return pairs, pairs.note
