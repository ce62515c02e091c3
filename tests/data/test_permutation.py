"""A bijection for every size, different for every seed and stream, and fixed for all time."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.sampler import Permutation


@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**63), stream=st.integers(0, 100))
def test_every_element_comes_once(size: int, seed: int, stream: int) -> None:
    order = Permutation(size, seed, stream)(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))


def test_streams_and_seeds_differ_and_do_not_look_sorted() -> None:
    positions = np.arange(10_000)
    orders = [Permutation(10_000, seed, stream)(positions) for seed, stream in [(1, 0), (1, 1), (2, 0)]]
    for at, order in enumerate(orders):
        assert abs(np.corrcoef(positions, order)[0, 1]) < 0.05
        # In a random order, neighbours rise as often as fall, and each tenth of the order has every part equally.
        assert 0.48 < (np.diff(order) > 0).mean() < 0.52
        assert np.histogram(order[:1000], bins=10, range=(0, 10_000))[0].min() > 60
        for other in orders[:at]:
            assert (order == other).mean() < 0.01


def test_huge_sizes_cost_nothing_and_positions_are_independent() -> None:
    order = Permutation(10**12, 1, 0)
    positions = np.array([0, 1, 10**12 - 1, 123_456_789_012])
    together = order(positions)
    assert len(set(together.tolist())) == 4
    assert together.min() >= 0
    assert together.max() < 10**12
    assert [int(order(positions[at : at + 1])[0]) for at in range(4)] == together.tolist()


def test_the_order_is_fixed_for_all_time() -> None:
    assert Permutation(10, 1, 0)(np.arange(10)).tolist() == [1, 3, 9, 8, 5, 6, 4, 7, 0, 2]
