"""Verbs and mailbox over MPI (mpi4py), on host memory. On one machine MPI's shared memory beats gloo's sockets.

An MPI library makes progress only inside MPI calls, so a verb posted during the backward pass would not progress before
wait(). So every verb runs, blocking, in wait(). Blocking in a bucket's hook instead would make all ranks wait for the
slowest several times a step. (Only host memory is supported: GPU-aware MPI was never available for tests.)

Ranks of one node share a window (window_comm.py) for collectives. Between nodes the verbs are MPI's own, with
algorithms that know the nodes (Open MPI's `han`). Before a large verb the ranks sleep until all have called: MPI would
spin and take the core from a rank that still computes. MPI has no half-precision sums. Such a sum is an all-to-all of
the pieces, a sum of each piece in float32 in rank order, and an all-gather. Together they send the bytes of a
bandwidth-optimal all-reduce.

The mailbox posts Irecv ahead, sends with Isend, and tests the oldest request of each, so that each poll also lets
pending transfers progress. A waiting rank naps between two tests, so that MPI does not spin.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshwright.ranks.comm import (
    NAP_SECONDS,
    Comm,
    Later,
    PieceSizes,
    Posted,
    RankGroup,
    RecordedComm,
    Sent,
    Work,
    size_bytes,
)
from meshwright.ranks.environment import Environment
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.mailbox import Mailbox, PackedMailbox, Packet, Side, header_of
from meshwright.ranks.transport import Transport
from meshwright.ranks.window import SharedWindow, open_window
from meshwright.ranks.window_comm import HALF, WindowComm, add_up

LARGE_BYTES = 2**20
"""Smallest bytes of a verb before which ranks sleep until all have called."""

TEXT_BYTES = 256
"""Longest text, in bytes, exchanged by members that open a window."""

MAILBOX_TAG = 2**14
"""Added to a group's tag: above the tags of all sets of axes, and below 32,767, the limit guaranteed by MPI."""


def raw(x: Tensor) -> np.ndarray[Any, Any]:
    """View the tensor's memory as bytes, for verbs that copy without adding."""
    assert x.is_contiguous(), f"a tensor with gaps, of shape {tuple(x.shape)}: it would be received into a copy"
    # torch keeps any stride of a single element, and may then refuse a view as bytes.
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8).numpy()


@dataclass(frozen=True)
class MpiPosted:
    """MPI requests, which progress at each poll. The requests keep the sent and received memory alive."""

    requests: list[Any]
    payload_bytes: int

    def is_completed(self) -> bool:
        done: bool = type(self.requests[0]).Testall(self.requests)
        return done

    def wait(self) -> None:
        # Naps for a large payload, since MPI would spin; a small one arrives before a nap would end.
        while self.payload_bytes >= LARGE_BYTES and not self.is_completed():
            time.sleep(NAP_SECONDS)
        type(self.requests[0]).Waitall(self.requests)


class MpiComm(RecordedComm):
    """The verbs of a group over MPI. `comm`: an mpi4py communicator of the group's ranks in the group's order."""

    begins_when_waited_for = True

    def __init__(self, group: RankGroup, comm: Any) -> None:
        super().__init__(group)
        from mpi4py import MPI

        self.in_place = MPI.IN_PLACE
        self.comm = comm

    def _barrier(self, *, asleep: bool = False) -> Work:
        return Later(self._gather_asleep if asleep else self.comm.Barrier)

    def _later(self, payload: Tensor, run: Callable[[], object]) -> Work:
        def assembled() -> None:
            if size_bytes(payload) >= LARGE_BYTES:
                self._gather_asleep()
            run()

        return Later(assembled)

    def _gather_asleep(self) -> None:
        """Run a barrier with sleeps, since MPI's own would spin."""
        arrived = self.comm.Ibarrier()
        while not arrived.Test():
            time.sleep(NAP_SECONDS)

    def _sum(self, x: Tensor, root: int | None) -> Work:
        if x.dtype in HALF:
            return self._later(x, lambda: self._sum_by_pieces(x.view(-1)))
        if root is None:
            return self._later(x, lambda: self.comm.Allreduce(self.in_place, x.detach().numpy()))
        buffers = (self.in_place, x.detach().numpy()) if self.index == root else (x.detach().numpy(), None)
        return self._later(x, lambda: self.comm.Reduce(*buffers, root=root))

    def _sum_by_pieces(self, x: Tensor) -> None:
        whole = x
        # Alltoall needs equal pieces: pad with zeros, which do not change the sum.
        if x.numel() % self.size:
            whole = x.new_zeros(-(-x.numel() // self.size) * self.size)
            whole[: x.numel()] = x
        self._sum_own_piece(whole.view(self.size, -1)[self.index], whole)
        self.comm.Allgather(self.in_place, raw(whole))
        if whole is not x:
            x.copy_(whole[: x.numel()])

    def _sum_own_piece(self, shard: Tensor, x: Tensor) -> None:
        """Sum one piece by an all-to-all and a local sum: faster than MPI's reduce-scatter in our measurements."""
        pieces = torch.empty_like(x)
        self.comm.Alltoall(raw(x), raw(pieces))
        # In rank order, so that the sum's bits do not depend on arrival.
        add_up(list(pieces.view(self.size, -1)), shard.view(-1))

    def _reduce_scatter(self, shard: Tensor, x: Tensor) -> Work:
        return self._later(x, lambda: self._sum_own_piece(shard, x))

    def _collect(self, x: Tensor, shard: Tensor, root: int | None) -> Work:
        if root is not None:
            whole = raw(x) if self.index == root else None
            return self._later(shard, lambda: self.comm.Gather(raw(shard), whole, root=root))
        # MPI forbids overlapping buffers: a shard that is this rank's piece of x is passed as IN_PLACE.
        is_slice = shard.data_ptr() == x.view(self.size, -1)[self.index].data_ptr()
        sent = self.in_place if is_slice else raw(shard)
        return self._later(x, lambda: self.comm.Allgather(sent, raw(x)))

    def _all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self._later(x, lambda: self.comm.Alltoall(raw(x), raw(out)))

    def _trade(self, out: Tensor, x: Tensor, pieces: PieceSizes) -> Posted:
        sent, received = ([size * x.element_size() for size in sizes] for sizes in (pieces.sent, pieces.received))
        return MpiPosted([self.comm.Ialltoallv([raw(x), sent], [raw(out), received])], size_bytes(x))

    def _broadcast(self, x: Tensor, root: int) -> Work:
        return self._later(x, lambda: self.comm.Bcast(raw(x), root=root))

    def _scatter(self, shard: Tensor, x: Tensor, root: int) -> Work:
        whole = raw(x) if self.index == root else None
        return self._later(shard, lambda: self.comm.Scatter(whole, raw(shard), root=root))

    def _message(self, sent: Sent, received: Sent) -> Work:
        receives = [self.comm.Irecv(raw(into), source=source) for into, source in received]
        sends = [self.comm.Isend(raw(x), dest=to) for x, to in sent]
        return MpiPosted(receives + sends, max(size_bytes(x) for x, _ in (*sent, *received)))


class MpiWindowComm(WindowComm, MpiComm):
    """A comm of ranks of one node: a window for collectives, MPI for messages between two ranks."""

    def __init__(self, group: RankGroup, comm: Any, window: SharedWindow) -> None:
        MpiComm.__init__(self, group, comm)
        self._use(window)


class MpiMailbox(PackedMailbox):
    """A mailbox over MPI. `comm`: an mpi4py communicator for this mailbox alone, of the axis's ranks in order.

    A side's messages finish in order, so only the oldest is polled. Polls of receives also poll sends, since MPI makes
    progress only inside MPI calls.
    """

    def __init__(self, group: RankGroup, comm: Any) -> None:
        super().__init__(group, torch.device("cpu"))
        self.comm = comm
        self._receives: dict[Side, deque[tuple[Any, Packet]]] = {side: deque() for side in self.neighbours}
        self._sends: dict[Side, deque[tuple[Any, Tensor]]] = {side: deque() for side in self.neighbours}
        """Pending requests, each with the memory to keep until completion."""

    def _post(self, side: Side) -> None:
        buffer = self.new_buffer(side)
        request = self.comm.Irecv(raw(buffer), source=self.places[side])
        self._receives[side].append((request, Packet(side, header_of(buffer), buffer)))

    def _dispatch(self, to: Side, header: Tensor, buffer: Tensor) -> None:
        self._drop_sent()
        self._sends[to].append((self.comm.Isend(raw(buffer), dest=self.places[to]), buffer))

    def _drop_sent(self) -> None:
        for sends in self._sends.values():
            while sends and sends[0][0].Test():
                sends.popleft()

    def _arrived(self) -> list[Packet]:
        self._drop_sent()
        packets = []
        # Transfers finish in order, so the first pending one ends the loop: each test is a call into the library.
        for receives in self._receives.values():
            while receives and receives[0][0].Test():
                packets.append(receives.popleft()[1])
        return packets

    def _flush(self) -> None:
        self._drop_sent()
        while any(self._sends.values()):
            time.sleep(NAP_SECONDS)
            self._drop_sent()

    def shut(self) -> None:
        for receives in self._receives.values():
            for request, _ in receives:
                # A late message would be written by a posted receive into freed memory.
                request.Cancel()
                request.Free()
        self.comm.Free()


@dataclass(frozen=True)
class MpiTransport(Transport):
    """The groups of MPI's world. MPI itself ends a rank after the loss of a peer."""

    def comm(self, group: RankGroup) -> Comm:
        if len(group.ranks) == 1:
            return super().comm(group)
        comm = _communicator(group.ranks, group.tag)

        def texts(text: str) -> list[str]:
            """Gather every member's text, in order: rows of equal length, not counted in the ledger."""
            content = text.encode()[:TEXT_BYTES]
            row = torch.frombuffer(bytearray(content.ljust(TEXT_BYTES, b"\0")), dtype=torch.uint8)
            rows = row.new_empty(comm.Get_size(), TEXT_BYTES)
            comm.Allgather(raw(row), raw(rows))
            return [bytes(each.tolist()).rstrip(b"\0").decode() for each in rows]

        window = open_window(group, texts, comm.Iprobe)
        return MpiComm(group, comm) if window is None else MpiWindowComm(group, comm, window)

    def mailbox(self, group: RankGroup, device: torch.device) -> Mailbox:
        if len(group.ranks) == 1:
            return super().mailbox(group, device)
        return MpiMailbox(group, _communicator(group.ranks, MAILBOX_TAG + group.tag))


def _communicator(ranks: tuple[int, ...], tag: int) -> Any:
    """Make a communicator with a call of the members alone. `tag`: distinguishes simultaneous calls of equal ranks."""
    from mpi4py import MPI

    # Create_group is collective over the members alone; Split and Dup would need all ranks of the world.
    return MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.Get_group().Incl(ranks), tag)


def open_mpi(environment: Environment) -> MpiTransport:
    """Start MPI. Raises LaunchError if the launcher has started no MPI ranks, as srun without --mpi does."""
    from mpi4py import MPI

    came = MPI.COMM_WORLD.Get_size()
    if came != environment.world_size:
        text = f"rank {environment.rank} finds {came} ranks in MPI's world, where its launcher started"
        rule = "start the ranks by mpirun or `srun --mpi=pmix`, or set layout.transport=torch"
        raise LaunchError(f"{text} {environment.world_size}: {rule}")
    return MpiTransport()
