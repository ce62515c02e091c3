"""Moments of a device, and the timeline of a step as spans: simulated (clock.py) or measured.

On a CPU, a moment is the host's time. A GPU lags behind the host, which queues the work: a moment is then an event in
the GPU's stream, and the event's time is read later. Measuring therefore never waits for the device.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch

from meshwright.strategies.pipeline.task import Task, TaskKind


@dataclass(frozen=True)
class Moment:
    """A moment of a device. On a CPU at `seconds` since the epoch. On a GPU, `event` in the GPU's stream, relative to
    another event, `start`, recorded at `seconds`."""

    seconds: float
    event: torch.cuda.Event | None = None
    start: torch.cuda.Event | None = None

    def __call__(self) -> float:
        """Return the seconds since the epoch. On a GPU, waits until the device has reached the moment."""
        if self.event is None or self.start is None:
            return self.seconds
        self.event.synchronize()
        # elapsed_time, in milliseconds between two events of one device, is the only clock of the device.
        return float(self.seconds + self.start.elapsed_time(self.event) / 1e3)

    def is_past(self) -> bool:
        """Return whether the device has reached the moment. Does not wait."""
        return self.event is None or self.event.query()


def seconds_between(first: Moment, last: Moment) -> float:
    """Return the seconds from one moment of a device to a later one, possibly of another watch.

    On a GPU, by the GPU's own clock: watches started on a busy GPU have unknown offsets from the queued work.
    """
    if first.event is None or last.event is None:
        return last() - first()
    last.event.synchronize()
    return float(first.event.elapsed_time(last.event) / 1e3)


@dataclass
class Watch:
    """A clock for moments of a device. `start` is called first, when the device is idle: after a step."""

    device: torch.device

    def start(self) -> None:
        """Set the origin of moments. Reads the calendar time once: a clock adjustment then moves no moment of
        a step."""
        self._started, self._from = time.time(), time.perf_counter()
        if self.device.type == "cuda":
            # Recorded when the device is idle: this event and both host clocks are then one moment.
            self._start = torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))

    def now(self) -> Moment:
        """Return the moment when the device has finished all work queued so far."""
        if self.device.type != "cuda":
            return Moment(self._started + time.perf_counter() - self._from)
        event = torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))
        return Moment(self._started, event, self._start)


CATEGORIES = {TaskKind.FORWARD: "forward", TaskKind.BACKWARD: "backward", TaskKind.WEIGHT: "weight"}


class Span(NamedTuple):
    """One activity of a stage, from `start_seconds` to `end_seconds`, with any origin that all spans share."""

    stage: int
    name: str
    """The label: F3, optimizer."""
    category: str
    """Selects colour and row: forward, backward, weight, or a phase's name."""
    start_seconds: float
    end_seconds: float
    microbatch: int | None = None
    """None for a phase of the step."""
    chunk: int = 0
    """Index of the chunk (or piece) in the stage."""

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def task_span(stage: int, task: Task, start_seconds: float, end_seconds: float) -> Span:
    """Return the span of a task."""
    task_kind, microbatch, chunk = task
    return Span(stage, _name(task), CATEGORIES[task_kind], start_seconds, end_seconds, microbatch, chunk)


_name = lru_cache(maxsize=2**14)(str)
"""A task's name: all stages of a simulated step have the same tasks."""


@dataclass(frozen=True)
class Timeline:
    """The spans of all stages in one step of a pipeline."""

    num_stages: int
    spans: tuple[Span, ...]
    tasks: tuple[Span, ...] = field(init=False, repr=False, compare=False)
    """The spans of tasks, without phases of the step."""
    total_seconds: float = field(init=False, repr=False, compare=False)
    """From the beginning of the first task of any stage to the end of the last task."""

    def __post_init__(self) -> None:
        outside = [span for span in self.spans if not 0 <= span.stage < self.num_stages]
        assert not outside, f"spans of stages beyond the {self.num_stages}: {outside[:3]}"
        tasks = tuple(span for span in self.spans if span.microbatch is not None)
        begin = min((span.start_seconds for span in tasks), default=0.0)
        end = max((span.end_seconds for span in tasks), default=0.0)
        self.__dict__.update(tasks=tasks, total_seconds=end - begin)  # written past the frozen dataclass

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """Each stage's share of `total_seconds` without a task, 0 to 1."""
        total = self.total_seconds
        busy = [0.0] * self.num_stages
        for span in self.tasks:
            # Only tasks count: phases may overlap tasks, and a stage would be busy for more than 100 %.
            busy[span.stage] += span.seconds
        return tuple(1 - seconds / total if total > 0 else 0.0 for seconds in busy)

    @property
    def idle_share(self) -> float:
        """The mean over all stages."""
        return sum(self.idle_shares) / self.num_stages
