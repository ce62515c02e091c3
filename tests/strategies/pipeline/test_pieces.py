"""Rows that are sent to experts as messages: float64 gradients to 1e-12 of one device's, losses to 1e-10, and the same
bits in any order of rows.

Each replica has four or more microbatches, so that several are in flight at a time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from torch import Tensor

from meshwright.compute.model import counts_of, scales_of, to_device
from meshwright.config import Config, parse_config
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.pieces import Exchanges
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import MESSAGE_DRIVEN, ONE_F_ONE_B
from meshwright.strategies.pipeline.task import Arrival, Task, TaskKind
from tests.families.deepseek.layouts import LATER, SHAPE, deepseek
from tests.families.deepseek.layouts import serial as deepseek_serial
from tests.families.llama.experts import BOUNDED, MODEL, bounded_serial, experts, serial
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.oracle.context import CUT, ONE_D
from tests.oracle.run import check, run
from tests.strategies.pipeline.bits import Bits, assert_same_bits, seeded
from tests.workers import run_ranks

MESSAGES = {"size": 2, "expert": 2, "exchange": "messages", "bucket": 8192}
RING = {"size": 2, "kind": "ring"}
V = {"size": 2, "chunks": 2, "placement": "v", "limit": 3, "partition": [0, 1, 1, 0]}
BATCH = {"global": 8, "micro": 1}

LAYOUTS: dict[str, dict[str, Any]] = {
    "one stage": {"data": MESSAGES},
    "stages": {"data": MESSAGES, "pipeline": {"size": 2}},
    "chunks in a loop": {"data": MESSAGES, "pipeline": {"size": 2, "chunks": 2, "partition": [0, 1, 1, 0]}},
    "chunks in a v": {"data": MESSAGES, "pipeline": V},
    "cut layers": {"data": MESSAGES, "tensor": CUT},
    "1-D x stages": {"data": MESSAGES, "tensor": ONE_D, "pipeline": {"size": 2}},
    "ring x stages": {"data": MESSAGES, "context": RING, "pipeline": {"size": 2}},
    "replicas": {"data": MESSAGES | {"size": 4, "sync": "zero1"}},
    "replicas x stages": {"data": MESSAGES | {"size": 4, "sync": "ring"}, "pipeline": {"size": 2}},
    "groups of replicas": {"data": MESSAGES | {"size": 4, "expert": 4}},
}
IN_CI = {"stages", "cut layers", "replicas"}


@pytest.mark.parametrize(
    "name", [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_equals_serial(name: str) -> None:
    model = MODEL | {"experts": MODEL["experts"] | {"count": 8}} if name == "groups of replicas" else MODEL
    expected = run(experts({}, model=model))[0] if model is not MODEL else serial()
    check(run(experts(LAYOUTS[name], model=model, batch=BATCH)), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"memory": {"recompute": 1}},
        {"memory": {"recompute": "offload"}},
        pytest.param({"memory": {"recompute": "selective"}}, marks=pytest.mark.long),
        pytest.param({"memory": {"recompute": "ops"}}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_equals_serial_with_recomputation(changes: dict[str, Any]) -> None:
    """Parts of a layer are computed again, and rows are sent once."""
    check(run(experts(LAYOUTS["stages"], batch=BATCH, **changes)), serial())


@cache
def tied_serial() -> Any:
    return run(experts({}, model=MODEL | {"tied": True}))[0]


def test_a_table_of_the_first_and_the_last_piece() -> None:
    """One rank has the embeddings and the head; the rows decide which of both is computed first."""
    check(run(experts(LAYOUTS["one stage"], model=MODEL | {"tied": True}, batch=BATCH)), tied_serial())


@pytest.mark.parametrize("name", [pytest.param("stages", marks=pytest.mark.long), "ring x stages"])
def test_a_capacity_is_a_sequences(name: str) -> None:
    """All ranks send equal numbers of rows, and no row announces the others."""
    check(run(experts(LAYOUTS[name], model=BOUNDED, batch=BATCH)), bounded_serial())


@pytest.mark.parametrize(
    "name, model", [("routed", SHAPE), pytest.param("later", LATER, marks=pytest.mark.long)], ids=["routed", "later"]
)
def test_deepseek_equals_serial(name: str, model: dict[str, Any]) -> None:
    """The model has a shared expert, moving biases, a dense layer, and layers of later tokens that wait for rows."""
    check(run(deepseek(model, LAYOUTS["one stage"], batch=BATCH)), deepseek_serial(name))


class Late(Exchanges):
    """Exchanges with late rows that overtake each other, by a seed."""

    def __init__(self, inner: Exchanges, seed: str) -> None:
        super().__init__(inner.comm)
        self.chance = random.Random(seed)
        self.held: list[tuple[Arrival, Tensor]] = []

    @property
    def is_empty(self) -> bool:
        return super().is_empty and not self.held

    def poll(self) -> list[tuple[Arrival, Tensor]]:
        self.held += super().poll()
        self.chance.shuffle(self.held)
        count = self.chance.randint(0, len(self.held))
        released, self.held = self.held[:count], self.held[count:]
        return released


def late_bits(mesh: Mesh, config: Config, seeds: Sequence[int | None]) -> list[Bits]:
    """Repeat one step, each time with the delays of a seed; None: without delays."""
    parts = build(config, mesh)
    pieces, everyone = parts.pipeline.pieces, to_device(global_batch(config, 0), mesh.device)
    assert pieces is not None
    scales = scales_of(parts.model.labels, counts_of(everyone, parts.model.labels), 1.0, len(everyone["tokens"]))
    exchanges, results = pieces.exchanges, []
    for seed in seeds:
        late = exchanges if seed is None else Late(exchanges, f"{seed}/{mesh.rank}")
        parts.pipeline.pieces = type(pieces)(pieces.stages, pieces.placement, late)
        replica = mesh.index("data", "expert") * config.replica_batch
        own = {name: x[replica : replica + config.replica_batch] for name, x in everyone.items()}
        loss = parts.pipeline.train(parts.microbatches(own), scales, seeded)
        parts.strategy.finish()
        gradients = [slot.parameter.grad.clone() for slot in parts.strategy.slots]
        parts.strategy.publish()  # no parameter was stepped
        results.append(Bits(float(loss), gradients, tuple(span.name for span in parts.pipeline.spans)))
    return results


@pytest.mark.parametrize("name", ["one stage", "stages"])
def test_order_of_arrival_changes_no_bit(name: str) -> None:
    """Over gloo, with dropout, the order of rows changes no bit."""
    config = experts(LAYOUTS[name], model=MODEL | {"tied": True, "dropout": 0.1}, batch={"global": 12, "micro": 1})
    grid, axes = Grid(config.layout.axes), config.layout.token_axes
    ranks = run_ranks(late_bits, grid, config, (None, 1, 2), token_axes=axes, transport="torch")
    for first, *others in ranks:
        for other in others:
            assert_same_bits(other, first)
    assert len({bits.order for bits in ranks[0]}) > 1, "all runs did the same in the same order: nothing was tested"


@pytest.mark.parametrize(
    "words, message",
    [
        (
            {"layout": {"data": MESSAGES, "pipeline": {"size": 2, "schedule": "1f1b"}}},
            "exchange=messages does not go with .*schedule=1f1b.*valid: blocking, or .*schedule=message-driven",
        ),
        (
            {"layout": {"data": MESSAGES | {"sync": "zero3"}}},
            "layout.data.sync=zero3 sums a layer's gradients as one.*valid: .*zero1.*exchange=blocking",
        ),
        (
            {"layout": {"data": MESSAGES}, "memory": {"recompute": 2}},
            "memory.recompute.every=2 is of whole layers.*valid: 1, or layout.data.exchange=blocking",
        ),
    ],
    ids=["schedule", "sync", "groups"],
)
def test_what_does_not_go_with_messages(words: dict[str, Any], message: str) -> None:
    tree = {"model": MODEL | {"family": "llama"}, "batch": BATCH, "data": {"sequence": 24}}
    with pytest.raises(ConfigError, match=message):
        parse_config(tree | words)


STAGES, MANY, EXCHANGE = 4, 16, 0.5


def total(name: str) -> float:
    """Return the step's seconds by the clock, in forward passes of a stage of two layers. An exchange of rows takes
    half a pass in each of F and B; experts are half of a layer."""
    latency = 0.1
    if name == "messages":
        placement = ChunkPlacement(STAGES, pieces=(5,) * STAGES)

        def costs(stage: int, task: Task) -> float:
            return (0.2, 0.25, 0.25, 0.25, 0.05)[task.chunk]

        def sent(start: int, end: int, task: Task) -> float:
            return EXCHANGE / 4 if placement.crosses(start, task) else latency

        rule = MESSAGE_DRIVEN.limited(2 * STAGES)
        return simulate(STAGES, MANY, rule, costs, sent, placement=placement).total_seconds

    def whole(stage: int, task: Task) -> float:
        return EXCHANGE + (1.0 if task.kind is TaskKind.FORWARD else 2.0)

    return simulate(STAGES, MANY, ONE_F_ONE_B, whole, lambda start, end, task: latency).total_seconds


def test_a_step_is_shorter_by_the_clock() -> None:
    """1F1B's layers wait for the rows. The aim is 0.85 of 1F1B's step."""
    assert total("messages") <= 0.75 * total("1f1b")


def test_no_memory_is_left_of_a_step() -> None:
    """A microbatch's graphs and exchanges are freed after the microbatch."""
    config = experts(LAYOUTS["one stage"], batch=BATCH)
    grid = Grid(config.layout.axes)
    assert run_ranks(left_behind, grid, config, token_axes=config.layout.token_axes) == [0, 0]


def left_behind(mesh: Mesh, config: Config) -> int:
    late_bits(mesh, config, (None,))
    parts = build(config, mesh)
    pieces, everyone = parts.pipeline.pieces, to_device(global_batch(config, 0), mesh.device)
    assert pieces is not None
    own = {name: x[: config.replica_batch] for name, x in everyone.items()}
    scales = scales_of(parts.model.labels, counts_of(own, parts.model.labels), 1.0, len(own["tokens"]))
    parts.pipeline.train(parts.microbatches(own), scales, seeded)
    held = [(s._flows, s._graphs, s._trades, s._works) for s in pieces.stages]
    return sum(len(one) for own_stage in held for one in own_stage)
