"""The order of pairs: the pairs of each global batch, and the length of the batch's rows. Nothing here has state.

Pairs of similar length share a bucket. A global batch has pairs of one bucket, padded to the bucket's edge: the length
of the bucket's longest pair, rounded up to a multiple of 8, at most `sequence`. The pairs are sorted by the longer side
and divided into equal shares; shares with equal edges are one bucket. With one bucket all rows have `sequence` tokens.

Training: each bucket repeats its pairs, each time in another seeded order. Pairs that do not fill a batch begin the
next one, so that no pair is dropped and all pairs of a bucket are read equally often. In an epoch every bucket has
pairs / G batches, rounded to the nearest whole number, at least one. Each epoch has another seeded order of batches.

| from | computed | by |
|---|---|---|
| a sample's number | batch of the run, place in it | divmod(number, G), G: pairs in a global batch |
| the batch | epoch, place in it | divmod(batch, M), M: batches in an epoch |
| the place | bucket, and i, the number among its m batches in an epoch | the epoch's permutation of M |
| bucket and i | the bucket's batch e x m + i, of the whole run | e: the epoch |
| the bucket's batch | G consecutive pairs of the bucket | the bucket's endless stream of permutations |
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.compute.parameters.shard import seed_of
from meshwright.data.sampler import Permutation, Sampler
from meshwright.data.section import BUCKET_MULTIPLE


class PairOrder:
    """The map from a sample's number to a pair and the length of the batch's rows."""

    def __init__(self, lengths: np.ndarray, sequence: int, buckets: int, batch: int, seed: int) -> None:
        """Sort pairs into buckets.

        Args:
            lengths: tokens of each pair's longer side [n], at most `sequence`.
            sequence: the most tokens of a side.
            buckets: the most buckets.
            batch: pairs in a global batch.
            seed: the run's seed.
        """
        assert len(lengths), "no pairs"
        self._batch, self._seed = batch, seed
        self.edges = bucket_edges(lengths, sequence, buckets)
        """[buckets] ascending: the lengths of rows."""
        bucket_of = np.searchsorted(self.edges, lengths)
        self._members = [np.flatnonzero(bucket_of == bucket) for bucket in range(len(self.edges))]
        self._streams = [
            Sampler(len(members), seed_of(f"{seed}/pairs/{bucket}")) for bucket, members in enumerate(self._members)
        ]
        # At least one batch, since the pairs of a small bucket would otherwise never be learned.
        self._batches = np.array([max(1, round(len(members) / batch)) for members in self._members])
        # Held-out pairs are sorted by bucket and cut into batches. The batches are in a seeded order, so that a
        # validation of few batches has all lengths. The pairs after the last full batch stay last, as a smaller batch.
        whole = len(bucket_of) // batch
        by_bucket = np.argsort(bucket_of[: whole * batch], kind="stable").reshape(whole, batch)
        if whole:
            by_bucket = by_bucket[Permutation(whole, 0, 0)(np.arange(whole))]
        self._held_out = np.concatenate([by_bucket.flatten(), np.arange(whole * batch, len(bucket_of))])
        longest = np.maximum.reduceat(bucket_of[self._held_out], np.arange(0, len(bucket_of), batch))
        self._held_out_edges = self.edges[longest]

    def samples(self, first: int, count: int) -> tuple[np.ndarray, int]:
        """Return (pairs [count], length of rows) of the samples from `first` on; over several batches: the longest."""
        pairs, length, position = np.empty(count, dtype=np.int64), 0, first
        num_batches, ends = int(self._batches.sum()), np.cumsum(self._batches)
        while position < first + count:
            batch, offset = divmod(position, self._batch)
            taken = min(self._batch - offset, first + count - position)
            epoch, batch_index = divmod(batch, num_batches)
            slot = int(Permutation(num_batches, self._seed, epoch)(np.array([batch_index]))[0])
            bucket = int(np.searchsorted(ends, slot, side="right"))
            within = slot - int(ends[bucket] - self._batches[bucket])
            nth = epoch * int(self._batches[bucket]) + within  # the number among the bucket's batches of all epochs
            members = self._members[bucket]
            pairs[position - first : position - first + taken] = members[
                self._streams[bucket].rows(nth * self._batch + offset, taken)
            ]
            length = max(length, int(self.edges[bucket]))
            position += taken
        return pairs, length

    def held_out(self, first: int, count: int) -> tuple[np.ndarray, int]:
        """Return held-out pairs and the length of rows, in a fixed order; the first few batches have all lengths."""
        batches = range(first // self._batch, math.ceil((first + count) / self._batch))
        length = max((int(self._held_out_edges[batch]) for batch in batches), default=0)
        return self._held_out[first : first + count], length


def bucket_edges(lengths: np.ndarray, sequence: int, buckets: int) -> np.ndarray:
    """Return at most `buckets` ascending lengths, each the longest of an equal share of the pairs, rounded up."""
    if buckets == 1:
        return np.array([sequence], dtype=np.int64)
    ascending = np.sort(lengths)
    lasts = np.ceil(len(lengths) * np.arange(1, buckets + 1) / buckets).astype(np.int64) - 1
    rounded = -(-ascending[np.maximum(lasts, 0)] // BUCKET_MULTIPLE) * BUCKET_MULTIPLE
    # Shares with equal edges are one bucket.
    return np.unique(np.minimum(rounded, sequence)).astype(np.int64)
