"""Groups are made by their members alone, so that stages may ask for different ones."""

from __future__ import annotations

import pytest

from meshwright.ranks.grid import Grid
from tests.mesh_cases import ASKED, ask_by_stage
from tests.mpi_workers import Answer
from tests.workers import run_ranks

SIXTEEN = Grid((("data", 2), ("pipe", 2), ("row", 4)))
UNEVEN = Grid((("data", 2), ("pipe", 3), ("row", 2)))


def check(grid: Grid, answers: list[Answer]) -> None:
    for rank, (_, results) in enumerate(answers):
        asked = ASKED[grid.coordinates(rank)["pipe"]]
        assert sorted(results) == sorted("+".join(axes) for axes in asked)
        for axes in asked:
            assert results["+".join(axes)].tolist() == [sum(grid.group(rank, *axes))], f"{axes} at rank {rank}"


@pytest.mark.parametrize("grid", [SIXTEEN, UNEVEN], ids=["16-ranks", "12-ranks"])
def test_stages_ask_for_different_groups(grid: Grid) -> None:
    check(grid, run_ranks(ask_by_stage, grid))


def test_stages_ask_for_different_groups_over_mpi(request: pytest.FixtureRequest) -> None:
    grid = Grid((("data", 2), ("pipe", 2), ("row", 1)))
    check(grid, request.getfixturevalue("mpi")(4)["stages-ask"])
