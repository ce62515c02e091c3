"""Flight recorder: a rank's step, phase, task and pending calls, readable while the rank waits. (torch's is for NCCL.)

Comms and mailboxes record the begin of each call and each wait; the train loop records step and phase, a pipeline the
task. The watchdog (watchdog.py) reads the recorder from another thread, even while the rank is blocked inside a
library. So every record is a single assignment, which needs no lock.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

CONNECT = "connect"
"""The verb recorded while a group's connections are made, before anything can be sent."""

DEVICE = "the end of a step on the device"
"""The verb recorded while a host waits for its device, which may wait in turn: NCCL's kernels wait for other ranks'."""

REMEMBERED = 8
"""Number of an axis's last collectives that a rank remembers."""


@dataclass(eq=False, slots=True)  # not frozen: a frozen one takes a microsecond more to make, in every collective
class Call:
    """A collective or a message that this rank takes part in; never changed.

    `ranks`: the ranks that must take part for it to end. `number`: counts a group's collectives from 1, alike on all
    members; 0 for a message.
    """

    axis: str
    verb: str
    payload_bytes: int
    ranks: tuple[int, ...]
    number: int = 0


@dataclass(frozen=True)
class Waiting:
    """A call that a rank is waiting in, and the seconds waited so far."""

    axis: str
    verb: str
    payload_bytes: int
    ranks: tuple[int, ...]
    number: int
    seconds: float

    def __str__(self) -> str:
        ordinal = f" #{self.number}" if self.number else ""
        size = f" ({_readable(self.payload_bytes)})" if self.payload_bytes else ""
        return f"{self.verb}{ordinal} on axis {self.axis}{size}"


@dataclass(frozen=True)
class Whereabouts:
    """A snapshot of a rank. `waiting`: longest wait first. `begun`: by axis the last collectives as (number, verb,
    bytes); ranks with different collectives under one number have diverged."""

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


class DeviceEvent(Protocol):
    """A point in a device's work, as torch.cuda.Event."""

    def synchronize(self) -> None:
        """Return when the device has passed the point."""


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
        """Enter a phase, outside of any task."""
        self.phase, self.task = phase, ""

    def begin(self, call: Call) -> None:
        """Record the begin of a collective on this rank."""
        # Not a defaultdict: another thread reads the mapping, and a look must not add to it.
        if call.axis not in self._begun:
            self._begun[call.axis] = deque(maxlen=REMEMBERED)
        self._begun[call.axis].append(call)

    def waiting(self, call: Call) -> _Wait:
        """Make a context for the calling thread's wait for the call."""
        return _Wait(self, call)

    def await_device(self, event: DeviceEvent, num_ranks: int) -> None:
        """Wait for an event of this rank's device. The wait is recorded if other ranks can hold up the device: hosts
        that are late hold up the kernels that send and receive."""
        if num_ranks == 1:
            event.synchronize()
            return
        with self.waiting(Call("world", DEVICE, 0, tuple(range(num_ranks)))):
            event.synchronize()

    def longest_wait(self) -> tuple[Call, float] | None:
        """Return the call with the longest wait, and the seconds waited; None without a wait."""
        waits = list(self._waiting.items())
        if not waits:
            return None
        call, since = min(waits, key=lambda wait: wait[1])
        return call, self.clock() - since

    def whereabouts(self) -> Whereabouts:
        """Take a snapshot of this rank, from any thread."""
        now = self.clock()
        waits = sorted(list(self._waiting.items()), key=lambda wait: wait[1])  # noqa: C414 - a copy, made in one go
        return Whereabouts(
            self.step,
            self.phase,
            str(self.task),
            # Durations, not times: monotonic clocks of different hosts start at different points.
            tuple(Waiting(c.axis, c.verb, c.payload_bytes, c.ranks, c.number, now - since) for c, since in waits),
            {
                axis: tuple((call.number, call.verb, call.payload_bytes) for call in calls.copy())
                # Each copy is one call under Python's lock: the rank goes on meanwhile.
                for axis, calls in self._begun.copy().items()
            },
        )


@dataclass(slots=True)
class _Wait:
    """The context of a wait: a class, since contextmanager's generator takes three times as long."""

    _recorder: FlightRecorder
    _call: Call

    def __enter__(self) -> None:
        self._recorder._waiting[self._call] = self._recorder.clock()

    def __exit__(self, *_: object) -> None:
        recorder, call = self._recorder, self._call
        seconds = recorder.clock() - recorder._waiting.pop(call)
        if call.verb != DEVICE:  # mostly this rank's own work
            recorder.waited_seconds += seconds


def _readable(count: int) -> str:
    """Bytes as a person reads them: 4.0 MB."""
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{count} B" if units[0] == "B" else f"{size:.1f} {units[0]}"
