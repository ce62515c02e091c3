"""The driver on a rank: it does what the engine says, sends what comes of it, and waits for messages.

The clock (clock.py) drives the same engine without a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshwright.model import Batch, Hidden, Scales, Stretch
from meshwright.pipeline.engine import stage_process
from meshwright.pipeline.passes import Seed
from meshwright.pipeline.schedule import FORWARD_ONLY, Rule, Schedule
from meshwright.pipeline.span import Moment, Span, Watch, task_span
from meshwright.pipeline.task import Arrival, Kind, Task, View
from meshwright.ranks.comm import Comm
from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.ranks.mailbox import Forms, Mailbox, Message

Received = dict[Arrival, Hidden]
"""Messages by the tasks that they make ready."""


class Synchronises(Protocol):
    """A data-parallel strategy, as far as a pipeline sees it."""

    def expect(self, final: bool) -> None:
        """Say whether the coming gradients are the step's last."""


class Acts(Protocol):
    """What does the tasks: a stage (stage.py), or what stands in for one."""

    stretch: Stretch

    def forward(self, index: int, incoming: Hidden, batch: Batch, scales: Scales) -> Hidden: ...

    def backward(self, index: int, gradients: Hidden, *, defers: bool) -> Hidden: ...

    def weights(self, index: int, *, final: bool) -> None: ...

    def hidden(self, incoming: Hidden, batch: Batch) -> Hidden: ...


@dataclass(frozen=True)
class Place:
    """Where a rank stands: the comm of a row's stages, that of the ranks that share its stage (its kit's), and the
    flight recorder, which is told of the rank's tasks."""

    row: Comm
    peers: Comm
    device: torch.device
    recorder: FlightRecorder


class Pipeline:
    """`forms`: of what passes to and from the stages beside this one."""

    def __init__(
        self, stage: Acts, place: Place, rule: Rule, mailbox: Mailbox, forms: Forms, strategy: Synchronises
    ) -> None:
        self.stage = stage
        self.place = place
        self.rule = rule
        self.mailbox = mailbox
        self.forms = forms
        self.strategy = strategy
        self._watch = Watch(place.device)
        self._done: list[tuple[Task, Moment, Moment]] = []
        self._epoch = -1

    @property
    def spans(self) -> list[Span]:
        """The tasks of the last step."""
        return [task_span(self.place.row.index, task, start(), end()) for task, start, end in self._done]

    def train(self, batches: Sequence[Batch], scales: Scales, seed: Seed) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.place.device)
        received: Received = {}
        last = len(batches) - 1
        self.strategy.expect(False)

        def act(task: Task) -> None:
            nonlocal total
            index = task.microbatch
            if task.kind is Kind.FORWARD:
                seed(index)
                outgoing = self.stage.forward(index, received.pop(task, ()), batches[index], scales)
                if self.stage.stretch.last:
                    total += outgoing[0]
                else:
                    self.mailbox.send("after", index, outgoing)
            elif task.kind is Kind.BACKWARD:
                if index == last:
                    self.strategy.expect(True)
                gradients = self.stage.backward(index, received.pop(task, ()), defers=self.rule.splits)
                if not self.stage.stretch.first:
                    self.mailbox.send("before", index, gradients)
            else:
                self.stage.weights(index, final=index == last)

        self._drive(self.rule, len(batches), act, received)
        return total

    @torch.no_grad()
    def hidden(self, batches: Sequence[Batch]) -> Iterator[Tensor | None]:
        received: Received = {}
        ends: list[Tensor | None] = []

        def act(task: Task) -> None:
            outgoing = self.stage.hidden(received.pop(task, ()), batches[task.microbatch])
            if not self.stage.stretch.last:
                self.mailbox.send("after", task.microbatch, outgoing)
            ends.append(outgoing[0] if self.stage.stretch.last else None)

        self._drive(FORWARD_ONLY, len(batches), act, received)
        return iter(ends)

    def _drive(self, rule: Rule, num_batches: int, act: Callable[[Task], None], received: Received) -> None:
        """Run the stage's engine to its end. What arrives lies in `received` until a task takes it."""
        place, stretch = self.place, self.stage.stretch
        self._epoch += 1
        before = 0 if stretch.first else num_batches
        after = 0 if stretch.last or Kind.BACKWARD not in rule.kinds else num_batches
        self.mailbox.open(self._epoch, self.forms, before, after)
        self._done = []
        self._watch.start()
        schedule = agreed(rule.schedule, rule.kinds, place)
        process = stage_process(rule.view(place.row.index, place.row.size, num_batches), schedule)
        arrived: list[Arrival] | None = None
        while True:
            try:
                action = next(process) if arrived is None else process.send(arrived)
            except StopIteration:
                break
            if isinstance(action, Task):
                start = self._watch.now()
                place.recorder.task = action
                act(action)
                self._done.append((action, start, self._watch.now()))
                messages = self.mailbox.poll()
            else:
                place.recorder.task = ""
                messages = self.mailbox.wait()
            arrived = [_arrival(message) for message in messages]
            received.update(zip(arrived, (message.tensors for message in messages), strict=True))
        place.recorder.task = ""
        self.mailbox.flush()
        place.row.assemble()  # stages end at different moments, and the next thing they do is a collective


def _arrival(message: Message) -> Arrival:
    return Arrival(Kind.FORWARD if message.side == "before" else Kind.BACKWARD, message.index)


def agreed(schedule: Schedule, kinds: tuple[Kind, ...], place: Place) -> Schedule:
    """The schedule as the first of a stage's ranks follows it: it tells the others what it decides, and they obey.

    Ranks that share layers meet in the layers' collectives, so they must do the same tasks in the same order, though
    messages reach them at different moments. Sends one broadcast of 8 bytes a task.
    """
    peers = place.peers
    if peers.size == 1:
        return schedule
    told: Task | None = None

    def lead(view: View) -> Task | None:
        task = schedule(view)
        if task is not None:
            peers.broadcast(torch.tensor(kinds.index(task.kind), device=place.device), 0)
        return task

    def follow(view: View) -> Task | None:
        nonlocal told
        if told is None:
            code = torch.empty((), dtype=torch.int64, device=place.device)
            peers.broadcast(code, 0)
            told = view.next(kinds[int(code)])
        if not view.ready(told.kind):
            return None  # its message has reached the leader, and will reach us
        task, told = told, None
        return task

    planned = place.device.type == "meta"  # nobody is there to be told by: each decides what the first would
    return lead if peers.index == 0 or planned else follow
