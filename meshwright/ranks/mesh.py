"""Mesh: the grid as one rank sees it, with a Comm for each axis. Built once, passed to everything.

A transport makes the comms and mailboxes: `TorchTransport` (gloo, NCCL), `MpiTransport`, `SoloTransport` (one process,
no library), `LedgerTransport` (a plan).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from meshwright.config.schema import Timeout
from meshwright.environment import Environment, Rendezvous
from meshwright.errors import LaunchError
from meshwright.ranks import comm_store
from meshwright.ranks.comm import Comm, LedgerComm, Observer, SoloComm, TorchComm, unobserved
from meshwright.ranks.flight_recorder import CONNECT, Call, FlightRecorder
from meshwright.ranks.grid import ENDS, Grid
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mailbox import Mailbox, PlannedMailbox, Side, SoloMailbox
from meshwright.ranks.mailbox_torch import Channel, GlooMailbox, NcclMailbox
from meshwright.ranks.mpi import MpiComm, MpiMailbox
from meshwright.ranks.watchdog import Watchdog

TORCH_MARGIN_SECONDS = 60.0
"""How much longer torch's own timeouts are than the watchdog's, which can say more."""

DEFAULT_TIMEOUT = Timeout()


class Transport(Protocol):
    """Makes the comm over a group of ranks, the mailbox along an axis. Called by the group's ranks and nobody else."""

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm: ...

    def mailbox(self, grid: Grid, rank: int, device: torch.device, axis: str, ledger: Ledger) -> Mailbox: ...

    def close(self) -> None: ...


class SoloTransport:
    """One process: every group has one rank."""

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm:
        return SoloComm("+".join(axes), (rank,), 0, ledger)

    def mailbox(self, grid: Grid, rank: int, device: torch.device, axis: str, ledger: Ledger) -> Mailbox:
        return SoloMailbox(axis)

    def close(self) -> None:
        return None


@dataclass(frozen=True)
class LedgerTransport:
    """A planned job, of which only this rank is there: what it would send is written down."""

    watch: Observer = unobserved

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm:
        ranks = grid.group(rank, *axes)
        return LedgerComm("+".join(axes), ranks, ranks.index(rank), ledger, self.watch)

    def mailbox(self, grid: Grid, rank: int, device: torch.device, axis: str, ledger: Ledger) -> Mailbox:
        return PlannedMailbox(axis, ledger) if grid.size(axis) > 1 else SoloMailbox(axis)

    def close(self) -> None:
        return None


class TorchTransport:
    """torch.distributed over an initialised default process group. `timeout`: of the groups made of it."""

    def __init__(self, recorder: FlightRecorder, timeout: timedelta) -> None:
        self._recorder = recorder
        self._timeout = timeout
        self._mailboxes: list[Mailbox] = []

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm:
        mine = grid.group(rank, *axes)
        name = "+".join(axes)
        if len(mine) == 1:
            return SoloComm(name, mine, 0, ledger)
        if len(mine) == grid.world_size:
            assert dist.group.WORLD is not None, "the default process group is not initialised"
            return TorchComm(name, mine, rank, ledger, self._recorder, dist.group.WORLD)
        with self._recorder.waiting(Call(name, CONNECT, 0, mine)):
            group = _torch_group(name, mine, rank, self._timeout)
        return TorchComm(name, mine, mine.index(rank), ledger, self._recorder, group)

    def mailbox(self, grid: Grid, rank: int, device: torch.device, axis: str, ledger: Ledger) -> Mailbox:
        ranks = grid.group(rank, axis)
        if len(ranks) == 1:
            return SoloMailbox(axis)
        with self._recorder.waiting(Call(axis, CONNECT, 0, ranks)):
            links = _links(axis, ranks, rank, self._timeout)
            if device.type == "cuda":
                self._mailboxes.append(NcclMailbox(axis, links, ledger, self._recorder, device))
            else:
                self._mailboxes.append(GlooMailbox(axis, links, ledger, self._recorder))
        return self._mailboxes[-1]

    def close(self) -> None:
        for mailbox in self._mailboxes:
            mailbox.shut()
        dist.destroy_process_group()


def _links(axis: str, ranks: tuple[int, ...], rank: int, timeout: timedelta) -> dict[Side, Channel]:
    """The ways to the neighbours of `rank`. The one before is met first: all along the axis can meet so."""
    links: dict[Side, Channel] = {}
    index = ranks.index(rank)
    if index > 0:
        pair = (ranks[index - 1], rank)
        incoming = _torch_group(f"{axis} forward", pair, rank, timeout)
        links["before"] = Channel(pair[0], 0, _torch_group(f"{axis} backward", pair, rank, timeout), incoming)
    if index < len(ranks) - 1:
        pair = (rank, ranks[index + 1])
        outgoing = _torch_group(f"{axis} forward", pair, rank, timeout)
        links["after"] = Channel(pair[1], 1, outgoing, _torch_group(f"{axis} backward", pair, rank, timeout))
    return links


def _torch_group(name: str, ranks: tuple[int, ...], rank: int, timeout: timedelta) -> dist.ProcessGroup:
    """A process group that its members alone make, and meet under `name`.

    `dist.new_group(use_local_synchronization=True)` would do it, but it names a group by how many its maker has: ranks
    that have asked for different axes before would wait for each other under different names.
    """
    c10d: Any = dist.distributed_c10d
    backend, store = dist.Backend(dist.get_backend()), c10d._get_default_store()
    met_as = f"{name}:{'-'.join(map(str, ranks))}"
    group, _ = c10d._new_process_group_helper(
        len(ranks), ranks.index(rank), list(ranks), backend, store, met_as, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {member: index for index, member in enumerate(ranks)}
    made: dist.ProcessGroup = group
    return made


class MpiTransport:
    """MPI's world, of which the members of a group make a communicator."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._mailboxes: list[Mailbox] = []

    def comm(self, grid: Grid, rank: int, axes: tuple[str, ...], ledger: Ledger) -> Comm:
        mine = grid.group(rank, *axes)
        name = "+".join(axes)
        if len(mine) == 1:
            return SoloComm(name, mine, 0, ledger)
        with self._recorder.waiting(Call(name, CONNECT, 0, mine)):
            group = _mpi_group(mine, tag=_number(grid, axes))
        return MpiComm(name, mine, mine.index(rank), ledger, self._recorder, group)

    def mailbox(self, grid: Grid, rank: int, device: torch.device, axis: str, ledger: Ledger) -> Mailbox:
        ranks = grid.group(rank, axis)
        if len(ranks) == 1:
            return SoloMailbox(axis)
        index = ranks.index(rank)
        at: dict[Side, int] = {"before": index - 1, "after": index + 1}
        neighbours = {side: ranks[there] for side, there in at.items() if 0 <= there < len(ranks)}
        with self._recorder.waiting(Call(axis, CONNECT, 0, ranks)):
            comm = _mpi_group(ranks, tag=_number(grid, (*grid.names, ENDS)) + 1 + _number(grid, (axis,)))
        self._mailboxes.append(MpiMailbox(axis, neighbours, ledger, self._recorder, comm))
        return self._mailboxes[-1]

    def close(self) -> None:
        for mailbox in self._mailboxes:
            mailbox.shut()


def _mpi_group(ranks: tuple[int, ...], tag: int) -> Any:
    """A communicator that its members alone make; those who make one of the same ranks at the same time have a tag."""
    from mpi4py import MPI

    group = MPI.COMM_WORLD.Get_group().Incl(ranks)
    return MPI.COMM_WORLD.Create_group(group, tag)


def _number(grid: Grid, axes: tuple[str, ...]) -> int:
    """A number for each set of axes, below 2 to the power of all axes and ENDS."""
    return sum(1 << (*grid.names, ENDS).index(name) for name in axes)


@dataclass(frozen=True)
class Mesh:
    """`token_axes`: the axes that split the batch's tokens, over which gradients of uncut parameters are summed.

    `stands_for`: of a plan, the type of the devices that it is for. `ranks_here`: those that share this node's memory.
    """

    grid: Grid
    rank: int
    device: torch.device
    transport: Transport
    token_axes: tuple[str, ...] = ("data",)
    stands_for: str = "cpu"
    ranks_here: int = 1
    ledger: Ledger = field(default_factory=Ledger)
    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    timeout: Timeout = DEFAULT_TIMEOUT
    _comms: dict[tuple[str, ...], Comm] = field(default_factory=dict)
    _mailboxes: dict[str, Mailbox] = field(default_factory=dict)

    def comm(self, *axes: str) -> Comm:
        """The comm over the given axes together.

        The first call for a set of axes is collective over the group's ranks (not the world's): no two ranks may ask
        first for two groups that both are in, each in another order.
        """
        axes = self.grid.ordered(axes)
        if axes not in self._comms:
            self._comms[axes] = self.transport.comm(self.grid, self.rank, axes, self.ledger)
        return self._comms[axes]

    def mailbox(self, axis: str) -> Mailbox:
        """Messages to and from the neighbours on the axis. The first call is collective over the axis's ranks."""
        if axis not in self._mailboxes:
            self._mailboxes[axis] = self.transport.mailbox(self.grid, self.rank, self.device, axis, self.ledger)
        return self._mailboxes[axis]

    @property
    def device_type(self) -> str:
        """cpu or cuda, also of a plan, whose tensors have no numbers."""
        return self.stands_for if self.device.type == "meta" else self.device.type

    @property
    def world(self) -> Comm:
        """All ranks."""
        return self.comm(*self.grid.names)

    def size(self, *axes: str) -> int:
        return self.grid.size(*axes)

    def index(self, *axes: str) -> int:
        """This rank's position on the given axes."""
        return self.grid.index(self.rank, *axes)


def solo_mesh(device: torch.device, names: tuple[str, ...] = ("data", "pipe")) -> Mesh:
    """A mesh of one rank, whose axes all have size 1."""
    return Mesh(Grid(tuple((name, 1) for name in names)), 0, device, SoloTransport())


def planned_mesh(
    grid: Grid, rank: int, token_axes: tuple[str, ...], stands_for: str = "cpu", watch: Observer = unobserved
) -> Mesh:
    """A rank's mesh of a job that does not run: tensors have shapes and no numbers, comms only write the ledger.

    `stands_for`: the type of device that it is planned for. `watch`: is told of every collective.
    """
    return Mesh(grid, rank, torch.device("meta"), LedgerTransport(watch), token_axes, stands_for, grid.world_size)


@contextmanager
def open_mesh(
    grid: Grid,
    environment: Environment,
    transport: str,
    device: torch.device,
    point: Rendezvous | None,
    token_axes: tuple[str, ...] = ("data",),
    timeout: Timeout = DEFAULT_TIMEOUT,
) -> Iterator[Mesh]:
    """Connect this process to the others of its job, and disconnect at the end.

    `point`: where ranks of the torch transport meet; None over MPI, which brings its ranks together by itself.
    A watchdog ends the process where it waits for others longer than `timeout`.
    """
    recorder = FlightRecorder()
    with Watchdog(environment, recorder, timeout) as watchdog:
        if transport == "mpi":
            watchdog.meet()
            opened: Transport = _open_mpi(environment, recorder)
        elif grid.world_size == 1:
            opened = SoloTransport()
        else:
            assert point is not None, "the ranks of a process group have no place to meet"
            opened = _open_torch(environment, device, point, recorder, timeout)
        watchdog.joined()
        here = environment.local_world_size
        try:
            yield Mesh(
                grid,
                environment.rank,
                device,
                opened,
                token_axes,
                device.type,
                ranks_here=here,
                recorder=recorder,
                timeout=timeout,
            )
        finally:
            opened.close()


def _open_torch(
    environment: Environment, device: torch.device, point: Rendezvous, recorder: FlightRecorder, timeout: Timeout
) -> TorchTransport:
    patience = timedelta(seconds=timeout.wait + TORCH_MARGIN_SECONDS)
    store = comm_store.join_job(environment, point, timeout.join)
    with recorder.waiting(Call("world", CONNECT, 0, tuple(range(environment.world_size)))):
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=store,
            rank=environment.rank,
            world_size=environment.world_size,
            timeout=patience,
        )  # no device_id: with one, NCCL makes groups by splitting the world, which needs every rank of it
    return TorchTransport(recorder, patience)


def _open_mpi(environment: Environment, recorder: FlightRecorder) -> MpiTransport:
    """Raises LaunchError where the launcher's ranks are none of MPI's, as under an srun without --mpi."""
    from mpi4py import MPI

    came = MPI.COMM_WORLD.Get_size()
    if came != environment.world_size:
        text = f"rank {environment.rank} finds {came} ranks in MPI's world, where its launcher started"
        rule = "start the ranks by mpirun or `srun --mpi=pmix`, or set layout.transport=torch"
        raise LaunchError(f"{text} {environment.world_size}: {rule}")
    return MpiTransport(recorder)
