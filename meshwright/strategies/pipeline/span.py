"""The timeline of a step: spans, from the clock that computes or from one that runs.

When something was on a rank's device. A host knows at once; a GPU lags behind the host that gives it work.

So a moment on a GPU is an event in its stream, and is asked for its time later: nothing waits for the device in order
to be measured.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from meshwright.strategies.pipeline.task import Task, TaskKind


@dataclass(frozen=True)
class Moment:
    """A moment of a device. On one that has done what it was given when the call returns it was at `seconds` since the
    epoch; on a GPU it is `event` in its stream, `start` being another at the time `seconds`."""

    seconds: float
    event: torch.cuda.Event | None = None
    start: torch.cuda.Event | None = None

    def __call__(self) -> float:
        """When it was, in seconds since the epoch. On a GPU that waits until the device has passed it."""
        if self.event is None or self.start is None:
            return self.seconds
        self.event.synchronize()
        # elapsed_time is in milliseconds, between two events of one device: the only clock that the device has.
        return float(self.seconds + self.start.elapsed_time(self.event) / 1e3)

    def is_past(self) -> bool:
        """Whether the device has passed it. Waits for nothing."""
        return self.event is None or self.event.query()


def seconds_between(first: Moment, last: Moment) -> float:
    """Seconds from one moment of a device to a later one, maybe of another watch: by the GPU's own clock where it has
    one, since watches of a busy GPU begin at whatever distance from the work that it has still to do."""
    if first.event is None or last.event is None:
        return last() - first()
    last.event.synchronize()
    return float(first.event.elapsed_time(last.event) / 1e3)


@dataclass
class Watch:
    """Takes moments of a device. `start` comes first, when the device has nothing left to do: after a step."""

    device: torch.device

    def start(self) -> None:
        """Moments count from here. The calendar is asked once, so that a clock that jumps moves no moment of a step."""
        self._started, self._from = time.time(), time.perf_counter()
        if self.device.type == "cuda":
            # Recorded when the device is idle, so that this event and the host's two clocks are one moment.
            self._start = torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))

    def now(self) -> Moment:
        """The moment at which the device has done what it was given so far."""
        if self.device.type != "cuda":
            return Moment(self._started + time.perf_counter() - self._from)
        event = torch.cuda.current_stream(self.device).record_event(torch.cuda.Event(enable_timing=True))
        return Moment(self._started, event, self._start)


CATEGORIES = {TaskKind.FORWARD: "forward", TaskKind.BACKWARD: "backward", TaskKind.WEIGHT: "weight"}


class Span(NamedTuple):
    """One thing that a stage did from `start_seconds` to `end_seconds`, counted from any moment that all spans share.

    `name` is what is written on it: F3, optimizer. `category` gives its colour and row: forward, backward, weight, or
    a phase's own name. `microbatch` is None for a phase of the step, `chunk` counts those of the stage.
    """

    stage: int
    name: str
    category: str
    start_seconds: float
    end_seconds: float
    microbatch: int | None = None
    chunk: int = 0

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.start_seconds


def task_span(stage: int, task: Task, start_seconds: float, end_seconds: float) -> Span:
    """The span of a task."""
    return Span(stage, str(task), CATEGORIES[task.kind], start_seconds, end_seconds, task.microbatch, task.chunk)


@dataclass(frozen=True)
class Timeline:
    """The spans of one step of a pipeline, of all its stages."""

    num_stages: int
    spans: tuple[Span, ...]
    tasks: tuple[Span, ...] = field(init=False, repr=False, compare=False)
    """The spans of the pipeline phase."""
    total_seconds: float = field(init=False, repr=False, compare=False)
    """The pipeline phase: from the first task of any stage to the end of the last."""

    def __post_init__(self) -> None:
        outside = [span for span in self.spans if not 0 <= span.stage < self.num_stages]
        assert not outside, f"spans of stages beyond the {self.num_stages}: {outside[:3]}"
        tasks = tuple(span for span in self.spans if span.microbatch is not None)
        begin = min((span.start_seconds for span in tasks), default=0.0)
        end = max((span.end_seconds for span in tasks), default=0.0)
        self.__dict__.update(tasks=tasks, total_seconds=end - begin)  # past the frozen dataclass

    @property
    def idle_shares(self) -> tuple[float, ...]:
        """The share of the pipeline phase, 0 to 1, in which each stage did no task."""
        total = self.total_seconds
        busy = [0.0] * self.num_stages
        for span in self.tasks:
            # Phases may run under tasks: counted too, they would make a stage busier than whole.
            busy[span.stage] += span.seconds
        return tuple(1 - seconds / total if total > 0 else 0.0 for seconds in busy)

    @property
    def idle_share(self) -> float:
        """The mean of all stages."""
        return sum(self.idle_shares) / self.num_stages
