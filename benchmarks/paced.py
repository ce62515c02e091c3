"""A pipeline's rank with sleeping tasks: the driver, the mailbox and the processes are real, the computation is not.

A task takes the seconds that the clock (strategies/pipeline/clock.py) gets for the task, so both see equal troubles.
A message holds the moment of arrival: the end of the task plus the link's latency. The receiver hides the message until
then. The transport's time is less than the latency, and the sender never waits.

| message | holds |
|---|---|
| [0] | the moment of arrival, in seconds since the epoch, float64 |
| [1:] | nothing: weight on the wire |
"""

from __future__ import annotations

import heapq
import json
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.contender import Place, Step
from meshwright.compute.model import Batch, Hidden, Scales
from meshwright.ranks.environment import read_environment, rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import Mailbox, Message, MessageMeta, Side, TensorMeta
from meshwright.ranks.mesh import Mesh, open_mesh
from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.pipeline import Pipeline, message_forms
from meshwright.strategies.pipeline.placement import ChunkPlacement, Shape
from meshwright.strategies.pipeline.schedule import AXONN, GPIPE, MESSAGE_DRIVEN, ONE_F_ONE_B, ZB_V, ScheduleRule
from meshwright.strategies.pipeline.span import Span, Timeline, task_span
from meshwright.strategies.pipeline.stage import Stage
from meshwright.strategies.pipeline.task import Task, TaskKind
from meshwright.strategies.pipeline.trace import write_trace

RULES: dict[str, ScheduleRule] = {
    "1f1b": ONE_F_ONE_B,
    "gpipe": GPIPE,
    "axonn": AXONN,
    "message-driven, limit 8": MESSAGE_DRIVEN.limited(8),
    "message-driven, limit 12": MESSAGE_DRIVEN.limited(12),
    "message-driven, limit 16": MESSAGE_DRIVEN.limited(16),
    "message-driven, all": MESSAGE_DRIVEN.limited(2**20),
    "interleaved 1f1b": ONE_F_ONE_B,
    "zb-v": ZB_V,
    "message-driven, loop, limit 23": MESSAGE_DRIVEN.limited(23),
    "message-driven, loop, limit 32": MESSAGE_DRIVEN.limited(32),
    "message-driven, v, limit 16": MESSAGE_DRIVEN.limited(16),
    "message-driven, v, limit 23": MESSAGE_DRIVEN.limited(23),
    "message-driven, v, limit 32": MESSAGE_DRIVEN.limited(32),
}
CHUNKED: dict[str, Shape] = {
    "interleaved 1f1b": "loop",
    "zb-v": "v",
    "message-driven, loop, limit 23": "loop",
    "message-driven, loop, limit 32": "loop",
    "message-driven, v, limit 16": "v",
    "message-driven, v, limit 23": "v",
    "message-driven, v, limit 32": "v",
}
"""The placement of the schedules with two chunks a stage; a limit counts the microbatches of each chunk."""
CONDITIONS = ("no jitter", "jitter", "slow stage", "late messages")
RUNS = "runs.json"
LATENCY, JITTER, SLOW_STAGE, SLOWNESS = 0.1, 0.3, 3, 1.3
LOOK_SECONDS = 2e-4
"""The period at which a rank with hidden messages polls for other messages: these may be due earlier."""


@dataclass(frozen=True)
class Run:
    """One step under a schedule and a condition. Times are in forward passes."""

    schedule: str
    condition: str
    num_stages: int
    num_microbatches: int
    seed: int = 0
    """Of the condition's troubles, which are equal for every schedule."""
    jitter: float = JITTER
    """Under the condition `jitter` a task takes 1 - jitter to 1 + jitter."""

    @property
    def rule(self) -> ScheduleRule:
        return RULES[self.schedule]

    @property
    def placement(self) -> ChunkPlacement:
        shape = CHUNKED.get(self.schedule)
        return ChunkPlacement(self.num_stages) if shape is None else ChunkPlacement(self.num_stages, 2, shape)

    def costs(self, stage: int, task: Task) -> float:
        """Return a task's time: F, B and W of a stage take 1 each, of one of two chunks a half. An unsplit backward
        pass takes B plus W."""
        share = 1 / self.placement.num_chunks
        if self.rule.splits or task.kind is TaskKind.FORWARD:
            return share * self._part(stage, task)
        return share * (self._part(stage, task) + self._part(stage, task._replace(kind=TaskKind.WEIGHT)))

    def _part(self, stage: int, task: Task) -> float:
        if self.condition == "jitter":
            return 1 + self.jitter * (2 * self._uniform(stage, task) - 1)
        return SLOWNESS if (self.condition, stage) == ("slow stage", SLOW_STAGE) else 1.0

    def latency(self, stage: int, to: int, message: Task) -> float:
        """Return the time from the end of the sending task to the message's arrival; late messages: up to 1 more."""
        late = self._uniform(stage, to, message) if self.condition == "late messages" else 0.0
        return LATENCY + late

    def _uniform(self, *key: object) -> float:
        return random.Random(repr((self.seed, *map(str, key)))).random()

    def simulated(self) -> Timeline:
        """Return the clock's timeline, in forward passes."""
        return simulate(
            self.num_stages, self.num_microbatches, self.rule, self.costs, self.latency, placement=self.placement
        )


def sleep_until(moment: float) -> None:
    """Return at `moment` (seconds since the epoch), or at once if the moment is past.

    A sleeper wakes about 0.1 ms late. Spinning at the end of a sleep would be exact on an idle machine; 8 spinning
    processes on 2 cores make each other wait.
    """
    nap = moment - time.time()
    if nap > 0:
        time.sleep(nap)


class PacedStage(Stage):
    """A chunk of a stage without a model; tasks sleep."""

    def __init__(self, index: int, chunk: int, run: Run, forward_seconds: float, form: TensorMeta) -> None:
        self.index = index
        self.chunk = chunk
        self.run = run
        self.forward_seconds = forward_seconds
        self.form = form

    @property
    def is_first(self) -> bool:
        return self.run.placement.positions[self.index][self.chunk] == 0

    @property
    def is_last(self) -> bool:
        return self.run.placement.positions[self.index][self.chunk] == self.run.placement.num_positions - 1

    def forward(self, index: int, incoming: Hidden, batch: Batch, scales: Scales) -> Hidden:
        task = Task(TaskKind.FORWARD, index, self.chunk)
        end = self._work(task)
        return (torch.zeros(()),) if self.is_last else self._message(end, task)

    def backward(self, index: int, gradients: Hidden, *, defers: bool) -> Hidden:
        task = Task(TaskKind.BACKWARD, index, self.chunk)
        return self._message(self._work(task), task)

    def weights(self, index: int, *, final: bool) -> None:
        self._work(Task(TaskKind.WEIGHT, index, self.chunk))

    def evaluate(self, incoming: Hidden, batch: Batch) -> Hidden:
        raise AssertionError("a paced stage trains only")

    def _work(self, task: Task) -> float:
        """Sleep; return the moment at the task's end."""
        sleep_until(time.time() + self.run.costs(self.index, task) * self.forward_seconds)
        return time.time()

    def _message(self, end: float, task: Task) -> Hidden:
        sent = self.run.placement.receiver(self.index, task)
        if sent is None or sent[0] == self.index:
            return ()
        latency = self.run.latency(self.index, sent[0], task) * self.forward_seconds
        return (torch.full(self.form.shape, end + latency, dtype=self.form.dtype),)


class HeldMailbox:
    """A mailbox that hides messages of another mailbox until the moment in the message.

    Epochs are numbered here, over all the pipelines that use the mailbox one after another.
    """

    def __init__(self, mailbox: Mailbox) -> None:
        self.mailbox = mailbox
        self._epochs = count()
        self._order = count()
        self._held: list[tuple[float, int, Message]] = []

    def open(self, epoch: int, meta: MessageMeta, before: int, after: int) -> None:
        assert not self._held, f"{len(self._held)} messages that nobody took"
        self.mailbox.open(next(self._epochs), meta, before, after)

    def send(self, to: Side, index: int, tensors: Sequence[Tensor], subject: int = 0) -> None:
        self.mailbox.send(to, index, tensors, subject)

    def poll(self) -> list[Message]:
        self._hold(self.mailbox.poll())
        now, due = time.time(), []
        while self._held and self._held[0][0] <= now:
            due.append(heapq.heappop(self._held)[2])
        return due

    def wait(self) -> list[Message]:
        while not (due := self.poll()):
            if self._held:
                sleep_until(min(self._held[0][0], time.time() + LOOK_SECONDS))
            else:
                self._hold(self.mailbox.wait())
        return due

    def _hold(self, messages: Sequence[Message]) -> None:
        for message in messages:
            heapq.heappush(self._held, (float(message.tensors[0][0]), next(self._order), message))

    def flush(self) -> None:
        self.mailbox.flush()

    def shut(self) -> None:
        self.mailbox.shut()


class NoGradients:
    """The data-parallel strategy of a pipeline without data parallelism."""

    every_microbatch = False

    def expect(self, final: bool) -> None:
        return None


class PacedPipeline:
    """A rank that runs one paced step after another over one mailbox."""

    def __init__(self, mesh: Mesh, forward_seconds: float, message_bytes: int) -> None:
        self.mesh = mesh
        self.forward_seconds = forward_seconds
        self.form = TensorMeta((max(1, message_bytes // 8),), torch.float64)
        self.mailbox = HeldMailbox(mesh.mailbox("pipe", ring=True))

    def step(self, run: Run) -> Timeline | None:
        """Run a step; return all ranks' spans on rank 0, in seconds, and None on the others."""
        index, placement = self.mesh.index("pipe"), run.placement
        stages = [
            PacedStage(index, chunk, run, self.forward_seconds, self.form) for chunk in range(placement.num_chunks)
        ]
        forms = message_forms(index, placement, [(self.form,)] * (placement.num_positions - 1))
        driver = Pipeline(stages, run.rule, self.mesh, self.mesh.comm(), self.mailbox, forms, NoGradients(), placement)
        self.mesh.world.barrier()
        driver.train([{}] * run.num_microbatches, {}, lambda microbatch, chunk: None)
        return self._gathered(run, driver.spans)

    def _gathered(self, run: Run, spans: Sequence[Span]) -> Timeline | None:
        """Gather 32 bytes a task on rank 0."""
        world, kinds = self.mesh.world, run.rule.kinds
        names = [task_span(0, Task(task, 0), 0.0, 0.0).category for task in kinds]
        rows = [(names.index(x.category), x.microbatch, x.start_seconds, x.end_seconds) for x in spans]
        table = torch.tensor(rows, dtype=torch.float64)  # [tasks, 4]
        whole = torch.empty(world.size if world.index == 0 else 0, *table.shape, dtype=torch.float64)
        world.gather(whole, table, 0)
        if world.index > 0:
            return None
        return Timeline(
            world.size,
            tuple(
                task_span(stage, Task(kinds[int(task)], int(microbatch)), start, end)
                for stage, tasks in enumerate(whole.tolist())
                for task, microbatch, start, end in tasks
            ),
        )


@contextmanager
def paced(place: Place, transport: str, forward_ms: float, message_bytes: int, folder: str) -> Iterator[Step]:
    """Yield a step that makes the next run of the folder's runs.json. Rank 0 writes a trace to the folder, 0.json,
    1.json, ..., and returns the seconds of the step.
    """
    todo = enumerate(Run(**fields) for fields in json.loads((Path(folder) / RUNS).read_text()))
    grid = Grid((("data", 1), ("pipe", place.ranks)))
    with open_mesh(grid, read_environment(), transport, torch.device("cpu"), rendezvous()) as mesh:
        rank = PacedPipeline(mesh, forward_ms / 1e3, message_bytes)

        def step() -> float:
            index, run = next(todo)
            timeline = rank.step(run)
            if timeline is None:
                return 0.0
            write_trace(timeline, Path(folder) / f"{index}.json")
            return timeline.total_seconds

        yield step
