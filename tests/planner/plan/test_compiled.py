"""A plan of compiled runs: layers as graphs, and losses in one pass."""

from __future__ import annotations

from functools import cache

import pytest

from meshwright.compute.model import Chunk
from meshwright.config import parse_config
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.recorder import Kernel
from meshwright.planner.plan.recordings import Forms, Recordings
from meshwright.planner.plan.software import load_program
from meshwright.strategies.pipeline.task import TaskKind


@cache
def predicted(
    compiles: str, program: str = "meshwright", cluster: str = "dgx-h100", logits: str = "auto"
) -> Prediction:
    config = parse_config({
        "model": {"layers": 2, "hidden": 768, "heads": 12, "positions": 1024, "vocabulary": 50257, "dropout": 0.0},
        "data": {"sequence": 1024}, "batch": {"global": 32, "micro": 16}, "precision": "bf16", "compile": compiles,
        "memory": {"logits": logits},
    })  # fmt: skip
    return Planner(load_cluster(cluster), load_program(program).software).predict(config)


def test_each_step_of_compiling_is_faster() -> None:
    none, islands, blocks = (predicted(compiles) for compiles in ("none", "islands", "blocks"))
    assert none.seconds > 1.02 * islands.seconds > 1.04 * blocks.seconds
    assert none.flops == islands.flops == blocks.flops


@pytest.mark.parametrize("kind, passes", [("cpu", "special"), ("cuda", "norm")])
def test_a_compiled_loss_is_one_kernel_of_a_kind_that_devices_know(kind: str, passes: str) -> None:
    """A GPU's pass over rows has a norm's pace; a core computes exponentials, which no norm counts."""
    config = parse_config({
        "model": {"layers": 1, "hidden": 64, "heads": 2, "positions": 64, "vocabulary": 5000, "dropout": 0.0},
        "data": {"sequence": 64}, "batch": {"global": 4, "micro": 2}, "compile": "islands",
    })  # fmt: skip
    recordings = Recordings(kind)
    incoming: Forms = ()
    for chunk in (Chunk(range(0), True, False), Chunk(range(1), False, False)):
        incoming = recordings.of(config, chunk, incoming).outgoing
    head = recordings.of(config, Chunk(range(0), False, True), incoming).programs[TaskKind.FORWARD][-1]
    of_logits = [
        event.kind for event in head.events
        if isinstance(event, Kernel) and event.elements >= 128 * 5000 and event.kind in ("special", "norm")
    ]  # fmt: skip
    assert of_logits == [passes]


def test_the_default_is_decided_for_the_cluster_and_not_for_this_machine() -> None:
    assert predicted("auto").seconds == predicted("blocks").seconds
    assert predicted("auto", cluster="two-cores").seconds == predicted("none", cluster="two-cores").seconds


def test_what_a_compiled_loss_never_writes_takes_no_memory() -> None:
    assert predicted("islands").fullest.allocated <= predicted("none").fullest.allocated


@pytest.mark.parametrize("program", ["megatron-core", "torchtitan"])
def test_other_programs_do_not_read_our_compile(program: str) -> None:
    assert predicted("blocks", program).seconds == predicted("none", program).seconds


def test_smaller_chunks_of_logits_take_less_memory_and_longer() -> None:
    whole, small = predicted("blocks"), predicted("blocks", logits="64M")
    assert small.seconds > 1.01 * whole.seconds
    assert whole.fullest.allocated - small.fullest.allocated == pytest.approx(2**30 - 2**26, rel=0.15)
