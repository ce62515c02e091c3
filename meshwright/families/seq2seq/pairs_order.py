"""The order of pairs: which make up which global batch, and how long its rows are. Nothing here has state.

Pairs of like length share a bucket. A global batch is of one bucket, and its rows are padded to the bucket's edge: the
length of its longest pair up to the next multiple of 8, at most `sequence`. The edges cut the pairs, sorted by their
longer side, into equal shares; edges that coincide are one bucket. With one bucket all rows have `sequence` tokens.

Training: each bucket goes through its pairs again and again, in another seeded order each time; what does not fill a
batch begins the next one, so no pair is dropped, and all of a bucket come equally often. In an epoch every bucket has
as many batches as its pairs fill, to the nearest whole number and one at least; the epoch's batches are in a seeded
order, another one each time.

| from | comes | by |
|---|---|---|
| a sample's number | batch of the run, place in it | divmod(number, G), G: pairs in a global batch |
| the batch | epoch, place in it | divmod(batch, M), M: batches in an epoch |
| the place | bucket, and which of its m batches in an epoch | the epoch's permutation of M |
| these | the bucket's batch e x m + which, of the whole run | e: the epoch |
| this | G pairs of the bucket, one after the other | its endless stream of permutations |
"""

from __future__ import annotations

import math

import numpy as np

from meshwright.compute.parameters.shard import seed_of
from meshwright.data.sampler import Permutation, Sampler
from meshwright.data.section import BUCKET_MULTIPLE


class PairOrder:
    """sample number -> pair, and the length of its rows."""

    def __init__(self, lengths: np.ndarray, sequence: int, buckets: int, batch: int, seed: int) -> None:
        """`lengths` [n]: tokens of each pair's longer side, at most `sequence`; `batch`: pairs in a global batch."""
        assert len(lengths), "no pairs"
        self._batch, self._seed = batch, seed
        self.edges = bucket_edges(lengths, sequence, buckets)
        """[buckets] ascending: the lengths of rows."""
        bucket_of = np.searchsorted(self.edges, lengths)
        self._members = [np.flatnonzero(bucket_of == bucket) for bucket in range(len(self.edges))]
        self._streams = [
            Sampler(len(members), seed_of(f"{seed}/pairs/{bucket}")) for bucket, members in enumerate(self._members)
        ]
        # At least one, or the pairs of a small bucket would never be learned.
        self._batches = np.array([max(1, round(len(members) / batch)) for members in self._members])
        # Held out: sorted by bucket and cut into batches, these in a seeded order, so that a validation of few batches
        # has all lengths. The pairs behind the last whole batch stay behind: a batch of fewer is the last one.
        whole = len(bucket_of) // batch
        by_bucket = np.argsort(bucket_of[: whole * batch], kind="stable").reshape(whole, batch)
        if whole:
            by_bucket = by_bucket[Permutation(whole, 0, 0)(np.arange(whole))]
        self._held_out = np.concatenate([by_bucket.flatten(), np.arange(whole * batch, len(bucket_of))])
        longest = np.maximum.reduceat(bucket_of[self._held_out], np.arange(0, len(bucket_of), batch))
        self._held_out_edges = self.edges[longest]

    def samples(self, first: int, count: int) -> tuple[np.ndarray, int]:
        """(pairs [count], length) of samples first ... first + count - 1; of many batches: the longest one's length."""
        pairs, length, number = np.empty(count, dtype=np.int64), 0, first
        num_batches, ends = int(self._batches.sum()), np.cumsum(self._batches)
        while number < first + count:
            batch, offset = divmod(number, self._batch)
            taken = min(self._batch - offset, first + count - number)
            epoch, place = divmod(batch, num_batches)
            slot = int(Permutation(num_batches, self._seed, epoch)(np.array([place]))[0])
            bucket = int(np.searchsorted(ends, slot, side="right"))
            within = slot - int(ends[bucket] - self._batches[bucket])
            nth = epoch * int(self._batches[bucket]) + within  # among all of the bucket's batches, of all epochs
            members = self._members[bucket]
            pairs[number - first : number - first + taken] = members[
                self._streams[bucket].rows(nth * self._batch + offset, taken)
            ]
            length = max(length, int(self.edges[bucket]))
            number += taken
        return pairs, length

    def held_out(self, first: int, count: int) -> tuple[np.ndarray, int]:
        """Held-out pairs by number, in an order that never changes; the first few batches have all lengths."""
        batches = range(first // self._batch, math.ceil((first + count) / self._batch))
        length = max((int(self._held_out_edges[batch]) for batch in batches), default=0)
        return self._held_out[first : first + count], length


def bucket_edges(lengths: np.ndarray, sequence: int, buckets: int) -> np.ndarray:
    """[at most `buckets`] ascending lengths, each the longest of an equal share of the pairs, rounded up."""
    if buckets == 1:
        return np.array([sequence], dtype=np.int64)
    ascending = np.sort(lengths)
    lasts = np.ceil(len(lengths) * np.arange(1, buckets + 1) / buckets).astype(np.int64) - 1
    rounded = -(-ascending[np.maximum(lasts, 0)] // BUCKET_MULTIPLE) * BUCKET_MULTIPLE
    # Edges that coincide are one bucket.
    return np.unique(np.minimum(rounded, sequence)).astype(np.int64)
