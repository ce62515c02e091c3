"""World of ranks that are threads of one process, one running at a time.

A rank holds the world's turn, a lock, until the rank waits for another. So a breakpoint stops all ranks, and a run does
not depend on scheduling. torch's random state and default dtype exist once per process: the world saves and restores a
copy for each rank. If every rank waits for another, the world detects the deadlock at once, without a timeout. All
ranks then end with a message that names each waiting rank and its call. A rank that raises ends the others when they
next wait.
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
"""Data movement of a collective, called by the last member that calls, with all members' arguments in member order."""


@dataclass(frozen=True)
class _Settings:
    """torch's process-wide settings of one rank, saved while another rank has the turn.

    `random`: the host's random state. `on_device`: the random state of `device`, the ranks' GPU; None on the host.
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
    """The collectives of one group: the n-th calls of all members are one collective.

    `ended`: number of complete collectives. `waiting`: the incomplete ones by ordinal: the verb, and the arguments by
    member index of the members that have called.
    """

    size: int
    ended: int = 0
    waiting: dict[int, tuple[str, dict[int, Any]]] = field(default_factory=dict)

    def come(self, ordinal: int, verb: str, index: int, given: object, act: Act) -> bool:
        """Record the call `ordinal` of one member; the last member's call moves the data.

        Args:
            ordinal: index of the collective in the group.
            verb: the member's verb.
            index: the member.
            given: the member's arguments for `act`.
            act: the data movement.

        Returns:
            True if all members have called.

        Raises:
            LaunchError: another member called another verb under this ordinal.
        """
        called, gifts = self.waiting.setdefault(ordinal, (verb, {}))
        if called != verb:
            raise LaunchError(f"ranks of one group have parted: one is in {verb}, another in {called}")
        gifts[index] = given
        if len(gifts) < self.size:
            return False
        # Deleted before the movement, so that after an exception no other rank can join the call.
        del self.waiting[ordinal]
        # no_grad: the movement runs in the last member's thread, and its autograd must not record other ranks' tensors.
        with torch.no_grad():
            act([gifts[member] for member in range(self.size)])
        self.ended += 1
        return True


class ThreadWorld:
    """`size` ranks, each a thread inside `turn`. `device`: the device of all ranks.

    On a GPU all ranks compute in one stream: kernels run in the order in which the ranks enqueue them. `failure`: the
    first rank that raised, and the exception; rank -1: a deadlock of all ranks, or `stop`. Only the rank with the turn
    may call methods, except `stop`.
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
        """By waiting rank: a function that returns True if the rank can continue."""
        self._aside: set[int] = set()
        self._left: set[int] = set()
        self.meetings: dict[object, Meeting] = {}
        """By group name; members of a group share one."""
        self.queues: defaultdict[object, deque[Any]] = defaultdict(deque)
        """Unread messages, by axis and receiver."""
        self.letters: dict[object, Tensor] = {}
        """Sent tensors until their receipt, by group, sender, receiver and number."""

    @contextmanager
    def turn(self, rank: int) -> Iterator[None]:
        """Run a rank as a context: enter when no other rank runs, with torch's settings at the world's creation.

        Restores the settings at the end.
        """
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
            settings = _Settings.now(self.device)
            self._ready[rank] = ready
            self._end_if_all_wait()
            # Check again after a wake-up: another rank may have taken the awaited message first.
            while self.failure is None and not ready():
                self._woken[rank].wait()
            del self._ready[rank]
            settings.put_back()
        if self.failure is not None:
            failed, error = self.failure
            raise LostRankError(f"rank {failed} failed: {error}" if failed >= 0 else str(error)) from error

    def wake(self, ranks: Sequence[int]) -> None:
        """Let waiting ranks check their conditions again."""
        for rank in ranks:
            self._woken[rank].notify()

    @contextmanager
    def aside(self, rank: int) -> Iterator[None]:
        """Release the turn inside the context, so that other ranks run while this one waits for a thread of its own."""
        settings = _Settings.now(self.device)
        # Counted separately: while a rank is aside, waits of all others are no deadlock.
        self._aside.add(rank)
        self._turn.release()
        try:
            yield
        finally:
            self._turn.acquire()
            self._aside.discard(rank)
            settings.put_back()

    def stop(self, error: BaseException) -> None:
        """End every rank at the rank's next wait. Called by a thread that is no rank."""
        with self._turn:
            self._fail(-1, error)

    def _fail(self, rank: int, error: BaseException) -> None:
        if self.failure is None:
            self.failure = rank, error
            self.wake(range(self.size))

    def _end_if_all_wait(self) -> None:
        """End all ranks if all live ranks wait. A rank that is aside or has not begun may still wake another rank."""
        alive = self.size - len(self._left)
        # No false alarm: only a running rank can make another rank ready, and none runs.
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
