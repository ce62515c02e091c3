"""Mesh: the grid as one rank sees it, with a Comm for each axis. Built once, passed to everything.

A transport makes the comms: `TorchTransport` (gloo, NCCL), `MpiTransport`, `SoloTransport` (one process, no library),
`LedgerTransport` (a plan).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from meshwright.comm import Comm, Ledger, LedgerComm, SoloComm, TorchComm
from meshwright.comm_mpi import MpiComm
from meshwright.environment import Environment, Rendezvous
from meshwright.grid import Grid

TIMEOUT = timedelta(minutes=10)


class Transport(Protocol):
    """Makes the comm over a group of ranks. Called by all ranks of the world, in the same order."""

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm: ...

    def close(self) -> None: ...


class SoloTransport:
    """One process: every group has one rank."""

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm:
        return SoloComm("+".join(axes), (rank,), 0, ledger)

    def close(self) -> None:
        return None


class LedgerTransport:
    """A planned job, of which only this rank is there: what it would send is written down."""

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm:
        ranks = grid.group(rank, *axes)
        return LedgerComm("+".join(axes), ranks, ranks.index(rank), ledger)

    def close(self) -> None:
        return None


class TorchTransport:
    """torch.distributed over an initialised default process group."""

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm:
        mine = grid.group(rank, *axes)
        name = "+".join(axes)
        if len(mine) == 1:
            return SoloComm(name, mine, 0, ledger)
        if len(mine) == grid.world_size:
            assert dist.group.WORLD is not None, "the default process group is not initialised"
            return TorchComm(name, mine, rank, ledger, dist.group.WORLD)
        groups = {ranks: dist.new_group(list(ranks)) for ranks in grid.groups(*axes)}
        return TorchComm(name, mine, mine.index(rank), ledger, groups[mine])

    def close(self) -> None:
        dist.destroy_process_group()


class MpiTransport:
    """MPI's world, split by axis."""

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm:
        from mpi4py import MPI

        mine = grid.group(rank, *axes)
        split = MPI.COMM_WORLD.Split(color=mine[0], key=mine.index(rank))
        name = "+".join(axes)
        return (
            MpiComm(name, mine, mine.index(rank), ledger, split) if len(mine) > 1 else SoloComm(name, mine, 0, ledger)
        )

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class Mesh:
    """`token_axes`: the axes that split the batch's tokens, over which gradients of uncut parameters are summed."""

    grid: Grid
    rank: int
    device: torch.device
    transport: Transport
    token_axes: tuple[str, ...] = ("data",)
    ledger: Ledger = field(default_factory=Ledger)
    _comms: dict[tuple[str, ...], Comm] = field(default_factory=dict)

    def comm(self, *axes: str) -> Comm:
        """The comm over the given axes together. The first call for a set of axes is collective."""
        axes = self.grid.ordered(axes)
        if axes not in self._comms:
            self._comms[axes] = self.transport.comm(self.grid, self.rank, axes, self.ledger)
        return self._comms[axes]

    @property
    def world(self) -> Comm:
        """All ranks."""
        return self.comm(*self.grid.names)

    def size(self, *axes: str) -> int:
        return self.grid.size(*axes)

    def index(self, *axes: str) -> int:
        """This rank's position on the given axes."""
        return self.grid.index(self.rank, *axes)


def solo_mesh(device: torch.device, names: tuple[str, ...] = ("data",)) -> Mesh:
    """A mesh of one rank, whose axes all have size 1."""
    return Mesh(Grid(tuple((name, 1) for name in names)), 0, device, SoloTransport(), names)


def planned_mesh(grid: Grid, rank: int, token_axes: tuple[str, ...]) -> Mesh:
    """A rank's mesh of a job that does not run: tensors have shapes and no numbers, comms only write the ledger."""
    return Mesh(grid, rank, torch.device("meta"), LedgerTransport(), token_axes)


@contextmanager
def open_mesh(
    grid: Grid,
    environment: Environment,
    transport: str,
    device: torch.device,
    point: Rendezvous,
    token_axes: tuple[str, ...] = ("data",),
) -> Iterator[Mesh]:
    """Connect this process to the others of its job, who meet at `point`, and disconnect at the end."""
    opened = _open(grid, environment, transport, device, point)
    try:
        yield Mesh(grid, environment.rank, device, opened, token_axes)
    finally:
        opened.close()


def _open(grid: Grid, environment: Environment, transport: str, device: torch.device, point: Rendezvous) -> Transport:
    if transport == "mpi":
        return MpiTransport()
    if grid.world_size == 1:
        return SoloTransport()
    # A fresh prefix for each attempt: after a restart the store still holds the dead attempt's keys.
    store = dist.TCPStore(point.address, point.port, environment.world_size, point.is_server(environment), TIMEOUT)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"attempt-{environment.attempt}", store),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    return TorchTransport()
