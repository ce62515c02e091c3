"""The world of ranks that are threads of one process, of which one runs at a time.

A rank holds the world's turn until it waits for another rank. So a breakpoint stops all ranks, each rank has its own
torch random state and default dtype (which a process has once), and a run does not depend on scheduling. When every
rank waits for another, the world detects it at once, without a timeout, and ends all ranks with a message that names
who waits in which call. A rank that raises ends the others at their next wait.
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

from meshwright.ranks.errors import LaunchError, LostRankError
from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.ranks.hang import Record, explain_hang

Act = Callable[[Sequence[Any]], None]
"""The data movement of a collective: called by the last member to come, with all members' arguments in member order."""


@dataclass(frozen=True)
class _Settings:
    """torch's process-wide settings that a rank may change, saved while it does not have the turn.

    `on_device`: the random state of `device`, the ranks' GPU (None on the host); `random`: the host's.
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
    """The collectives of one group: the n-th calls of all members are one collective. `ended`: how many are over.

    `waiting`: of those that are not, by number: the verb, and what each member that has come gave.
    """

    size: int
    ended: int = 0
    waiting: dict[int, tuple[str, dict[int, Any]]] = field(default_factory=dict)

    def come(self, number: int, verb: str, index: int, given: object, act: Act) -> bool:
        """Member `index` comes to call `number`. True if it is the last, which completes the call.

        Raises LaunchError where another member is in another verb there.
        """
        called, gifts = self.waiting.setdefault(number, (verb, {}))
        if called != verb:
            raise LaunchError(f"ranks of one group have parted: one is in {verb}, another in {called}")
        gifts[index] = given
        if len(gifts) < self.size:
            return False
        # Deleted before the movement, which may raise: no other rank may then come to the call.
        del self.waiting[number]
        # no_grad: the movement runs in the last member's thread, whose autograd must not record other ranks' tensors.
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
        """By waiting rank: a function that says whether it may go on."""
        self._aside: set[int] = set()
        self._left: set[int] = set()
        self.meetings: dict[object, Meeting] = {}
        """By group, shared by its members."""
        self.queues: defaultdict[object, deque[Any]] = defaultdict(deque)
        """Messages not yet taken, by axis and receiver."""
        self.letters: dict[object, Tensor] = {}
        """Tensors sent and not yet received, by group, sender, receiver and number."""

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """A rank's life: entered when no other runs, with the settings of the world's maker, restored at its end."""
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
        """Let other ranks run until `ready`. Raises LostRankError when a rank has failed."""
        if self.failure is None and not ready():
            own = _Settings.now(self.device)
            self._ready[rank] = ready
            self._end_if_all_wait()
            # A woken rank may find that another rank has already taken what it was woken for.
            while self.failure is None and not ready():
                self._woken[rank].wait()
            del self._ready[rank]
            own.put_back()
        if self.failure is not None:
            failed, error = self.failure
            raise LostRankError(f"rank {failed} failed: {error}" if failed >= 0 else str(error)) from error

    def wake(self, ranks: Sequence[int]) -> None:
        """Let these waiting ranks check whether they may go on."""
        for rank in ranks:
            self._woken[rank].notify()

    @contextmanager
    def aside(self, rank: int) -> Iterator[None]:
        """A context in which other ranks run while this one waits for a thread that is no rank."""
        own = _Settings.now(self.device)
        # Counted separately: while a rank is set aside, it is no deadlock that all others wait.
        self._aside.add(rank)
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
            self._aside.discard(rank)
            own.put_back()

    def stop(self, error: BaseException) -> None:
        """End all ranks at their next wait. Called by a thread that is no rank."""
        with self._turn:
            self._fail(-1, error)

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = rank, error
            self.wake(range(self.size))

    def _end_if_all_wait(self) -> None:
        """A rank that is set aside or has not begun may still wake another rank."""
        alive = self.size - len(self._left)
        # Exact: only a running rank can make another one ready, and none runs.
        if 0 < len(self._ready) == alive and not self._aside and not any(ready() for ready in self._ready.values()):
            host, here = socket.gethostname(), os.getpid()
            records = [
                Record(rank, self.size, 0, host, here, "hung" if rank in self._ready else "ended", recorder.clock(),
                       time.time(), recorder.whereabouts())
                for rank, recorder in sorted(self.recorders.items())
            ]  # fmt: skip
            self._fail(-1, LaunchError(explain_hang(records) or "every rank waits for another one"))


@dataclass
class ThreadBoard:
    """Notes in this process's memory, for threads that are no ranks."""

    _notes: dict[str, str] = field(default_factory=dict)
    _came: threading.Condition = field(default_factory=threading.Condition)

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
