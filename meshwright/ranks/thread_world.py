"""The world of ranks that are threads of one process. One of them runs at a time.

A rank holds the world's turn until it waits for another rank. So a breakpoint stops all ranks, each has torch's random
numbers and default dtype to itself although a process has one of them, and a run is the same whoever runs first. Where
every rank waits for another one, the world knows it at once, without a timeout, and ends them all with a message that
names who waits in what. A rank that raises ends the others at their next wait.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from meshwright.errors import LaunchError, LostRankError
from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.ranks.hang import Record, explain_hang

Act = Callable[[Sequence[Any]], None]
"""The movement of a collective: it is given what its members gave, in their order, by the last of them to come."""


@dataclass(frozen=True)
class _Settings:
    """Torch's settings of the whole process that a rank may change, as they are while it has the turn.

    `device`: the ranks' own, whose random numbers `on_device` is the state of; None on the host, which has `random`.
    """

    device: torch.device
    random: Tensor
    on_device: Tensor | None
    dtype: torch.dtype

    @classmethod
    def now(cls, device: torch.device) -> Self:
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(device, torch.get_rng_state(), on_device, torch.get_default_dtype())

    def put_back(self) -> None:
        torch.set_rng_state(self.random)
        torch.set_default_dtype(self.dtype)
        if self.on_device is not None:
            torch.cuda.set_rng_state(self.on_device, self.device)


@dataclass
class Meeting:
    """The collectives of one group. A member's n-th call belongs to the others' n-th. `ended`: how many are over.

    `waiting`: of those that are not, by number: the verb, and what each member that has come gave.
    """

    size: int
    ended: int = 0
    waiting: dict[int, tuple[str, dict[int, Any]]] = field(default_factory=dict)

    def come(self, number: int, verb: str, index: int, given: object, act: Act) -> bool:
        """The member `index` comes to its call `number`; whether it was the last, and the call is over.

        Raises LaunchError where another member is in another verb there.
        """
        called, gifts = self.waiting.setdefault(number, (verb, {}))
        if called != verb:
            raise LaunchError(f"ranks of one group have parted: one is in {verb}, another in {called}")
        gifts[index] = given
        if len(gifts) < self.size:
            return False
        # Before the movement: what it raises must not leave a call that another rank would come to.
        del self.waiting[number]
        # Moved in the last member's thread, whose autograd must not record what happens to the others' tensors.
        with torch.no_grad():
            act([gifts[member] for member in range(self.size)])
        self.ended += 1
        return True


class ThreadWorld:
    """`size` ranks, each a thread that lives inside `turn`. `device`: the one device of all of them. On a GPU they
    compute in one stream, so that what a rank enqueues comes after what the ranks before it have enqueued. `failure`:
    the first rank that raised, and what it raised; rank -1: all of them, who wait for each other.

    All else is called by the rank whose turn it is.
    """

    def __init__(self, size: int, device: torch.device = torch.device("cpu")) -> None:
        self.size, self.device = size, device
        self.failure: tuple[int, BaseException] | None = None
        self.recorders: dict[int, FlightRecorder] = {}
        self.board = ThreadBoard()
        self._settings = _Settings.now(device)
        self._turn = threading.Lock()
        self._woken = [threading.Condition(self._turn) for _ in range(size)]
        self._ready: dict[int, Callable[[], bool]] = {}
        """By waiting rank: whether it may go on."""
        self._aside: set[int] = set()
        self._left: set[int] = set()
        self._meetings: dict[object, Meeting] = {}
        self._queues: defaultdict[object, deque[Any]] = defaultdict(deque)
        self.letters: dict[object, Tensor] = {}
        """Tensors that were sent and not taken, by group, sender, receiver and number."""

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """A rank's life: entered when no other runs, with the settings of who made the world, who finds them again."""
        with self._turn:
            self._settings.put_back()
            try:
                yield
            except BaseException as error:
                self._fail(rank, error)
                raise
            finally:
                self._settings.put_back()
                self._left.add(rank)
                self._end_if_all_wait()

    def wait(self, rank: int, ready: Callable[[], bool]) -> None:
        """Let other ranks run until `ready`. Raises LostRankError where one of them has failed."""
        if self.failure is None and not ready():
            own = _Settings.now(self.device)
            self._ready[rank] = ready
            self._end_if_all_wait()
            # Woken, a rank may find that another has used up what it was woken for.
            while self.failure is None and not ready():
                self._woken[rank].wait()
            del self._ready[rank]
            own.put_back()
        if self.failure is not None:
            failed, error = self.failure
            raise LostRankError(f"rank {failed} failed: {error}" if failed >= 0 else str(error)) from error

    def wake(self, ranks: Sequence[int]) -> None:
        """These ranks may find that they may go on."""
        for rank in ranks:
            self._woken[rank].notify()

    @contextmanager
    def aside(self, rank: int) -> Iterator[None]:
        """Let others run while this rank waits for a thread that is no rank."""
        own = _Settings.now(self.device)
        # Counted apart: while it is set aside, that all others wait is no hang.
        self._aside.add(rank)
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
            self._aside.discard(rank)
            own.put_back()

    def meeting(self, name: object, size: int) -> Meeting:
        """The collectives of the group of that name: the same for all of its members."""
        return self._meetings.setdefault(name, Meeting(size))

    def queue(self, name: object) -> deque[Any]:
        """The messages to the place of that name that have not been taken."""
        return self._queues[name]

    def stop(self, error: BaseException) -> None:
        """End all ranks at their next wait. Called from outside of them."""
        with self._turn:
            self._fail(-1, error)

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = rank, error
            self.wake(range(self.size))

    def _end_if_all_wait(self) -> None:
        """A rank that is set aside, or has not begun, may still wake another."""
        alive = self.size - len(self._left)
        # Exact, and at once: only a running rank can make another one ready, and none runs.
        if 0 < len(self._ready) == alive and not self._aside and not any(ready() for ready in self._ready.values()):
            host, here = socket.gethostname(), os.getpid()
            records = [
                Record(rank, self.size, 0, host, here, "hung" if rank in self._ready else "ended", recorder.clock(),
                       time.time(), recorder.whereabouts())
                for rank, recorder in sorted(self.recorders.items())
            ]  # fmt: skip
            self._fail(-1, LaunchError(explain_hang(records) or "every rank waits for another one"))


class ThreadBoard:
    """Notes in this process's memory, for threads that are no ranks."""

    def __init__(self) -> None:
        self._notes: dict[str, str] = {}
        self._came = threading.Condition()

    def post(self, name: str, text: str) -> None:
        with self._came:
            self._notes[name] = text
            self._came.notify_all()

    def collect(self, names: Sequence[str], seconds: float) -> list[str]:
        with self._came:
            if not self._came.wait_for(lambda: self._notes.keys() >= set(names), seconds):
                missing = next(name for name in names if name not in self._notes)
                raise TimeoutError(f"{missing} was never finished")
            return [self._notes.pop(name) for name in names]
