"""Grid: ranks, coordinates and groups agree with each other, for any axes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.ranks.grid import Grid

NAMES = ("data", "pipe", "depth", "row", "col")


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Draw grids of one to three ranks an axis, with some axes split into parts at any depth of the nesting."""
    names = draw(st.permutations(NAMES))[: draw(st.integers(0, 4))]
    parts = {name: draw(st.lists(st.integers(1, 3), min_size=1, max_size=2)) for name in names}
    nesting = draw(st.permutations([(name, size) for name, sizes in parts.items() for size in sizes]))
    return Grid(tuple((name, math.prod(sizes)) for name, sizes in parts.items()), nesting=tuple(nesting))


@given(grids())
def test_rank_and_coordinates_are_inverse(grid: Grid) -> None:
    seen = [grid.coordinates(rank) for rank in range(grid.world_size)]
    assert [grid.rank(point) for point in seen] == list(range(grid.world_size))
    assert len({tuple(point.items()) for point in seen}) == math.prod(size for _, size in grid.axes)


@given(grids(), st.data())
def test_groups_partition_the_ranks(grid: Grid, data: st.DataObject) -> None:
    names = data.draw(st.sets(st.sampled_from(grid.names))) if grid.names else set()
    groups = grid.groups(*names)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    assert {len(group) for group in groups} == {grid.size(*names)}
    for group in groups:
        assert list(group) == sorted(group)
        for index, rank in enumerate(group):
            assert grid.group(rank, *names) == group
            assert grid.index(rank, *names) == index
            others = [(name, here) for name, here in grid.coordinates(rank).items() if name not in names]
            assert set(others) <= set(grid.coordinates(group[0]).items())


def test_the_last_axis_is_the_closest() -> None:
    grid = Grid((("data", 2), ("row", 2), ("col", 3)))
    assert grid.world_size == 12
    assert grid.coordinates(7) == {"data": 1, "row": 0, "col": 1}
    assert grid.group(7, "col") == (6, 7, 8)
    assert grid.group(7, "row") == (7, 10)
    assert grid.group(7, "data") == (1, 7)
    assert grid.group(7, "row", "col") == grid.group(7, "col", "row") == tuple(range(6, 12))
    assert grid.group(7) == (7,)
    assert grid.groups("data", "row") == [(0, 3, 6, 9), (1, 4, 7, 10), (2, 5, 8, 11)]


def test_blocks_of_split_axes() -> None:
    """Row 4 x col 4 in blocks of 2 x 2: by row and column, the ranks of Optimus' figure."""
    square = (("row", 4), ("col", 4))
    grid = Grid(square, nesting=(("row", 2), ("col", 2), ("row", 2), ("col", 2)))
    ranks = [[grid.rank({"row": row, "col": col}) for col in range(4)] for row in range(4)]
    assert ranks == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    assert grid.group(6, "col") == (2, 3, 6, 7)
    assert grid.index(6, "col") == grid.coordinates(6)["col"] == 2
    assert grid.group(6, "row", "col") == tuple(range(16))
    assert grid != Grid(square)
    with pytest.raises(AssertionError, match="leaves ranks out"):
        Grid(square, nesting=(("row", 2), ("col", 4)))


def test_axes_of_size_one_are_ordinary() -> None:
    grid = Grid((("data", 1), ("pipe", 3), ("row", 1)))
    assert grid.group(2, "row") == (2,)
    assert grid.group(2, "data", "pipe") == (0, 1, 2)
    assert Grid(()).coordinates(0) == {}
    assert Grid(()).group(0) == (0,)


def test_ordered_gives_grid_order_each_once() -> None:
    grid = Grid((("data", 2), ("row", 2), ("col", 2)))
    assert grid.ordered(["col", "data", "col"]) == ("data", "col")


def test_our_own_mistakes_are_asserted() -> None:
    with pytest.raises(AssertionError, match="named twice"):
        Grid((("data", 2), ("data", 3)))
    with pytest.raises(AssertionError, match="no ranks"):
        Grid((("data", 0),))
    grid = Grid((("data", 2),))
    with pytest.raises(AssertionError, match="rank 2 outside"):
        grid.coordinates(2)
    with pytest.raises(AssertionError, match="unknown axes"):
        grid.ordered(["row"])
    with pytest.raises(KeyError):
        grid.size("row")


@given(grids(), st.data())
def test_ends_join_the_first_and_the_last_stage(grid: Grid, data: st.DataObject) -> None:
    others = [name for name in grid.names if name != "pipe"]
    names = data.draw(st.sets(st.sampled_from(others))) if others else set()
    groups = grid.groups(*names, "ends")
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    last = dict(grid.axes).get("pipe", 1) - 1
    for group in groups:
        stages = {grid.coordinates(rank).get("pipe", 0) for rank in group}
        between = len(stages) == 1 and not stages & {0, last}
        assert stages == {0, last} or between
        assert len(group) == grid.size(*names) * len(stages)
