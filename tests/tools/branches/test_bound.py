"""The largest gain from dealing out branches, against numbers worked out by hand."""

from __future__ import annotations

from meshwright.tools.branches.findings import bound, most_loaded


def test_equal_branches() -> None:
    """4 branches of 10, twice, leave 20 of 100 common. Each of 2 sub-grids computes 40 of the 80, each of 4 or 8 20."""
    regions = [((10.0,) * 4, 2)]
    two, four, eight = (bound(100, regions, size) for size in (2, 4, 8))
    assert (two.all_ranks, two.one_subgrid) == (2.0, 100 / 60)
    assert (four.all_ranks, four.one_subgrid) == (4.0, 100 / 40)
    assert (eight.all_ranks, eight.one_subgrid) == (100 / 22.5, 100 / 40)


def test_unequal_branches_end_with_the_slowest() -> None:
    assert most_loaded((6, 3, 2, 1), 2) == 6
    assert most_loaded((6, 3, 2, 1), 3) == 6
    assert bound(20, [((6, 3, 2, 1), 1)], 2).all_ranks == 20 / (4 + 6)


def test_heads_that_sub_grids_do_not_divide() -> None:
    assert bound(12, [((1.0,) * 12, 1)], 8).all_ranks == 12 / 2
    assert bound(12, [], 4).one_subgrid == 1
