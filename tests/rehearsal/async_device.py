"""An asynchronous device in Python: queues with threads, and one duration for each piece of work.

The device drives the real pipeline and the real mailbox between devices. Tasks only take time. Messages are bytes that
are sent from rank to rank, and contain the moment of the transfer's begin.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.comm import RankGroup
from meshwright.ranks.mailbox import Side, TensorMeta
from meshwright.ranks.mailbox_torch import Channel, DeviceMailbox
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.torch_comm import TorchTransport
from meshwright.strategies.pipeline.pipeline import Pipeline, message_forms
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import ScheduleRule
from meshwright.strategies.pipeline.span import Watch
from tests.rehearsal.births import HostChannel

FORM = TensorMeta((1000,), torch.float64)
DURATION = 0.02


@dataclass
class Event:
    """A point in a queue. `seconds`: the moment when the queue passed the point."""

    passed: threading.Event = field(default_factory=threading.Event)
    seconds: float = 0.0

    def __call__(self) -> float:
        self.passed.wait()
        return self.seconds

    def is_past(self) -> bool:
        return self.passed.is_set()

    query = is_past


class Stream:
    """A queue that runs work later, in order."""

    def __init__(self) -> None:
        self.work: SimpleQueue[tuple[Callable[[], object], Event]] = SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    def give(self, run: Callable[[], object] = lambda: None) -> Event:
        event = Event()
        self.work.put((run, event))
        return event

    def _run(self) -> None:
        while True:
            run, event = self.work.get()
            run()
            event.seconds = time.monotonic()
            event.passed.set()


class Links:
    """Transfers on separate streams. `early`: receives that began before the send."""

    def __init__(self, channels: dict[Side, Channel], compute: Stream) -> None:
        self.channels = channels
        self.compute = compute
        self.incoming = {side: Stream() for side in channels}
        self.outgoing = {side: Stream() for side in channels}
        self.marks: list[Event] = []
        self.sent = self.early = 0

    def mark(self) -> Event:
        self.marks.append(self.compute.give())
        return self.marks[-1]

    def send(self, to: Side, buffer: Tensor) -> Event:
        self.sent += 1
        assert sum(mark.is_past() for mark in self.marks) >= self.sent, "what is sent has not been computed"
        buffer.view(torch.float64)[0] = time.monotonic()
        return self.outgoing[to].give(lambda: self.channels[to].send(buffer, batched=True).wait())

    def receive(self, side: Side, new_buffer: Callable[[], Tensor]) -> tuple[Event, Tensor]:
        buffer, begun = new_buffer(), time.monotonic()

        def run() -> None:
            self.channels[side].receive(buffer, batched=True).wait()
            self.early += begun < float(buffer.view(torch.float64)[0])

        return self.incoming[side].give(run), buffer


class SlowWatch(Watch):
    """The moments of the compute queue."""

    def __init__(self, compute: Stream) -> None:
        super().__init__(torch.device("cpu"))
        self.compute = compute

    def now(self) -> Event:
        return self.compute.give()


@dataclass
class SlowStage:
    """Tasks that only take time. `order`: the device's order of tasks."""

    index: int
    size: int
    compute: Stream
    seconds: Callable[[str], float]
    order: list[str] = field(default_factory=list)

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.size - 1

    def _do(self, name: str) -> tuple[Tensor]:
        def run() -> None:
            time.sleep(self.seconds(name))
            self.order.append(name)

        self.compute.give(run)
        return (torch.zeros(FORM.shape if name[0] != "F" or not self.is_last else (), dtype=FORM.dtype),)

    def forward(self, index: int, incoming: Any, batch: Any, scales: Any) -> tuple[Tensor]:
        return self._do(f"F{index}")

    def backward(self, index: int, gradients: Any, *, defers: bool) -> tuple[Tensor]:
        return self._do(f"B{index}")

    def weights(self, index: int, *, final: bool) -> None:
        self._do(f"W{index}")


class NoSums:
    """A strategy of one replica."""

    every_microbatch = False

    def expect(self, final: bool) -> None: ...


@dataclass(frozen=True)
class Outcome:
    """A rank's tasks in the device's order, receives that began too early, and tasks that a stage's ranks sent to each
    other."""

    order: list[str]
    early: int
    told: int


def run_stage(
    mesh: Mesh, rule: ScheduleRule, num_batches: int, durations: Sequence[float] | int, at_once: bool = False
) -> Outcome:
    """Run a step of a stage. `durations`: the seconds of each stage's tasks; or a seed, for a random length of each
    task. `at_once`: the driver counts a task as done when issued."""
    stage, size, compute = mesh.index("pipe"), mesh.size("pipe"), Stream()
    if isinstance(durations, int):
        draw = random.Random(100 * durations + mesh.rank)
        seconds: Callable[[str], float] = lambda name: draw.choice((0.0, 0.001, 0.01))  # noqa: E731
    else:
        seconds = lambda name: durations[stage]  # noqa: E731
    assert isinstance(mesh.transport, TorchTransport)
    group = RankGroup("pipe", mesh.grid.group(mesh.rank, "pipe"), stage)
    channels = mesh.transport._channels(group)
    links = Links(channels, compute)
    on_host = {side: HostChannel(way.peer, way.outgoing, way.incoming) for side, way in channels.items()}
    mailbox = DeviceMailbox(group, on_host, mesh.device, links)
    slow: Any = SlowStage(stage, size, compute, seconds)
    peers = mesh.comm("row") if "row" in mesh.grid.names else mesh.comm()
    forms = message_forms(stage, ChunkPlacement(size), [(FORM,)] * (size - 1))
    pipeline = Pipeline([slow], rule, mesh, peers, mailbox, forms, NoSums())
    pipeline.watch = Watch(mesh.device) if at_once else SlowWatch(compute)
    batches: list[Any] = [None] * num_batches
    pipeline.train(batches, {}, lambda index, chunk: None)
    compute.give()()
    mailbox.shut()
    told = sum(traffic.calls for key, traffic in mesh.ledger.traffic.items() if "broadcast" in key)
    return Outcome(slow.order, links.early, told)
