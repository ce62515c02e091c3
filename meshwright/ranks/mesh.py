"""Mesh: the grid as one rank sees it, with a Comm for each axis. Built once, passed to everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from meshwright.environment import Environment, Rendezvous
from meshwright.ranks.board import Board
from meshwright.ranks.comm import Comm, RankGroup
from meshwright.ranks.flight_recorder import CONNECT, Call, FlightRecorder
from meshwright.ranks.grid import ENDS, HEAD_COPIES, Grid
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mailbox import Mailbox
from meshwright.ranks.mpi import open_mpi
from meshwright.ranks.section import Timeout
from meshwright.ranks.thread_comm import ThreadTransport
from meshwright.ranks.thread_world import ThreadWorld
from meshwright.ranks.torch_comm import open_torch
from meshwright.ranks.transport import SoloTransport, Transport
from meshwright.ranks.watchdog import Watchdog

DEFAULT_TIMEOUT = Timeout()


@dataclass(frozen=True)
class Mesh:
    """`token_axes`: the axes that split the batch's tokens, over which gradients of uncut parameters are summed.

    `stands_for`: of a plan, the type of the devices that it is for. `ranks_here`: those that share this node's memory.
    `imbalance`: of a plan, rows that this rank's experts get in those that an even router would give them.
    `whole_logits`: of a plan, whether its program has all of a microbatch's logits at a time.
    `empty`: layers declare their parameters as meta tensors, which get memory and values in buckets (bucket.py).
    """

    grid: Grid
    rank: int
    device: torch.device
    transport: Transport
    token_axes: tuple[str, ...] = ("data",)
    stands_for: str = "cpu"
    ranks_here: int = 1
    imbalance: float = 1.0
    whole_logits: bool = False
    empty: bool = False
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
            group = self._group(axes)
            # Connecting waits for every member, and one that never comes should be named as in any other wait.
            with self.recorder.waiting(Call(group.axis, CONNECT, 0, group.ranks)):
                self._comms[axes] = self.transport.comm(group)
        return self._comms[axes]

    def mailbox(self, axis: str, *, ring: bool = False) -> Mailbox:
        """Messages to and from the neighbours on the axis; in a ring its ends are neighbours, too. The first call is
        collective over the axis's ranks."""
        if axis not in self._mailboxes:
            group = replace(self._group((axis,)), ring=ring)
            with self.recorder.waiting(Call(axis, CONNECT, 0, group.ranks)):
                self._mailboxes[axis] = self.transport.mailbox(group, self.device)
        return self._mailboxes[axis]

    def board(self, folder: Path) -> Board:
        """Where a thread beside the step's leaves notes for other ranks'. `folder`: one that all ranks see."""
        return self.transport.board(folder)

    def aside(self) -> AbstractContextManager[None]:
        """Around a wait for a thread of this rank's own: ranks of one process run meanwhile."""
        return self.transport.aside()

    def _group(self, axes: tuple[str, ...]) -> RankGroup:
        ranks = self.grid.group(self.rank, *axes)
        # One bit an axis: groups of the same ranks over different axes get different tags.
        tag = sum(1 << (*self.grid.names, ENDS, HEAD_COPIES).index(name) for name in axes)
        return RankGroup("+".join(axes), ranks, ranks.index(self.rank), tag, self.ledger, self.recorder)

    @property
    def device_type(self) -> str:
        """cpu or cuda, also of a plan, whose tensors are meta tensors."""
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

    def close(self) -> None:
        """Leave the other ranks behind, without waiting for any."""
        for mailbox in self._mailboxes.values():
            mailbox.shut()
        self.transport.close()


def solo_mesh(device: torch.device, names: tuple[str, ...] = ("data", "pipe")) -> Mesh:
    """A mesh of one rank, whose axes all have size 1."""
    return Mesh(Grid(tuple((name, 1) for name in names)), 0, device, SoloTransport())


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

    Ranks that end well leave together: a peer that is still connecting takes a rank that has left for a crashed one.
    A rank that raises leaves at once. On a GPU it leaves its communicators to the end of its process, which comes when
    it has reported: NCCL's own end waits for kernels that wait for peers, for minutes.
    `point`: where ranks of the torch transport meet; None over MPI, which brings its ranks together by itself.
    A watchdog ends the process where it waits for others longer than `timeout`.
    """
    recorder, attempt = FlightRecorder(), environment.attempt
    with Watchdog(environment, recorder, timeout) as watchdog:
        if transport == "mpi":
            # Before MPI starts: inside of MPI_Init Python's lock is held, and no watchdog runs.
            watchdog.meet()
            opened: Transport = open_mpi(environment)
        elif grid.world_size == 1:
            opened = SoloTransport()
        else:
            assert point is not None, "the ranks of a process group have no place to meet"
            opened = open_torch(environment, device, point, recorder, timeout)
            # Our launcher counts for all ranks; torchrun's agents each count for themselves.
            attempt = attempt if environment.launched else opened.peers.attempt
        watchdog.joined(attempt)
        mesh = Mesh(
            grid,
            environment.rank,
            device,
            opened,
            token_axes,
            device.type,
            ranks_here=environment.local_world_size,
            recorder=recorder,
            timeout=timeout,
        )
        closes = True
        try:
            with opened.named_when_lost():
                yield mesh
                mesh.world.assemble()  # over MPI asleep
                mesh.world.barrier()
        except Exception:
            # After an error on a GPU closing would wait minutes for kernels of peers; the end of the process frees all.
            closes = device.type != "cuda"
            raise
        finally:
            if closes:
                mesh.close()


@contextmanager
def open_mesh_in(
    world: ThreadWorld, grid: Grid, environment: Environment, token_axes: tuple[str, ...] = ("data",)
) -> Iterator[Mesh]:
    """The mesh of a rank that is a thread of this process. It needs no watchdog: its world sees at once that nobody can
    go on."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # of this thread
    recorder = world.recorders[environment.rank] = FlightRecorder()
    mesh = Mesh(
        grid,
        environment.rank,
        world.device,
        ThreadTransport(world, environment.rank),
        token_axes,
        world.device.type,
        ranks_here=world.size,
        recorder=recorder,
    )
    yield mesh
    mesh.world.barrier()
