"""Jobs in which a rank waits in vain. `axes`: of the mesh; every wait has a timeout of some seconds."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch

from meshwright.ranks.environment import Environment, rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.launch import StopRequest
from meshwright.ranks.mailbox import TensorMeta, both_sides
from meshwright.ranks.mesh import Mesh, open_mesh
from meshwright.ranks.timeouts import Timeouts

TIMEOUT = Timeouts(join=30, wait=3)
FORM = TensorMeta((4, 4), torch.float32)


def reduced(mesh: Mesh) -> None:
    """Run two collectives: #1 and #2 on the axis."""
    for _ in range(2):
        mesh.comm("data").all_reduce(torch.ones(1000))


def stand_still(mesh: Mesh) -> None:
    """Stop the last rank before the third collective."""
    reduced(mesh)
    mesh.recorder.step = 7
    if mesh.rank == mesh.world.size - 1:
        time.sleep(1.6)  # the rank's record says step 7
        os.kill(os.getpid(), signal.SIGSTOP)
    mesh.comm("data").all_reduce(torch.ones(1000))


def compute(mesh: Mesh) -> None:
    """Load data for ever on rank 1."""
    reduced(mesh)
    mesh.recorder.enter("data")
    if mesh.rank == 1:
        time.sleep(600)
    mesh.comm("data").all_reduce(torch.ones(1000), wait=False).wait()


def skip(mesh: Mesh) -> None:
    """Skip a collective on rank 1, so that rank 1 is one ahead in the next."""
    reduced(mesh)
    if mesh.rank != 1:
        mesh.comm("data").all_reduce(torch.ones(1000))
    mesh.comm("data").barrier()


def say_nothing(mesh: Mesh) -> None:
    """Never send from stage 0 of a pipeline."""
    mailbox = mesh.mailbox("data")
    mailbox.open(0, both_sides(FORM), before=int(mesh.rank == 1), after=0)
    if mesh.rank == 0:
        mesh.recorder.task = "F3"
        time.sleep(600)
    mailbox.wait()


def leave_early(mesh: Mesh) -> None:
    """End rank 1 while rank 0 still runs."""
    reduced(mesh)
    if mesh.rank == 0:
        mesh.comm("data").barrier()


def hang(
    environment: Environment, stop: StopRequest, transport: str, how: str, out: str, wait: float = TIMEOUT.wait
) -> None:
    """Call the function named `how` in the first attempt; in the other attempts sum over all ranks."""
    if how == "never_join" and environment.rank == 1:
        time.sleep(600)
    grid = Grid((("data", environment.world_size), ("pipe", 1)))
    timeout = Timeouts(join=8 if how == "never_join" else TIMEOUT.join, wait=wait)
    with open_mesh(grid, environment, transport, torch.device("cpu"), rendezvous(), ("data",), timeout) as mesh:
        Path(out, f"pid-{environment.attempt}-{mesh.rank}").write_text(str(os.getpid()))
        if environment.attempt == 0:
            globals()[how](mesh)
        else:
            reduced(mesh)
            Path(out, f"done-{mesh.rank}").touch()
