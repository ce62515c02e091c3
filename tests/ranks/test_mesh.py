"""Groups are made by their members alone, so that stages may ask for different ones."""

from __future__ import annotations

import pytest
import torch

from meshwright.environment import Environment
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import SoloTransport, open_mesh
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


@pytest.mark.parametrize("device, closes", [("cpu", True), ("cuda", False)])
def test_a_rank_that_raises_reports_before_anything_that_waits(
    device: str, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's end waits for peers that wait for this rank."""
    closed: list[bool] = []
    monkeypatch.setattr(SoloTransport, "close", lambda transport: closed.append(True))

    def work(error: Exception | None) -> None:
        environment = Environment(0, 1, 0, 1, 0, "none")
        with open_mesh(Grid((("data", 1),)), environment, "torch", torch.device(device), None):
            if error is not None:
                raise error

    with pytest.raises(ValueError, match="in step 3"):
        work(ValueError("in step 3"))
    assert bool(closed) == closes
    closed.clear()
    work(None)
    assert closed


def test_stages_ask_for_different_groups_over_mpi(request: pytest.FixtureRequest) -> None:
    grid = Grid((("data", 2), ("pipe", 2), ("row", 1)))
    check(grid, request.getfixturevalue("mpi")(4)["stages-ask"])
