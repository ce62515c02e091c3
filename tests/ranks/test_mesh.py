"""Groups are made by their members alone, so stages may ask for different groups."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshwright.ranks.comm import RankGroup
from meshwright.ranks.environment import Environment
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import open_mesh
from meshwright.ranks.peers import Peer, Peers
from meshwright.ranks.torch_comm import TorchComm, TorchTransport
from meshwright.ranks.transport import Transport
from meshwright.ranks.transports import TransportName
from tests.mailbox_cases import spawn_within
from tests.mesh_cases import ASKED, ask_by_stage
from tests.mpi_workers import Answer
from tests.workers import free_port, run_ranks

SIXTEEN = Grid((("data", 2), ("pipe", 2), ("row", 4)))
UNEVEN = Grid((("data", 2), ("pipe", 3), ("row", 2)))


def check(grid: Grid, answers: list[Answer]) -> None:
    for rank, (_, results) in enumerate(answers):
        asked = ASKED[grid.coordinates(rank)["pipe"]]
        assert sorted(results) == sorted("+".join(axes) for axes in asked)
        for axes in asked:
            assert results["+".join(axes)].tolist() == [sum(grid.group(rank, *axes))], f"{axes} at rank {rank}"


@pytest.mark.parametrize("grid", [SIXTEEN, UNEVEN], ids=["16-ranks", "12-ranks"])
@pytest.mark.parametrize("transport", ["torch", "threads"])
def test_stages_ask_for_different_groups(grid: Grid, transport: TransportName) -> None:
    check(grid, run_ranks(ask_by_stage, grid, transport=transport))


@pytest.mark.parametrize("device, closes", [("cpu", True), ("cuda", False)])
def test_a_rank_that_raises_reports_before_anything_that_waits(
    device: str, closes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL's end waits for peers that wait for this rank."""
    closed: list[bool] = []
    monkeypatch.setattr(Transport, "close", lambda transport: closed.append(True))

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


def two_halves(rank: int, port: int) -> None:
    """Make groups for host and device tensors, as under NCCL. A host without GPUs tries only the host's group."""
    patience = timedelta(seconds=30)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0, timeout=patience)
    dist.init_process_group("cpu:gloo,cuda:gloo", store=store, rank=rank, world_size=2, timeout=patience)
    peers = Peers([Peer(0, "here"), Peer(1, "here")], rank)
    transport = TorchTransport(patience, torch.device("cpu"), births=True, peers=peers)
    comm = TorchComm(RankGroup("row", (0, 1), rank), transport._process_group("row", (0, 1), rank))
    mine, other = torch.tensor([float(rank)]), torch.empty(1)
    comm.exchange(mine, 1 - rank, other, 1 - rank)
    comm.all_reduce(mine)
    comm.barrier()
    assert (mine.item(), other.item()) == (1.0, 1.0 - rank)
    transport.close()


def test_groups_have_a_half_on_the_host() -> None:
    spawn_within(60, two_halves, free_port(), processes=2, start_method="fork")


def test_stages_ask_for_different_groups_over_mpi(request: pytest.FixtureRequest) -> None:
    grid = Grid((("data", 2), ("pipe", 2), ("row", 1)))
    check(grid, request.getfixturevalue("mpi")(4)["stages-ask"])
