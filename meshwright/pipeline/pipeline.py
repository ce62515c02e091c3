"""The driver on a rank: it does what the engine says, sends what comes of it, and waits for messages.

A GPU does tasks later than its host gives them. A schedule that were asked at once would know nothing of the messages
that come while a task runs, and W would always follow its B. So it is asked for the next task when the task before the
last has ended: one task runs then, and one waits behind it.

A model on one device is a pipeline of one stage, to which no message comes. The clock (clock.py) drives the same
engine without a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshwright.model import Batch, Hidden, Scales
from meshwright.pipeline.engine import stage_process
from meshwright.pipeline.schedule import FORWARD_ONLY, Schedule, ScheduleRule
from meshwright.pipeline.span import Moment, Span, Watch, task_span
from meshwright.pipeline.stage import Stage
from meshwright.pipeline.task import Arrival, Task, TaskKind, View
from meshwright.ranks.comm import NAP_SECONDS, Comm
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mailbox import Mailbox, Message, MessageMeta
from meshwright.ranks.mesh import Mesh

Seed = Callable[[int], None]
"""seed(i): sets the random numbers of microbatch i's forward pass."""

Received = dict[Arrival, Hidden]
"""Messages by the tasks that they make ready."""


class Synchronises(Protocol):
    """A data-parallel strategy, as far as a pipeline sees it. `every_microbatch`: it sums in each one."""

    every_microbatch: bool

    def expect(self, final: bool) -> None:
        """Say whether the coming gradients are the step's last."""


class Pipeline:
    """A rank's stage under a schedule.

    `peers`: the ranks that share the stage (the tensor kit's), and must do its tasks in one order; nobody where there
    is one stage, since without messages all decide alike. `mailbox`, `forms`: the way to the stages beside this one,
    and what passes there.
    """

    def __init__(
        self,
        stage: Stage,
        rule: ScheduleRule,
        mesh: Mesh,
        peers: Comm,
        mailbox: Mailbox,
        forms: MessageMeta,
        strategy: Synchronises,
    ) -> None:
        self.stage = stage
        self.rule = rule
        self.mesh = mesh
        self.row = mesh.comm(PIPE)
        self.peers = peers
        self.mailbox = mailbox
        self.forms = forms
        self.strategy = strategy
        self.watch = Watch(mesh.device)
        self.done: list[tuple[Task, Moment, Moment]] = []
        self._epoch = -1

    @property
    def spans(self) -> list[Span]:
        """The tasks of the last step. Each begins where the one before it ended, unless a message was waited for."""
        return [task_span(self.row.index, task, start(), end()) for task, start, end in self.done]

    def train(self, batches: Sequence[Batch], scales: Scales, seed: Seed) -> Tensor:
        """Forward and backward passes of a step's microbatches, whose gradients add up.

        Returns the sum of the scaled losses, a float64 scalar; 0 on a stage that computes no loss.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        received: Received = {}
        last = len(batches) - 1
        self.strategy.expect(False)

        def act(task: Task) -> None:
            nonlocal total
            index = task.microbatch
            if task.kind is TaskKind.FORWARD:
                seed(index)
                outgoing = self.stage.forward(index, received.pop(task, ()), batches[index], scales)
                if self.stage.is_last:
                    total += outgoing[0]
                else:
                    self.mailbox.send("after", index, outgoing)
            elif task.kind is TaskKind.BACKWARD:
                if index == last:
                    self.strategy.expect(True)
                gradients = self.stage.backward(index, received.pop(task, ()), defers=self.rule.splits)
                if not self.stage.is_first:
                    self.mailbox.send("before", index, gradients)
            else:
                self.stage.weights(index, final=self.strategy.every_microbatch or index == last)

        self._drive(self.rule, len(batches), act, received)
        return total

    def evaluate(self, batches: Sequence[Batch], use: Callable[[Tensor, Batch], None]) -> None:
        """Forward passes without gradients. On the last stage `use` is given each microbatch with its normed hidden
        states [B, T, H], of which no more than one is held."""
        received: Received = {}

        def act(task: Task) -> None:
            batch = batches[task.microbatch]
            outgoing = self.stage.evaluate(received.pop(task, ()), batch)
            if self.stage.is_last:
                use(outgoing[0], batch)
            else:
                self.mailbox.send("after", task.microbatch, outgoing)

        self._drive(FORWARD_ONLY, len(batches), act, received)

    def _drive(self, rule: ScheduleRule, num_batches: int, act: Callable[[Task], None], received: Received) -> None:
        """Run the stage's engine to its end. What arrives lies in `received` until a task takes it."""
        recorder = self.mesh.recorder
        self._epoch += 1
        before = 0 if self.stage.is_first else num_batches
        after = 0 if self.stage.is_last or TaskKind.BACKWARD not in rule.kinds else num_batches
        self.mailbox.open(self._epoch, self.forms, before, after)
        self.done = []
        self.watch.start()
        schedule = agreed(rule.schedule, rule.kinds, self.peers, planned=self.mesh.device.type == "meta")
        process = stage_process(rule.view(self.row.index, self.row.size, num_batches), schedule)
        arrived: list[Arrival] | None = None
        start = self.watch.now()
        while True:
            try:
                action = next(process) if arrived is None else process.send(arrived)
            except StopIteration:
                break
            if isinstance(action, Task):
                recorder.task = action
                act(action)
                end = self.watch.now()
                self.done.append((action, start, end))
                start, messages = end, self._messages_until_due()
            else:
                recorder.task = ""
                messages = self.mailbox.wait()
                start = self.watch.now()
            arrived = [_arrival(message) for message in messages]
            received.update(zip(arrived, (message.tensors for message in messages), strict=True))
        recorder.task = ""
        self.mailbox.flush()
        self.row.assemble()  # stages end at different moments, and the next thing they do is a collective

    def _messages_until_due(self) -> list[Message]:
        """Messages that came until a task must be chosen: until the device has ended the task before the last."""
        messages = self.mailbox.poll()
        while self.row.size > 1 and len(self.done) > 1 and not self.done[-2][-1].is_past():
            time.sleep(NAP_SECONDS)
            messages += self.mailbox.poll()
        return messages


def _arrival(message: Message) -> Arrival:
    return Arrival(TaskKind.FORWARD if message.side == "before" else TaskKind.BACKWARD, message.index)


def agreed(schedule: Schedule, kinds: tuple[TaskKind, ...], peers: Comm, *, planned: bool) -> Schedule:
    """The schedule as the first of a stage's ranks follows it: it tells the others what it decides, and they obey.

    Ranks that share layers meet in the layers' collectives, so they must do the same tasks in the same order, though
    messages reach them at different moments. Sends one broadcast of 8 bytes a task, between hosts. `planned`: nobody is
    there to be told by, and each decides what the first would.
    """
    if peers.size == 1:
        return schedule
    told: Task | None = None

    def lead(view: View) -> Task | None:
        task = schedule(view)
        if task is not None:
            peers.broadcast(torch.tensor(kinds.index(task.kind)), 0)
        return task

    def follow(view: View) -> Task | None:
        nonlocal told
        if told is None:
            code = torch.empty((), dtype=torch.int64)
            peers.broadcast(code, 0)
            told = view.next(kinds[int(code)])
        if not view.ready(told.kind):
            return None  # its message has reached the leader, and will reach us
        task, told = told, None
        return task

    return lead if peers.index == 0 or planned else follow
