"""Comm: the ranks of one group and the verbs between them; one interface over every transport.

Two transports: torch.distributed (gloo on CPUs, NCCL on GPUs) and MPI (mpi4py). A group of one rank needs neither.
Every verb is written to a ledger by axis before it is sent, so what a run moves is counted where it moves.

Verbs take contiguous tensors. `wait=False` returns at once; the result is there after `work.wait()`.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.ranks.flight_recorder import Call, FlightRecorder
from meshwright.ranks.ledger import Ledger

try:
    from torch.distributed import all_gather_single, reduce_scatter_single
except ImportError:  # before torch 2.13 these had other names
    from torch.distributed import all_gather_into_tensor as all_gather_single
    from torch.distributed import reduce_scatter_tensor as reduce_scatter_single


NAP_SECONDS = 1e-4
"""Between two looks at what is under way, where the transport's own wait would spin."""


class Work(Protocol):
    """Something under way: wait() returns when its result may be read."""

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Done:
    """Work that was finished when it was handed out."""

    def wait(self) -> None:
        return None


DONE = Done()


@dataclass(frozen=True)
class Later:
    """A verb that runs when it is waited for. All ranks wait for theirs in the same order."""

    run: Callable[[], object]

    def wait(self) -> None:
        self.run()


def size_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class Comm(ABC):
    """The group `ranks` (world ranks, in grid order), seen from its member `index`."""

    def __init__(self, axis: str, ranks: Sequence[int], index: int, ledger: Ledger) -> None:
        self.axis = axis
        self.ranks = tuple(ranks)
        self.index = index
        self.ledger = ledger

    @property
    def size(self) -> int:
        return len(self.ranks)

    def _record(self, verb: str, sent_bytes: int, peer: int | None = None) -> None:
        if self.size > 1:  # alone there is nobody to call
            self.ledger.record(self.axis, verb, sent_bytes, peer)

    def _part(self, x: Tensor) -> int:
        """(n-1)/n of the bytes of x."""
        return size_bytes(x) * (self.size - 1) // self.size

    def all_reduce(self, x: Tensor, *, wait: bool = True) -> Work:
        """Sum x over the group, in place."""
        self._record("all_reduce", 2 * size_bytes(x) * (self.size - 1) // self.size)
        return self._run("all_reduce", size_bytes(x), lambda: self._all_reduce(x), wait)

    def reduce_scatter(self, part: Tensor, x: Tensor, *, wait: bool = True) -> Work:
        """Sum x over the group; `part` gets this rank's 1/n of it. `part` may be that slice of x."""
        assert part.numel() * self.size == x.numel(), f"{part.numel()} x {self.size} != {x.numel()}"
        self._record("reduce_scatter", self._part(x))
        return self._run("reduce_scatter", size_bytes(x), lambda: self._reduce_scatter(part, x), wait)

    def all_gather(self, x: Tensor, part: Tensor, *, wait: bool = True) -> Work:
        """x gets every rank's part, in order. `part` may be this rank's slice of x."""
        assert part.numel() * self.size == x.numel(), f"{part.numel()} x {self.size} != {x.numel()}"
        self._record("all_gather", self._part(x))
        return self._run("all_gather", size_bytes(x), lambda: self._all_gather(x, part), wait)

    def all_to_all(self, out: Tensor, x: Tensor, *, wait: bool = True) -> Work:
        """Piece j of x goes to rank j, where it becomes piece `index` of out."""
        assert out.numel() == x.numel(), f"{out.numel()} != {x.numel()}"
        self._record("all_to_all", self._part(x))
        return self._run("all_to_all", size_bytes(x), lambda: self._all_to_all(out, x), wait)

    def broadcast(self, x: Tensor, root: int, *, wait: bool = True) -> Work:
        """x of the member `root` becomes everyone's x."""
        self._record("broadcast", size_bytes(x) * (self.size - 1) if self.index == root else 0, root)
        return self._run("broadcast", size_bytes(x), lambda: self._broadcast(x, root), wait)

    def reduce(self, x: Tensor, root: int, *, wait: bool = True) -> Work:
        """Sum x over the group into the x of `root`; the others' x is undefined afterwards."""
        self._record("reduce", 0 if self.index == root else size_bytes(x), root)
        return self._run("reduce", size_bytes(x), lambda: self._reduce(x, root), wait)

    def gather(self, x: Tensor, part: Tensor, root: int, *, wait: bool = True) -> Work:
        """x of `root` gets every rank's part, in order; elsewhere x is not touched (it may be empty)."""
        self._record("gather", 0 if self.index == root else size_bytes(part), root)
        return self._run("gather", self.size * size_bytes(part), lambda: self._gather(x, part, root), wait)

    def scatter(self, part: Tensor, x: Tensor, root: int, *, wait: bool = True) -> Work:
        """`part` gets piece `index` of the root's x; elsewhere x is not read (it may be empty)."""
        self._record("scatter", size_bytes(part) * (self.size - 1) if self.index == root else 0, root)
        return self._run("scatter", self.size * size_bytes(part), lambda: self._scatter(part, x, root), wait)

    def exchange(self, x: Tensor, to: int, into: Tensor, source: int) -> None:
        """Send x to the member `to` while receiving `into` from the member `source`: one step of a ring."""
        self._record("send", size_bytes(x), (to - self.index) % self.size)
        with self._meeting("exchange", size_bytes(x), to, source):
            self._exchange(x, to, into, source)

    def send(self, x: Tensor, to: int) -> None:
        """Send x to the member `to`, who calls receive."""
        self._record("send", size_bytes(x), (to - self.index) % self.size)
        with self._meeting("send", size_bytes(x), to):
            self._send(x, to)

    def receive(self, x: Tensor, source: int) -> None:
        """Fill x with what the member `source` sends."""
        with self._meeting("receive", size_bytes(x), source):
            self._receive(x, source)

    def barrier(self) -> None:
        """Return when every member has called it."""
        self._run("barrier", 0, self._barrier, True)

    def assemble(self) -> None:
        """Before a collective for which some will wait long: where waiting takes a core, wait for all asleep."""
        self._run("assemble", 0, self._assemble, True)

    def _run(self, verb: str, payload_bytes: int, start: Callable[[], Work], wait: bool) -> Work:
        """Begin a collective, and wait for it if asked."""
        work = start()
        if not wait:
            return work
        work.wait()
        return DONE

    def _meeting(self, verb: str, payload_bytes: int, *members: int) -> AbstractContextManager[None]:
        """Is entered while this rank sends to or receives from members of the group."""
        return nullcontext()

    def _assemble(self) -> Work:
        """Most transports wait asleep whatever they wait for."""
        return DONE

    @abstractmethod
    def _receive(self, x: Tensor, source: int) -> None: ...
    @abstractmethod
    def _barrier(self) -> Work: ...
    @abstractmethod
    def _all_reduce(self, x: Tensor) -> Work: ...
    @abstractmethod
    def _reduce_scatter(self, part: Tensor, x: Tensor) -> Work: ...
    @abstractmethod
    def _all_gather(self, x: Tensor, part: Tensor) -> Work: ...
    @abstractmethod
    def _all_to_all(self, out: Tensor, x: Tensor) -> Work: ...
    @abstractmethod
    def _broadcast(self, x: Tensor, root: int) -> Work: ...
    @abstractmethod
    def _reduce(self, x: Tensor, root: int) -> Work: ...
    @abstractmethod
    def _gather(self, x: Tensor, part: Tensor, root: int) -> Work: ...
    @abstractmethod
    def _scatter(self, part: Tensor, x: Tensor, root: int) -> Work: ...
    @abstractmethod
    def _exchange(self, x: Tensor, to: int, into: Tensor, source: int) -> None: ...
    @abstractmethod
    def _send(self, x: Tensor, to: int) -> None: ...


class SoloComm(Comm):
    """A group of one rank: nothing to send, every sum is the value itself."""

    def _receive(self, x: Tensor, source: int) -> None:
        raise AssertionError(f"axis {self.axis} has one rank: nobody to receive from")

    def _barrier(self) -> Work:
        return DONE

    def _all_reduce(self, x: Tensor) -> Work:
        return DONE

    def _reduce_scatter(self, part: Tensor, x: Tensor) -> Work:
        return _copied(part, x)

    def _all_gather(self, x: Tensor, part: Tensor) -> Work:
        return _copied(x, part)

    def _all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return _copied(out, x)

    def _broadcast(self, x: Tensor, root: int) -> Work:
        return DONE

    def _reduce(self, x: Tensor, root: int) -> Work:
        return DONE

    def _gather(self, x: Tensor, part: Tensor, root: int) -> Work:
        return _copied(x, part)

    def _scatter(self, part: Tensor, x: Tensor, root: int) -> Work:
        return _copied(part, x)

    def _exchange(self, x: Tensor, to: int, into: Tensor, source: int) -> None:
        into.copy_(x)

    def _send(self, x: Tensor, to: int) -> None:
        raise AssertionError(f"axis {self.axis} has one rank: nobody to send to")


class Observer(Protocol):
    """Is told of every collective that a planned rank begins, with the bytes of its whole payload; its Work is waited
    for where the rank would wait. `root`: of a rooted verb; of a send, how many members further on its receiver is."""

    def __call__(self, axes: str, verb: str, payload_bytes: int, root: int | None) -> Work: ...


def unobserved(axes: str, verb: str, payload_bytes: int, root: int | None) -> Work:
    """Nobody looks."""
    return DONE


class LedgerComm(Comm):
    """Writes the ledger and moves nothing: for tensors without numbers (the meta device), of any number of ranks."""

    def __init__(
        self, axis: str, ranks: Sequence[int], index: int, ledger: Ledger, watch: Observer = unobserved
    ) -> None:
        super().__init__(axis, ranks, index, ledger)
        self._watch = watch

    def _begun(self, verb: str, payload_bytes: int, root: int | None = None) -> Work:
        return self._watch(self.axis, verb, payload_bytes, root) if self.size > 1 else DONE

    def _receive(self, x: Tensor, source: int) -> None:
        return None

    def _barrier(self) -> Work:
        return DONE

    def _all_reduce(self, x: Tensor) -> Work:
        return self._begun("all_reduce", size_bytes(x))

    def _reduce_scatter(self, part: Tensor, x: Tensor) -> Work:
        return self._begun("reduce_scatter", size_bytes(x))

    def _all_gather(self, x: Tensor, part: Tensor) -> Work:
        return self._begun("all_gather", size_bytes(x))

    def _all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return self._begun("all_to_all", size_bytes(x))

    def _broadcast(self, x: Tensor, root: int) -> Work:
        return self._begun("broadcast", size_bytes(x), root)

    def _reduce(self, x: Tensor, root: int) -> Work:
        return self._begun("reduce", size_bytes(x), root)

    def _gather(self, x: Tensor, part: Tensor, root: int) -> Work:
        return self._begun("gather", self.size * size_bytes(part), root)

    def _scatter(self, part: Tensor, x: Tensor, root: int) -> Work:
        return self._begun("scatter", self.size * size_bytes(part), root)

    def _exchange(self, x: Tensor, to: int, into: Tensor, source: int) -> None:
        self._begun("send", size_bytes(x), (to - self.index) % self.size).wait()

    def _send(self, x: Tensor, to: int) -> None:
        self._begun("send", size_bytes(x), (to - self.index) % self.size).wait()


def _copied(target: Tensor, source: Tensor) -> Work:
    if target.data_ptr() != source.data_ptr():
        target.view(-1).copy_(source.view(-1))
    return DONE


@dataclass(frozen=True)
class RecordedWork:
    """Work whose wait the flight recorder sees. `begin` where the verb begins only now."""

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
    """Ranks that can wait for each other, and tell the flight recorder when they do."""

    begins_when_waited_for = False
    """Whether a verb that is not waited for has not begun."""

    def __init__(self, axis: str, ranks: Sequence[int], index: int, ledger: Ledger, recorder: FlightRecorder) -> None:
        super().__init__(axis, ranks, index, ledger)
        self.recorder = recorder
        self._num_calls = 0

    def _run(self, verb: str, payload_bytes: int, start: Callable[[], Work], wait: bool) -> Work:
        self._num_calls += 1
        call = Call(self.axis, verb, payload_bytes, self.ranks, self._num_calls)
        later = self.begins_when_waited_for and not wait
        if not later:
            self.recorder.begin(call)
        with self.recorder.waiting(call):
            work = start()
            if wait:
                work.wait()
                return DONE
        return RecordedWork(work, call, self.recorder, later)

    def _meeting(self, verb: str, payload_bytes: int, *members: int) -> AbstractContextManager[None]:
        ranks = tuple(sorted({self.ranks[member] for member in members}))
        return self.recorder.waiting(Call(self.axis, verb, payload_bytes, ranks))


class TorchComm(RecordedComm):
    """torch.distributed: gloo for host tensors, NCCL for GPUs. `process_group` holds the same ranks in order."""

    def __init__(
        self,
        axis: str,
        ranks: Sequence[int],
        index: int,
        ledger: Ledger,
        recorder: FlightRecorder,
        process_group: dist.ProcessGroup,
    ) -> None:
        super().__init__(axis, ranks, index, ledger, recorder)
        self.process_group = process_group

    def _receive(self, x: Tensor, source: int) -> None:
        dist.recv(x, group=self.process_group, group_src=source)

    def _barrier(self) -> Work:
        return dist.barrier(self.process_group, async_op=True)

    def _all_reduce(self, x: Tensor) -> Work:
        return dist.all_reduce(x, group=self.process_group, async_op=True)

    def _reduce_scatter(self, part: Tensor, x: Tensor) -> Work:
        return reduce_scatter_single(part.view(-1), x.view(-1), group=self.process_group, async_op=True)

    def _all_gather(self, x: Tensor, part: Tensor) -> Work:
        return all_gather_single(x.view(-1), part.view(-1), group=self.process_group, async_op=True)

    def _all_to_all(self, out: Tensor, x: Tensor) -> Work:
        return dist.all_to_all_single(out.view(-1), x.view(-1), group=self.process_group, async_op=True)

    def _broadcast(self, x: Tensor, root: int) -> Work:
        return dist.broadcast(x, group_src=root, group=self.process_group, async_op=True)

    def _reduce(self, x: Tensor, root: int) -> Work:
        return dist.reduce(x, group_dst=root, group=self.process_group, async_op=True)

    def _gather(self, x: Tensor, part: Tensor, root: int) -> Work:
        parts = list(x.view(-1).chunk(self.size)) if self.index == root else None
        return dist.gather(part.view(-1), parts, group_dst=root, group=self.process_group, async_op=True)

    def _scatter(self, part: Tensor, x: Tensor, root: int) -> Work:
        parts = list(x.view(-1).chunk(self.size)) if self.index == root else None
        return dist.scatter(part.view(-1), parts, group_src=root, group=self.process_group, async_op=True)

    def _exchange(self, x: Tensor, to: int, into: Tensor, source: int) -> None:
        sends = dist.P2POp(dist.isend, x, group=self.process_group, group_peer=to)
        receives = dist.P2POp(dist.irecv, into, group=self.process_group, group_peer=source)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    def _send(self, x: Tensor, to: int) -> None:
        dist.send(x, group=self.process_group, group_dst=to)


def same_everywhere(x: Tensor, comm: Comm) -> bool:
    """Whether all members hold the same bits, by a SHA-256 of them. Sends 32 bytes."""
    digest = hashlib.sha256(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data).digest()
    mine = torch.tensor(list(digest), dtype=torch.uint8, device=x.device)
    every = mine.new_empty(comm.size, mine.numel())
    comm.all_gather(every, mine)
    return bool((every == mine).all())
