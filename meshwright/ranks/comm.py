"""Comm: the ranks of one group and the verbs between them; one interface over every transport.

torch.distributed (torch_comm.py) and MPI (mpi.py) connect processes. A group of one rank needs neither (`SoloComm`). A
planned comm (planned.py) only writes its ledger. Every verb is recorded in the ledger, by axis, before data is sent.

Verbs take contiguous tensors. With `wait=False` a verb returns at once; the result is valid after `work.wait()`.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from meshwright.ranks.flight_recorder import Call, FlightRecorder
from meshwright.ranks.ledger import VERBS, Ledger

NAP_SECONDS = 1e-4
"""Seconds between two polls of pending work, on transports with a spinning wait."""


class Work(Protocol):
    """A started verb: wait() returns when the result may be read."""

    def wait(self) -> object: ...


class Posted(Work, Protocol):
    """A started verb that progresses while the rank computes; is_completed() polls without waiting (torch's name)."""

    def is_completed(self) -> bool: ...


@dataclass(frozen=True)
class Done:
    """Work that is finished from the start."""

    def wait(self) -> None:
        return None

    def is_completed(self) -> bool:
        return True


DONE = Done()


@dataclass(frozen=True)
class Later:
    """Work that runs inside wait(), wholly or in part. All ranks must wait for their verbs in the same order."""

    run: Callable[[], object]

    def wait(self) -> None:
        self.run()


def together(works: Iterable[Work]) -> Work:
    """Begin `works` now, in order; return the work that is done when all are done."""
    begun = list(works)
    return Later(lambda: [work.wait() for work in begun])


def size_bytes(x: Tensor) -> int:
    """Return the bytes of a tensor's elements."""
    return x.nbytes


@dataclass(frozen=True)
class RankGroup:
    """The ranks that a comm or a mailbox connects, seen from the member `index`.

    `axis`: the axes spanned by the group, by the ledger's name (data+row). `ranks`: ranks of the world, in grid order.
    `tag`: a number unique to this set of axes in the grid. `ledger`, `recorder`: shared by all groups of this rank.
    `ring`: in a mailbox, the last rank and the first rank are neighbours.
    """

    axis: str
    ranks: tuple[int, ...]
    index: int
    tag: int = 0
    ledger: Ledger = field(default_factory=Ledger)
    recorder: FlightRecorder = field(default_factory=FlightRecorder)
    ring: bool = False


@dataclass(frozen=True)
class PieceSizes:
    """Numbers of elements received from and sent to each member by an all-to-all with unequal pieces."""

    received: tuple[int, ...]
    sent: tuple[int, ...]


Sent = Sequence[tuple[Tensor, int]]
"""Messages between two ranks: each a tensor and the index of the receiving or sending member."""


class Comm(ABC):
    """The verbs of one member of a group. This class records every verb; subclasses implement a transport.

    One transport method implements both a rooted verb and its counterpart for all members: `_sum` for reduce and
    all_reduce, `_collect` for gather and all_gather. `root` is None if all members receive the result.
    """

    begins_when_waited_for = False
    """True if a verb with `wait=False` begins only in wait()."""

    def __init__(self, group: RankGroup) -> None:
        self.group = group
        self.axis, self.ranks, self.index, self.ledger = group.axis, group.ranks, group.index, group.ledger
        self.size = len(group.ranks)

    def zeros(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocate zeros [count] for a buffer that will be summed over the group. Collective.

        If the members share a node, a transport may choose memory that all members can read.
        """
        return torch.zeros(count, dtype=dtype, device=device)

    def under_way(self) -> Comm:
        """Return a comm of the same ranks with `wait=False` verbs that progress while the rank computes.

        Returns this comm if the transport has no such comm. Useful if many verbs are waited for one by one (zero2,
        zero3).
        """
        return self

    def all_reduce(self, x: Tensor, *, wait: bool = True) -> Work:
        """Sum x over the group, in place."""
        return self._collective("all_reduce", size_bytes(x), lambda: self._sum(x, None), wait)

    def reduce_scatter(self, shard: Tensor, x: Tensor, *, wait: bool = True) -> Work:
        """Sum x over the group; write this rank's 1/n of the sum to `shard`, which may be that slice of x."""
        assert shard.numel() * self.size == x.numel(), f"{shard.numel()} x {self.size} != {x.numel()}"
        return self._collective("reduce_scatter", size_bytes(x), lambda: self._reduce_scatter(shard, x), wait)

    def all_gather(self, x: Tensor, shard: Tensor, *, wait: bool = True) -> Work:
        """Fill x with every rank's shard, in rank order. `shard` may be this rank's slice of x."""
        assert shard.numel() * self.size == x.numel(), f"{shard.numel()} x {self.size} != {x.numel()}"
        return self._collective("all_gather", size_bytes(x), lambda: self._collect(x, shard, None), wait)

    def all_to_all(self, out: Tensor, x: Tensor, *, pieces: PieceSizes | None = None, wait: bool = True) -> Work:
        """Send piece j of x to rank j, which receives it as piece `index` of `out`.

        Args:
            out: the received pieces, in rank order.
            x: the sent pieces, in rank order.
            pieces: sizes of unequal pieces; None if all are equal. The ledger counts the total as equal pieces.
            wait: False to return before the pieces are received.
        """
        if pieces is not None:
            return self._collective("all_to_all", size_bytes(x), lambda: self._trade(out, x, pieces), wait)
        assert out.numel() == x.numel(), f"{out.numel()} != {x.numel()}"
        return self._collective("all_to_all", size_bytes(x), lambda: self._all_to_all(out, x), wait)

    def post_all_to_all(self, out: Tensor, x: Tensor, pieces: PieceSizes) -> Posted:
        """Begin an all-to-all that progresses while members compute, over every transport.

        All members must begin their verbs in the same order. Neither `out` nor x may be touched before completion.
        """
        self._count("all_to_all", size_bytes(x), None)
        return self._trade(out, x, pieces)

    def broadcast(self, x: Tensor, root: int, *, wait: bool = True) -> Work:
        """Copy x of the member `root` to every member's x."""
        return self._collective("broadcast", size_bytes(x), lambda: self._broadcast(x, root), wait, root)

    def reduce(self, x: Tensor, root: int, *, wait: bool = True) -> Work:
        """Sum x over the group into the x of `root`; x of other members is undefined afterwards."""
        return self._collective("reduce", size_bytes(x), lambda: self._sum(x, root), wait, root)

    def gather(self, x: Tensor, shard: Tensor, root: int, *, wait: bool = True) -> Work:
        """Fill x of `root` with every rank's shard, in order; on other ranks x is not touched and may be empty."""
        payload = self.size * size_bytes(shard)
        return self._collective("gather", payload, lambda: self._collect(x, shard, root), wait, root)

    def scatter(self, shard: Tensor, x: Tensor, root: int, *, wait: bool = True) -> Work:
        """Fill `shard` with piece `index` of the root's x; on other ranks x is not read and may be empty."""
        payload = self.size * size_bytes(shard)
        return self._collective("scatter", payload, lambda: self._scatter(shard, x, root), wait, root)

    def exchange(self, x: Tensor, to: int, into: Tensor, source: int, *, wait: bool = True) -> Work:
        """Send x to the member `to` while receiving `into` from the member `source`: one step of a ring.

        Several exchanges may be pending; all members must begin exchanges in the same order.
        """
        self._count("send", size_bytes(x), (to - self.index) % self.size)
        with self._waiting("exchange", size_bytes(x), to, source):
            # Recorded twice: some transports wait here already, all wait in `finish`.
            work = self._message([(x, to)], [(into, source)])

        def finish() -> None:
            with self._waiting("exchange", size_bytes(x), to, source):
                work.wait()

        if not wait:
            return Later(finish)
        finish()
        return DONE

    def send(self, x: Tensor, to: int) -> None:
        """Send x to the member `to`, which must call `receive`."""
        self._count("send", size_bytes(x), (to - self.index) % self.size)
        with self._waiting("send", size_bytes(x), to):
            self._message([(x, to)], []).wait()

    def receive(self, x: Tensor, source: int) -> None:
        """Fill x with the tensor sent by the member `source`."""
        with self._waiting("receive", size_bytes(x), source):
            self._message([], [(x, source)]).wait()

    def barrier(self) -> None:
        """Return after every member has called `barrier`."""
        self._run("barrier", 0, self._barrier, True)

    def assemble(self) -> None:
        """Sleep until all members have called `assemble`.

        For use before a collective with a long wait, since some transports spin while a collective waits.
        """
        self._run("assemble", 0, lambda: self._barrier(asleep=True), True)

    def _count(self, verb: str, payload_bytes: int, peer: int | None) -> None:
        if self.size > 1:
            # Bytes of the bandwidth-optimal form of the verb, so that a plan and a run over any transport agree.
            sent_bytes = VERBS[verb].sent_bytes(payload_bytes, self.size, peer == self.index)
            self.ledger.record(self.axis, verb, sent_bytes, peer)

    def _collective(
        self, verb: str, payload_bytes: int, start: Callable[[], Work], wait: bool, root: int | None = None
    ) -> Work:
        self._count(verb, payload_bytes, root)
        return self._run(verb, payload_bytes, start, wait)

    def _run(self, verb: str, payload_bytes: int, start: Callable[[], Work], wait: bool) -> Work:
        """Begin a collective; with `wait`, return after completion."""
        work = start()
        if not wait:
            return work
        work.wait()
        return DONE

    def _waiting(self, verb: str, payload_bytes: int, *members: int) -> AbstractContextManager[None]:
        """Return the context for this rank's messages to or from members of the group."""
        return nullcontext()

    @abstractmethod
    def _barrier(self, *, asleep: bool = False) -> Work:
        """Begin a barrier. With `asleep`, a transport may skip the barrier if all waits of the transport sleep."""

    @abstractmethod
    def _sum(self, x: Tensor, root: int | None, /) -> Work: ...
    @abstractmethod
    def _reduce_scatter(self, shard: Tensor, x: Tensor, /) -> Work: ...
    @abstractmethod
    def _collect(self, x: Tensor, shard: Tensor, root: int | None, /) -> Work: ...
    @abstractmethod
    def _broadcast(self, x: Tensor, root: int, /) -> Work: ...
    @abstractmethod
    def _scatter(self, shard: Tensor, x: Tensor, root: int, /) -> Work: ...
    @abstractmethod
    def _all_to_all(self, out: Tensor, x: Tensor, /) -> Work: ...

    @abstractmethod
    def _trade(self, out: Tensor, x: Tensor, pieces: PieceSizes, /) -> Posted:
        """Begin an all-to-all of unequal pieces, which progresses while members compute."""

    @abstractmethod
    def _message(self, sent: Sent, received: Sent) -> Work:
        """Begin to send and to receive messages between two ranks."""


class SoloComm(Comm):
    """A group of one rank: nothing to send, every sum is the value itself."""

    def _barrier(self, *, asleep: bool = False) -> Work:
        return DONE

    def _sum(self, x: Tensor, root: int | None, /) -> Work:
        return DONE

    _broadcast = _sum

    def _collect(self, into: Tensor, source: Tensor, _: object = None, /) -> Done:
        # Equal addresses: `part` is a slice of x, so the value is in place already.
        if into.data_ptr() != source.data_ptr():
            into.view(-1).copy_(source.view(-1))
        return DONE

    _reduce_scatter = _scatter = _all_to_all = _trade = _collect

    def _message(self, sent: Sent, received: Sent) -> Work:
        assert sent, f"axis {self.axis} has one rank: nobody to receive from"
        assert received, f"axis {self.axis} has one rank: nobody to send to"
        return self._collect(received[0][0], sent[0][0])


@dataclass(frozen=True)
class RecordedWork:
    """Work whose wait is recorded by the flight recorder; `begins`: the verb itself begins in wait()."""

    work: Work
    call: Call
    recorder: FlightRecorder
    begins: bool

    def wait(self) -> None:
        if self.begins:
            self.recorder.begin(self.call)
        with self.recorder.waiting(self.call):
            self.work.wait()


class RecordedComm(Comm):
    """A comm that records its waits for other ranks in the flight recorder."""

    def __init__(self, group: RankGroup) -> None:
        super().__init__(group)
        self.recorder = group.recorder
        self._numbers = itertools.count(1)

    def _run(self, verb: str, payload_bytes: int, start: Callable[[], Work], wait: bool) -> Work:
        call = Call(self.axis, verb, payload_bytes, self.ranks, next(self._numbers))
        # The recorder lists collectives that this rank has reached: not yet one that begins in wait().
        later = self.begins_when_waited_for and not wait
        if not later:
            self.recorder.begin(call)
        with self.recorder.waiting(call):
            work = start()
            if wait:
                work.wait()
                return DONE
        return RecordedWork(work, call, self.recorder, later)

    def _waiting(self, verb: str, payload_bytes: int, *members: int) -> AbstractContextManager[None]:
        # No number: unlike collectives, messages between two ranks have different counts on different members.
        ranks = tuple(sorted({self.ranks[member] for member in members}))
        return self.recorder.waiting(Call(self.axis, verb, payload_bytes, ranks))
