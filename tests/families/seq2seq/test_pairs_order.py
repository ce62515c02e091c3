"""Pairs of a global batch are of one bucket; every pair of a bucket has its turn, equally in every layout."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.families.seq2seq.pairs_order import PairOrder, bucket_edges

LENGTHS = np.array([3 + (number * number) % 61 for number in range(203)])
G = 8


def order(buckets: int, lengths: np.ndarray = LENGTHS, seed: int = 1, sequence: int = 64) -> PairOrder:
    return PairOrder(lengths, sequence, buckets, G, seed)


@settings(deadline=None)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(100, 120), st.integers(2, 12))
def test_edges_cut_the_pairs_into_equal_shares(lengths: list[int], sequence: int, buckets: int) -> None:
    edges = bucket_edges(np.array(lengths), sequence, buckets).tolist()
    assert edges == sorted(set(edges))
    assert len(edges) <= buckets
    assert all(edge % 8 == 0 or edge == sequence for edge in edges)
    assert max(lengths) <= edges[-1] <= min(sequence, max(lengths) + 7)
    for share in range(1, buckets):  # the share's pairs fit the edge, and not the edge less 8 tokens
        shortest = sorted(lengths)[: -(-len(lengths) * share // buckets)]
        assert any(max(shortest) <= edge < max(shortest) + 8 for edge in edges)


def test_one_bucket_is_of_the_sequences_length() -> None:
    assert bucket_edges(LENGTHS, 100, 1).tolist() == [100]
    assert order(1, sequence=100).samples(0, 5)[1] == 100


@pytest.mark.parametrize("buckets", [1, 4])
def test_all_pairs_of_a_bucket_come_equally_often(buckets: int) -> None:
    made = order(buckets)
    seen: dict[int, Counter[int]] = {edge: Counter() for edge in made.edges.tolist()}
    for step in range(400):
        pairs, length = made.samples(step * G, G)
        seen[length].update(pairs.tolist())
    assert sum(map(len, seen.values())) == len(LENGTHS), "every pair is of one bucket"
    for counts in seen.values():
        times = set(counts.values())  # some batches of the last epoch are still missing
        assert max(times) - min(times) <= 2
        assert min(times) >= 10


def test_within_an_epoch_of_whole_batches_each_pair_comes_once() -> None:
    lengths = np.repeat([5, 20, 40], [3 * G, 3 * G, 3 * G])
    made = order(3, lengths)
    epochs = [[made.samples(batch * G, G) for batch in range(9 * epoch, 9 * epoch + 9)] for epoch in range(3)]
    for epoch in epochs:
        assert sorted(np.concatenate([pairs for pairs, _ in epoch]).tolist()) == list(range(9 * G))
        assert Counter(length for _, length in epoch) == {8: 3, 24: 3, 40: 3}
    sequences = [[length for _, length in epoch] for epoch in epochs]
    assert sequences[0] != sequences[1], "the order of the buckets changes"
    texts = [np.concatenate([pairs for pairs, _ in epoch]).tolist() for epoch in epochs]
    assert texts[0] != texts[1]
    assert made.samples(0, G)[0].tolist() != order(3, lengths, seed=2).samples(0, G)[0].tolist()


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 900), st.sampled_from([1, 2, 4, 8]), st.integers(1, 6))
def test_the_ranks_parts_make_the_global_batch(batch: int, ranks: int, buckets: int) -> None:
    pairs, length = order(buckets).samples(batch * G, G)
    part = G // ranks
    parts = [order(buckets).samples(batch * G + rank * part, part) for rank in range(ranks)]
    assert np.concatenate([found for found, _ in parts]).tolist() == pairs.tolist()
    assert {found for _, found in parts} == {length}
    assert LENGTHS[pairs].max() <= length
    edges = order(buckets).edges
    shorter = edges[edges < length]
    if shorter.size:
        assert LENGTHS[pairs].min() > shorter[-1], "a batch is of one bucket"


def test_samples_across_batches_have_the_longest_ones_length() -> None:
    made = order(4)
    whole, length = made.samples(3, 4 * G)
    one_by_one = [made.samples(number, 1) for number in range(3, 3 + 4 * G)]
    assert whole.tolist() == [int(pairs[0]) for pairs, _ in one_by_one]
    assert length == max(found for _, found in one_by_one)


@pytest.mark.parametrize("buckets", [1, 4])
def test_held_out_pairs_come_once_in_batches_of_like_length(buckets: int) -> None:
    made = order(buckets)
    batches = [made.held_out(first, min(G, len(LENGTHS) - first)) for first in range(0, len(LENGTHS), G)]
    pairs = np.concatenate([found for found, _ in batches])
    assert sorted(pairs.tolist()) == list(range(len(LENGTHS)))
    assert pairs.tolist() == order(buckets, seed=9).held_out(0, len(LENGTHS))[0].tolist(), "of every run alike"
    assert all(LENGTHS[found].max() <= length for found, length in batches)
    if buckets > 1:
        spread = [length - int(LENGTHS[found].max()) for found, length in batches]
        assert sum(length for _, length in batches) < 0.8 * 64 * len(batches)
        assert max(spread) < 16
        assert len({length for _, length in batches[:8]}) >= 3, "the first few batches are of all lengths"
    half = [made.held_out(4 * G + rank * G // 2, G // 2) for rank in range(2)]
    assert np.concatenate([found for found, _ in half]).tolist() == batches[4][0].tolist()
    assert {length for _, length in half} == {batches[4][1]}


def test_fewer_pairs_than_a_batch() -> None:
    made = order(2, np.array([5, 6, 50]))
    for step in range(6):
        pairs, length = made.samples(step * G, G)
        assert set(pairs.tolist()) == ({0, 1} if length == 8 else {2})
    assert sorted(made.held_out(0, 3)[0].tolist()) == [0, 1, 2]
