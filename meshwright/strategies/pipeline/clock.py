"""An event simulation of a pipeline's step, without devices or ranks.

`simulate` runs the same generators as ranks do (engine.py), with given seconds of tasks and messages. A deadlock raises
AssertionError.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from meshwright.strategies.pipeline.engine import StageProcess, stage_process
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import ScheduleRule
from meshwright.strategies.pipeline.span import Span, Timeline, task_span
from meshwright.strategies.pipeline.task import WAIT, Arrival, Task, TaskKind, Wait

TaskSeconds = Callable[[int, Task], float]
"""costs(stage, task): seconds of the task. Called once a task."""

MessageSeconds = Callable[[int, int, Task], float]
"""latency(from, to, message): seconds from the end of the sending task to the arrival. For an exchange of rows (a stage
to itself): seconds of the exchange alone. Called once a message."""

Pace = Callable[[int], float]
"""pace(busy): speed of tasks while `busy` stages compute; at 1.0 a task takes the seconds of `TaskSeconds`."""


def simulate(
    num_stages: int,
    num_microbatches: int,
    rule: ScheduleRule,
    costs: TaskSeconds,
    latency: MessageSeconds,
    pace: Pace | None = None,
    placement: ChunkPlacement | None = None,
) -> Timeline:
    """Return the spans of one step.

    Sends do not block, a link carries any number of messages at once, and messages may overtake each other. A stage
    that decides at a moment has received all messages of that moment.

    Args:
        costs: seconds of each task.
        latency: seconds of each message.
        pace: speed of tasks by the number of busy stages; None: each stage has devices of its own.
        placement: the chunks of each stage; None: one chunk a stage.

    Raises:
        AssertionError: the schedule deadlocks.
    """
    placement = placement or ChunkPlacement(num_stages)
    # A fixed order needs no events: 3 us a task instead of 14, with the same spans. A changing pace needs events, since
    # the end of running tasks moves.
    if rule.fixed and pace is None:
        return _in_order(placement, _orders(placement, num_microbatches, rule), costs, latency)
    return _Simulation(placement, num_microbatches, rule, costs, latency, pace).run()


@lru_cache(maxsize=16)
def _orders(placement: ChunkPlacement, num_microbatches: int, rule: ScheduleRule) -> tuple[tuple[Task, ...], ...]:
    """Return the tasks of each stage."""
    stages = range(placement.num_stages)
    return tuple(rule.view(stage, placement.num_stages, num_microbatches, placement).order for stage in stages)


def _in_order(
    placement: ChunkPlacement, orders: Sequence[Sequence[Task]], costs: TaskSeconds, latency: MessageSeconds
) -> Timeline:
    """Return the spans of fixed orders. A task begins when the stage's previous task has ended and the message has
    arrived."""
    stages = range(placement.num_stages)
    now, passed = [0.0 for _ in stages], [0 for _ in stages]
    come: list[dict[Arrival, float]] = [{} for _ in stages]
    needs = {
        # Computed once instead of at each task.
        (stage, task_kind, chunk): task_kind is not TaskKind.WEIGHT
        and placement.sender(stage, task_kind, chunk) is not None
        for stage in stages
        for task_kind in TaskKind
        for chunk in range(placement.num_chunks)
    }
    spans: list[Span] = []
    going = set(stages)
    while going:
        stage = going.pop()
        order, end = orders[stage], now[stage]
        for task_index in range(passed[stage], len(order)):
            task = order[task_index]
            if needs[stage, task.kind, task.chunk]:
                # Sending the message adds the stage to `going` again.
                if task not in come[stage]:
                    break
                # A message equals the task that it enables (Arrival = Task).
                end = max(end, come[stage].pop(task))
            start, end = end, end + costs(stage, task)
            spans.append(task_span(stage, task, start, end))
            sent = placement.receiver(stage, task)
            if sent is not None:
                to, message = sent
                # A message between two chunks of a stage crosses no link.
                come[to][message] = end if to == stage else end + latency(stage, to, task)
                going.add(to)
            passed[stage] = task_index + 1
        now[stage] = end
        going.discard(stage)
    waiting = [f"stage {stage}" for stage in stages if passed[stage] < len(orders[stage])]
    assert not waiting, f"deadlock: all wait, and no message is under way: {', '.join(waiting)}"
    return Timeline(len(orders), tuple(sorted(spans, key=lambda span: (span.start_seconds, span.stage))))


@dataclass
class _Stage:
    """A stage in the simulation."""

    process: StageProcess
    action: Task | Wait | None = WAIT
    busy: bool = False
    inbox: list[Arrival] = field(default_factory=list)
    """Messages not delivered yet."""
    task_index: int = 0
    """The index of the running task among all begun tasks."""
    ending: _Event | None = None
    """The event of the running task's end."""
    traded: float = 0.0
    """The end of the stage's last exchange of rows, in seconds."""


_Event = tuple[float, int, int, Arrival | None]
"""(seconds, number of the event, stage, message): the message arrives at the stage, or the stage's task ends (None)."""


class _Simulation:
    """The state of one simulated step."""

    def __init__(
        self,
        placement: ChunkPlacement,
        num_microbatches: int,
        rule: ScheduleRule,
        costs: TaskSeconds,
        latency: MessageSeconds,
        pace: Pace | None,
    ) -> None:
        stages = range(placement.num_stages)
        views = [rule.view(stage, placement.num_stages, num_microbatches, placement) for stage in stages]
        self.stages = [_Stage(stage_process(view, rule.schedule)) for view in views]
        self.placement = placement
        self.costs, self.latency, self.pace = costs, latency, pace
        self.rate = 1.0
        self.events: list[_Event] = []
        self.num_events = 0
        self.begun: list[tuple[int, Task, float]] = []
        self.ended: list[float] = []

    def run(self) -> Timeline:
        for index, stage in enumerate(self.stages):
            self.begin(0.0, index, next(stage.process, None))
        self.keep_pace(0.0)
        while self.events:
            time = self.events[0][0]
            free: set[int] = set()
            while self.events and self.events[0][0] == time:
                # All events of a moment are applied before any stage decides.
                event = heapq.heappop(self.events)
                if self.happens(event):
                    free.add(event[2])
            # Sorted, since costs may draw random numbers in the order of calls.
            for index in sorted(free):
                self.resume(time, index)
            self.keep_pace(time)
        waiting = [f"stage {index}" for index, stage in enumerate(self.stages) if stage.action is not None]
        assert not waiting, f"deadlock: all wait, and no message is under way: {', '.join(waiting)}"
        spans = (task_span(*begun, ended) for begun, ended in zip(self.begun, self.ended, strict=True))
        return Timeline(len(self.stages), tuple(spans))

    def happens(self, event: _Event) -> bool:
        """Apply an event; return whether the event's stage may decide."""
        time, _, index, message = event
        stage = self.stages[index]
        if message is not None:
            assert stage.action is not None, f"{message} for stage {index}, which is done"
            stage.inbox.append(message)
            return not stage.busy
        if event is not stage.ending:
            return False  # an event from before the pace changed
        stage.busy, stage.ending = False, None
        assert isinstance(stage.action, Task), f"stage {index} ended what it did not begin"
        self.ended[stage.task_index] = time
        self.send(time, index, stage.action)
        return True

    def send(self, time: float, index: int, task: Task) -> None:
        """Queue the arrival of a task's message. Between two chunks of one stage the message arrives at once."""
        sent = self.placement.receiver(index, task)
        if sent is None:
            return
        to, message = sent
        if to == index and self.placement.crosses(index, task):
            # A stage's exchanges of rows share the stage's links: one after another, in the order of tasks.
            stage = self.stages[index]
            stage.traded = max(time, stage.traded) + self.latency(index, to, task)
            self.push(stage.traded, to, message)
        else:
            self.push(time if to == index else time + self.latency(index, to, task), to, message)

    def push(self, time: float, index: int, message: Arrival | None) -> _Event:
        event = time, self.num_events, index, message
        heapq.heappush(self.events, event)
        self.num_events += 1
        return event

    def resume(self, time: float, index: int) -> None:
        """Deliver a stage's messages and begin the next task."""
        stage = self.stages[index]
        arrived, stage.inbox = stage.inbox, []
        try:
            action = stage.process.send(arrived)
        except StopIteration:
            action = None
        self.begin(time, index, action)

    def begin(self, time: float, index: int, action: Task | Wait | None) -> None:
        stage = self.stages[index]
        stage.action, stage.busy = action, isinstance(action, Task)
        if isinstance(action, Task):
            end = time + self.costs(index, action) / self.rate
            stage.task_index, stage.ending = len(self.begun), self.push(end, index, None)
            self.begun.append((index, action, time))
            self.ended.append(end)

    def keep_pace(self, time: float) -> None:
        """Set the pace for the number of stages that are busy now."""
        if self.pace is None:
            return
        before, self.rate = self.rate, self.pace(sum(stage.busy for stage in self.stages))
        if self.rate == before:
            return
        for index, stage in enumerate(self.stages):
            if stage.ending is not None:
                # The remaining work continues at the new pace. `happens` skips the old event, which stays in the heap.
                left = (stage.ending[0] - time) * before
                stage.ending = self.push(time + left / self.rate, index, None)
