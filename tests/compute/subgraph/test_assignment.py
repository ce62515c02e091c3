"""Dealing branches: each branch once, every sub-grid some, and no sub-grid much longer than necessary."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.compute.subgraph.branches import Assignment, assign
from meshwright.ranks.errors import ConfigError

COSTS = st.lists(st.integers(0, 9), min_size=1, max_size=6)


def longest(hands: Assignment, costs: list[int]) -> int:
    return max(sum(costs[branch] for branch in hand) for hand in hands)


@given(COSTS, st.integers(1, 3))
def test_every_branch_once_and_no_sub_grid_without(costs: list[int], size: int) -> None:
    if len(costs) < size:
        return
    hands = assign(costs, size)
    assert sorted(branch for hand in hands for branch in hand) == list(range(len(costs)))
    assert len(hands) == size
    assert all(hand and list(hand) == sorted(hand) for hand in hands)
    best = min(
        max(sum(cost for cost, at in zip(costs, places, strict=True) if at == subgrid) for subgrid in range(size))
        for places in product(range(size), repeat=len(costs))
    )
    assert 3 * longest(hands, costs) <= 4 * best  # Graham's bound


def test_equal_branches_lie_side_by_side() -> None:
    assert assign([1.0] * 4, 2) == ((0, 1), (2, 3))
    assert assign([1.0] * 5, 2) == ((0, 1, 2), (3, 4))
    assert assign([0.0] * 7, 4) == ((0, 1), (2, 3), (4, 5), (6,))


def test_the_most_expensive_goes_to_the_least_loaded() -> None:
    assert assign([1, 5, 2, 4], 2) == ((0, 1), (2, 3))
    assert assign([2, 2, 9], 2) == ((2,), (0, 1))
    assert assign([0, 0, 5], 2) == ((2,), (0, 1))


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"branches=3 branches are fewer than the 4 sub-grids .*; valid: 4 or more"):
        assign([1.0] * 3, 4)
    with pytest.raises(ConfigError, match=r"costs=-1.0 is not the cost of a branch; valid: numbers from 0 up"):
        assign([1.0, -1.0], 2)
    with pytest.raises(ConfigError, match=r"costs=nan"):
        assign([1.0, float("nan")], 2)
