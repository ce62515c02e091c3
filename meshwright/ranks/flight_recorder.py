"""The flight recorder: where a rank is, for whoever asks while it waits. Torch's has the same purpose, for NCCL alone.

Comms and mailboxes record each call when it begins and while the rank waits for it, the train loop its step and phase,
a pipeline its task. A watchdog (watchdog.py) reads it from a thread of its own, also while the rank's other threads are
blocked inside a library; so what is recorded are single assignments, which need no lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

CONNECT = "connect"
"""The verb of a rank that waits before it can send anything: a group is made."""

REMEMBERED = 8
"""The last collectives of an axis that a rank can name."""


@dataclass(eq=False, slots=True)  # not frozen: a frozen one takes a microsecond more to make, in every collective
class Call:
    """A collective or a message as one rank takes part in it. Nobody changes it.

    `ranks`: who must take part for it to end. `number`: of a collective its number among those of its group, from 1,
    on which all members agree; 0 of a message.
    """

    axis: str
    verb: str
    payload_bytes: int
    ranks: tuple[int, ...]
    number: int = 0


@dataclass(frozen=True)
class Waiting:
    """A call that a rank waits for, and since how many seconds."""

    axis: str
    verb: str
    payload_bytes: int
    ranks: tuple[int, ...]
    number: int
    seconds: float

    def __str__(self) -> str:
        number = f" #{self.number}" if self.number else ""
        size = f" ({_readable(self.payload_bytes)})" if self.payload_bytes else ""
        return f"{self.verb}{number} on axis {self.axis}{size}"


@dataclass(frozen=True)
class Whereabouts:
    """A rank's doings at a moment. `waiting`: longest first. `begun`: by axis the last collectives, as (number, verb,
    bytes); ranks that have begun other ones under the same number have parted."""

    step: int
    phase: str
    task: str
    waiting: tuple[Waiting, ...]
    begun: dict[str, tuple[tuple[int, str, int], ...]]

    def __str__(self) -> str:
        task = f", task {self.task}" if self.task else ""
        return f"step {self.step}, {self.phase}{task}"

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> Whereabouts:
        waiting = tuple(Waiting(**{**entry, "ranks": tuple(entry["ranks"])}) for entry in tree["waiting"])
        begun = {axis: tuple((n, verb, size) for n, verb, size in calls) for axis, calls in tree["begun"].items()}
        return cls(tree["step"], tree["phase"], tree["task"], waiting, begun)


@dataclass
class FlightRecorder:
    """`step`: the current one, from 1; 0 before the first. `task`: a pipeline's; printed only when asked for.

    `waited_seconds`: how long this rank has waited for others so far.
    """

    step: int = 0
    phase: str = "starting"
    task: object = ""
    waited_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    """Never the time of day: that jumps."""
    _waiting: dict[Call, float] = field(default_factory=dict)
    _begun: dict[str, deque[Call]] = field(default_factory=dict)

    def enter(self, phase: str) -> None:
        """From here on the rank is in this phase, and in no task."""
        self.phase, self.task = phase, ""

    def begin(self, call: Call) -> None:
        """A collective begins on this rank."""
        # Not a defaultdict: another thread reads the mapping, and a look must not add to it.
        if call.axis not in self._begun:
            self._begun[call.axis] = deque(maxlen=REMEMBERED)
        self._begun[call.axis].append(call)

    def waiting(self, call: Call) -> _Wait:
        """The calling thread waits for the call while the context is entered."""
        return _Wait(self, call)

    def longest_wait(self) -> tuple[Call, float] | None:
        """The call that is waited for longest, and for how many seconds."""
        waits = list(self._waiting.items())
        if not waits:
            return None
        call, since = min(waits, key=lambda wait: wait[1])
        return call, self.clock() - since

    def whereabouts(self) -> Whereabouts:
        """Where this rank is now. From any thread."""
        now = self.clock()
        waits = sorted(list(self._waiting.items()), key=lambda wait: wait[1])  # noqa: C414 - a copy, made in one go
        return Whereabouts(
            self.step,
            self.phase,
            str(self.task),
            # Seconds and no times: clocks that never jump begin anywhere, on each host elsewhere.
            tuple(Waiting(c.axis, c.verb, c.payload_bytes, c.ranks, c.number, now - since) for c, since in waits),
            {
                axis: tuple((call.number, call.verb, call.payload_bytes) for call in calls.copy())
                # Copies, made by one call under Python's lock: the rank goes on meanwhile.
                for axis, calls in self._begun.copy().items()
            },
        )


class _Wait:
    """The context of a wait: a class, since a generator's takes thrice as long."""

    __slots__ = ("_call", "_recorder")

    def __init__(self, recorder: FlightRecorder, call: Call) -> None:
        self._recorder, self._call = recorder, call

    def __enter__(self) -> None:
        self._recorder._waiting[self._call] = self._recorder.clock()

    def __exit__(self, *_: object) -> None:
        recorder = self._recorder
        recorder.waited_seconds += recorder.clock() - recorder._waiting.pop(self._call)


def _readable(count: int) -> str:
    """Bytes as a person reads them: 4.0 MB."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
