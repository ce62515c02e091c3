"""Mesh: the grid seen from one rank, with a Comm per axis. Built once, passed to everything."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch

from meshwright.ranks.comm import Comm, RankGroup
from meshwright.ranks.environment import Environment, Rendezvous
from meshwright.ranks.flight_recorder import CONNECT, Call, FlightRecorder
from meshwright.ranks.grid import ENDS, HEAD_COPIES, Grid
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mailbox import Mailbox
from meshwright.ranks.mpi import open_mpi
from meshwright.ranks.thread_comm import ThreadTransport
from meshwright.ranks.thread_world import ThreadWorld
from meshwright.ranks.timeouts import Timeouts
from meshwright.ranks.torch_comm import open_torch
from meshwright.ranks.transport import Transport
from meshwright.ranks.watchdog import Watchdog

DEFAULT_TIMEOUT = Timeouts()


@dataclass(frozen=True)
class Mesh:
    """The grid of one rank. `token_axes`: the axes that split the batch's tokens; gradients of unsharded parameters are
    summed over these axes.

    `ranks_here`: number of ranks that share this node's memory. `empty`: layers declare parameters as meta tensors,
    which get memory and values in buckets (bucket.py).
    """

    grid: Grid
    rank: int
    device: torch.device
    transport: Transport
    token_axes: tuple[str, ...] = ("data",)
    ranks_here: int = 1
    empty: bool = False
    ledger: Ledger = field(default_factory=Ledger)
    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    timeout: Timeouts = DEFAULT_TIMEOUT
    _comms: dict[tuple[str, ...], Comm] = field(default_factory=dict)
    _mailboxes: dict[str, Mailbox] = field(default_factory=dict)

    def comm(self, *axes: str) -> Comm:
        """Return the comm over the given axes together.

        The first call for a set of axes is collective over the group (not the world). Ranks that share two groups must
        make the first calls in the same order.
        """
        axes = self.grid.ordered(axes)
        if axes not in self._comms:
            group = self._group(axes)
            # Connecting waits for every member; recorded, so that a missing member is named as in any other wait.
            with self.recorder.waiting(Call(group.axis, CONNECT, 0, group.ranks)):
                self._comms[axes] = self.transport.comm(group)
        return self._comms[axes]

    def mailbox(self, axis: str, *, ring: bool = False) -> Mailbox:
        """Return the mailbox of an axis; in a ring the first and the last rank are neighbours too.

        The first call is collective over the axis's ranks.
        """
        if axis not in self._mailboxes:
            group = replace(self._group((axis,)), ring=ring)
            with self.recorder.waiting(Call(axis, CONNECT, 0, group.ranks)):
                self._mailboxes[axis] = self.transport.mailbox(group, self.device)
        return self._mailboxes[axis]

    def _group(self, axes: tuple[str, ...]) -> RankGroup:
        ranks = self.grid.group(self.rank, *axes)
        # One bit per axis, so that groups of equal ranks over different axes have different tags.
        tag = sum(1 << (*self.grid.names, ENDS, HEAD_COPIES).index(name) for name in axes)
        return RankGroup("+".join(axes), ranks, ranks.index(self.rank), tag, self.ledger, self.recorder)

    @property
    def device_type(self) -> str:
        """Return cpu or cuda. Meta tensors are computed as on a CPU."""
        return "cpu" if self.device.type == "meta" else self.device.type

    @property
    def capability(self) -> tuple[int, int] | None:
        """Return the GPU's compute capability, major and minor; None on a CPU."""
        return torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None

    @property
    def world(self) -> Comm:
        """The comm over all ranks."""
        return self.comm(*self.grid.names)

    def size(self, *axes: str) -> int:
        return self.grid.size(*axes)

    def index(self, *axes: str) -> int:
        """Return this rank's position on the given axes."""
        return self.grid.index(self.rank, *axes)

    def close(self) -> None:
        """Disconnect, without waiting for other ranks."""
        for mailbox in self._mailboxes.values():
            mailbox.shut()
        self.transport.close()


def solo_mesh(device: torch.device, names: tuple[str, ...] = ("data", "pipe")) -> Mesh:
    """Make a mesh of one rank; all axes have size 1."""
    return Mesh(Grid(tuple((name, 1) for name in names)), 0, device, Transport())


@contextmanager
def open_mesh(
    grid: Grid,
    environment: Environment,
    transport: str,
    device: torch.device,
    point: Rendezvous | None,
    token_axes: tuple[str, ...] = ("data",),
    timeout: Timeouts = DEFAULT_TIMEOUT,
) -> Iterator[Mesh]:
    """Connect this process to its job's other processes, and disconnect at the context's end.

    Ranks without an error leave together, since a peer that is still connecting would take an early leaver for a crash.
    A rank that raises leaves at once. On a GPU such a rank leaves communicators to the end of its process: NCCL's own
    shutdown waits minutes for kernels that wait for peers. `point`: where ranks of the torch transport meet; None over
    MPI, which brings its ranks together by itself. A watchdog ends the process when it waits for other ranks longer
    than `timeout`.
    """
    recorder, attempt = FlightRecorder(), environment.attempt
    with Watchdog(environment, recorder, timeout) as watchdog:
        if transport == "mpi":
            # Before MPI starts: inside of MPI_Init Python's lock is held, and no watchdog runs.
            watchdog.meet()
            opened: Transport = open_mpi(environment)
        elif grid.world_size == 1:
            opened = Transport()
        else:
            assert point is not None, "the ranks of a process group have no place to meet"
            opened = open_torch(environment, device, point, recorder, timeout)
            # Our launcher counts attempts for all ranks; each of torchrun's agents counts its own.
            attempt = attempt if environment.launched else opened.peers.attempt
        watchdog.joined(attempt)
        mesh = Mesh(
            grid,
            environment.rank,
            device,
            opened,
            token_axes,
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
            # After an error on a GPU, closing would wait minutes for peers' kernels; the process's end frees
            # everything.
            closes = device.type != "cuda"
            raise
        finally:
            if closes:
                mesh.close()


@contextmanager
def open_mesh_in(
    world: ThreadWorld, grid: Grid, environment: Environment, token_axes: tuple[str, ...] = ("data",)
) -> Iterator[Mesh]:
    """Open the mesh of a rank that is a thread of this process. No watchdog: `world` detects a deadlock at once."""
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)  # of this thread
    recorder = world.recorders[environment.rank] = FlightRecorder()
    mesh = Mesh(
        grid,
        environment.rank,
        world.device,
        ThreadTransport(world, environment.rank),
        token_axes,
        ranks_here=world.size,
        recorder=recorder,
    )
    yield mesh
    mesh.world.barrier()
