"""The order in which messages arrive changes no bit: neither of the losses nor of a gradient, with dropout on."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config import Config, parse_config
from meshwright.model import counts_of, scales_of, to_device
from meshwright.pipeline.schedule import Schedule
from meshwright.pipeline.task import Task, TaskKind, View
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import Mailbox, Message, MessageMeta, Side
from meshwright.ranks.mesh import Mesh
from tests.data_parallel.test_equality import global_batch
from tests.harness import build
from tests.pipeline.test_equality import LOOP, WHOLE, V, pipelined
from tests.pipeline.test_partition import laid_out
from tests.tensor.test_equality import ONE_D
from tests.workers import run_ranks

MOST = 4
"""Microbatches without a backward pass in a chunk of `crossing`: few, so that chunks' backward passes alternate."""


@dataclass(frozen=True)
class Bits:
    """A rank's results of a step: its loss, its slots' gradients, and what it did, in order."""

    loss: float
    gradients: list[Tensor]
    order: tuple[str, ...]


CASES = {
    "2 stages, message-driven": (2, "message-driven", WHOLE),
    "2 stages, axonn": (2, "axonn", WHOLE),
    "3 stages, message-driven": (3, "message-driven", WHOLE),
    "3 stages, axonn": (3, "axonn", WHOLE),
    "2 stages of 2 ranks, message-driven": (2, "message-driven", ONE_D[0]),
    "2 stages of 2 chunks as a v, a tied table": (2, "message-driven", WHOLE, V),
    "3 stages of 2 chunks as a loop": (3, "message-driven", WHOLE, LOOP),
    "2 stages of 2 chunks as a v, slices of weights": (2, "message-driven", WHOLE, V, {"size": 2, "sync": "zero3"}),
    "2 stages of 2 chunks as a v, slices of weights over a context": (
        2, "message-driven", WHOLE, V, {"sync": "zero3"}, {"size": 2, "kind": "ulysses"},
    ),
}  # fmt: skip


class Delaying:
    """A mailbox whose messages are late, and overtake each other, as a seed says."""

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
    """Eight microbatches a step."""
    tree = config.model_dump(mode="json", by_alias=True)
    tree["model"]["dropout"] = 0.1
    tree["layout"]["pipeline"] |= pipeline
    tree["batch"]["micro"] = 3
    return parse_config(tree)


def crossing() -> Schedule:
    """Message-driven, but for weight gradients: each follows another chunk's backward pass, or waits for the end."""
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
    """The same step again and again, each with the delays of a seed; None: without. `crosses`: the steps behind the
    first have the order `crossing`."""
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
        parts.strategy.publish()  # nothing was stepped
        results.append(Bits(float(loss), gradients, tuple(span.name for span in pipeline.spans)))
    return results


def seeded(index: int, chunk: int) -> None:
    torch.manual_seed(100 * index + chunk)


def runs_of(config: Config, seeds: Sequence[int | None]) -> list[list[Bits]]:
    """By rank and seed."""
    return run_ranks(
        bits_of, Grid(config.layout.axes), config, seeds, token_axes=config.layout.token_axes, transport="torch"
    )


def assert_same_bits(mine: Bits, wanted: Bits) -> None:
    assert mine.loss == wanted.loss
    for a, b in zip(mine.gradients, wanted.gradients, strict=True):
        assert bool(b.any())
        assert torch.equal(a, b)


@pytest.mark.few(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_order_of_arrival_changes_no_bit(case: tuple[Any, ...]) -> None:
    stages, schedule, tensor, placed, data, context = (*case, *(None, {}, {})[len(case) - 3 :])
    config = pipelined("gpt2", stages, schedule, tensor, data.get("size", 1), placed)
    config = laid_out(config, data=data, context=context)
    ranks = runs_of(with_dropout(config), (None, None, 1, 2))
    for first, *others in ranks:
        for other in others:
            assert_same_bits(other, first)
    orders = set(zip(*([bits.order for bits in rank] for rank in ranks), strict=True))
    one_order = schedule == "axonn" and stages == 2  # forward up to the limit, then each gradient's turn
    assert (len(orders) == 1) == one_order, "all runs did the same in the same order: nothing was tested"


def test_a_table_of_two_chunks_is_summed_by_chunk_whatever_ran_before() -> None:
    """Its look-ups' gradients are weight gradients of the first chunk, here after backward passes of the last."""
    config = with_dropout(pipelined("gpt2", *CASES["2 stages of 2 chunks as a v, a tied table"][:3], 1, V), limit=16)
    first, _ = run_ranks(bits_of, Grid(config.layout.axes), config, (None, None), True)
    usual, crossed = first
    assert_same_bits(crossed, usual)
    pairs = pairwise(task for task in crossed.order if task[0] in "BW")
    assert any(one[0] + two[0] == "BW" and one.endswith(".1") and "." not in two for one, two in pairs), crossed.order


def test_other_limits_and_other_processes_change_no_bit() -> None:
    """How many microbatches are in flight is a matter of memory."""
    config = pipelined("gpt2", 3, "message-driven", WHOLE)
    runs = [runs_of(with_dropout(config, limit=limit), (1,)) for limit in (1, 8, 8)]
    for run in runs[1:]:
        for (mine,), (wanted,) in zip(run, runs[0], strict=True):
            assert_same_bits(mine, wanted)
