"""Pipelines that record hashes of messages and gradients, and delay messages."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compute.model import counts_of, scales_of, to_device
from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import Mailbox, Message, MessageMeta, Side
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.pipeline.schedule import Schedule
from meshwright.strategies.pipeline.task import Task, TaskKind, View
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.workers import run_ranks

MOST = 4
"""Microbatches without a backward pass in a chunk of `crossing`. The number is small, so that chunks' backward passes
alternate."""


@dataclass(frozen=True)
class Bits:
    """A rank's results of a step: the loss, the slots' gradients, and the tasks in order."""

    loss: float
    gradients: list[Tensor]
    order: tuple[str, ...]


class Delaying:
    """A mailbox with late messages that overtake each other, by a seed."""

    def __init__(self, inner: Mailbox, seed: str) -> None:
        self.inner = inner
        self.chance = random.Random(seed)
        self.held: list[Message] = []

    def open(self, epoch: int, forms: MessageMeta, before: int, after: int) -> None:
        assert not self.held, f"left over: {self.held}"
        self.inner.open(epoch, forms, before, after)

    def send(self, to: Side, index: int, tensors: Sequence[Tensor], subject: int = 0) -> None:
        time.sleep(self.chance.choice((0, 0, 0.002)))
        self.inner.send(to, index, tensors, subject)

    def poll(self) -> list[Message]:
        self.held += self.inner.poll()
        return self.let_go(self.chance.randint(0, len(self.held)))

    def wait(self) -> list[Message]:
        self.held += self.inner.poll() if self.held else self.inner.wait()
        return self.let_go(self.chance.randint(1, len(self.held)))

    def let_go(self, count: int) -> list[Message]:
        self.chance.shuffle(self.held)
        released, self.held = self.held[:count], self.held[count:]
        return released

    def flush(self) -> None:
        self.inner.flush()

    def shut(self) -> None:
        self.inner.shut()


def with_dropout(config: Config, **pipeline: Any) -> Config:
    """Return a config with dropout and eight microbatches a step."""
    tree = config.model_dump(mode="json", by_alias=True)
    tree["model"]["dropout"] = 0.1
    tree["layout"]["pipeline"] |= pipeline
    tree["batch"]["micro"] = 3
    return parse_config(tree)


def crossing() -> Schedule:
    """Return a message-driven schedule, except that each weight gradient follows another chunk's backward pass or waits
    for the end."""
    before: Task | None = None

    def schedule(view: View) -> Task | None:
        nonlocal before
        chunks = range(len(view.chunks) - 1, -1, -1)
        crosses = before is not None and before.kind is TaskKind.BACKWARD
        few = [chunk for chunk in chunks if view.chunks[chunk].forwards - view.chunks[chunk].backwards < MOST]
        wanted = [
            *((TaskKind.WEIGHT, chunk) for chunk in chunks if crosses and chunk != before.chunk),
            *((TaskKind.BACKWARD, chunk) for chunk in chunks),
            *((TaskKind.FORWARD, chunk) for chunk in few),
            *((TaskKind.WEIGHT, chunk) for chunk in chunks if view.outstanding == 0),
        ]
        before = next((view.next(kind, chunk) for kind, chunk in wanted if view.ready(kind, chunk)), None)
        return before

    return schedule


def bits_of(mesh: Mesh, config: Config, seeds: Sequence[int | None], crosses: bool = False) -> list[Bits]:
    """Repeat one step, each time with the delays of a seed; None: without delays. `crosses`: the steps after the first
    have the order `crossing`."""
    parts = build(config, mesh)
    pipeline = parts.pipeline
    mailbox, everyone = pipeline.mailbox, to_device(global_batch(config, 0), mesh.device)
    scales = scales_of(parts.model.labels, counts_of(everyone, parts.model.labels), 1.0)
    results = []
    for seed in seeds:
        pipeline.mailbox = mailbox if seed is None else Delaying(mailbox, f"{seed}/{mesh.rank}")
        if crosses and results:
            pipeline.rule = replace(pipeline.rule, schedule=crossing())
        loss = pipeline.train(parts.microbatches(everyone), scales, seeded)
        parts.strategy.finish()
        gradients = [slot.parameter.grad.clone() for slot in parts.strategy.slots]
        parts.strategy.publish()  # no parameter was stepped
        results.append(Bits(float(loss), gradients, tuple(span.name for span in pipeline.spans)))
    return results


def seeded(index: int, chunk: int) -> None:
    torch.manual_seed(100 * index + chunk)


def runs_of(config: Config, seeds: Sequence[int | None]) -> list[list[Bits]]:
    """Return the bits by rank and seed."""
    return run_ranks(
        bits_of, Grid(config.layout.axes), config, seeds, token_axes=config.layout.token_axes, transport="torch"
    )


def assert_same_bits(mine: Bits, wanted: Bits) -> None:
    assert mine.loss == wanted.loss
    for a, b in zip(mine.gradients, wanted.gradients, strict=True):
        assert bool(b.any())
        assert torch.equal(a, b)
