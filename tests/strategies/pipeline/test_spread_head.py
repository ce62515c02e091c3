"""The head over all stages computes as one device does: float64 gradients to 1e-12, losses to 1e-10; the same bits in
any order of messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import Config, parse_run
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.pipeline.engine import stage_process
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import MESSAGE_DRIVEN
from meshwright.strategies.pipeline.spread_head import with_spread_head
from meshwright.strategies.pipeline.task import Arrival, Task, TaskKind
from meshwright.training.checkpoint import Checkpoint
from meshwright.training.loop import validate
from tests.fuzz.check import HeldOut
from tests.harness import build
from tests.oracle.pipeline import WHOLE, laid_out, pipelined, serial
from tests.oracle.run import check, run
from tests.planner.plan.clusters import FLAT
from tests.strategies.pipeline.bits import assert_same_bits, runs_of, with_dropout
from tests.strategies.pipeline.legs import FIRST, LAST, legs, losses_of
from tests.training.checkpoint.round_trip import KINDS, read_whole, taken_up, written
from tests.training.checkpoint.round_trip import assert_same_bits as assert_same_states
from tests.workers import run_ranks

SPREAD = {"head": "spread"}


def spread(stages: int, data: int = 1, placed: dict[str, Any] | None = None, **changes: Any) -> Config:
    return pipelined("untied", stages, "message-driven", WHOLE, data, placed=SPREAD | (placed or {}), **changes)


@pytest.mark.parametrize("stages, data, placed", [(2, 2, {}), (3, 1, {"partition": [2, 2, 0]}), (4, 1, {"limit": 1})])
def test_equals_serial(stages: int, data: int, placed: dict[str, Any]) -> None:
    check(run(spread(stages, data, placed)), serial("untied"))


def rows_and_validation(mesh: Mesh, config: Config) -> tuple[int, dict[str, float]]:
    """Return the number of rows of the head's table on this rank, and the validation of random batches."""
    parts = build(config, mesh)
    return len(parts.model.get_parameter("head.weight")), validate(parts, HeldOut(config), 3)


def test_every_stage_has_its_part_and_validates_with_it() -> None:
    """Each round of the stages has five microbatches."""
    config = spread(3, batch={"global": 24, "micro": 3})
    ranks = run_ranks(rows_and_validation, Grid(config.layout.axes), config)
    alone = pipelined("untied", 1, "gpipe", WHOLE)
    ((rows, wanted),) = run_ranks(rows_and_validation, Grid(alone.layout.axes), alone)
    for own, mine in ranks:
        assert 3 * own == rows
        assert mine == pytest.approx(wanted, rel=1e-12, abs=0)


def test_order_of_arrival_changes_no_bit() -> None:
    config = with_dropout(laid_out(spread(3), data={"size": 1}))
    ranks = runs_of(config, (None, 1, 2))
    for first, *others in ranks:
        for other in others:
            assert_same_bits(other, first)
    orders = set(zip(*([bits.order for bits in rank] for rank in ranks), strict=True))
    assert len(orders) > 1, "all runs did the same in the same order: nothing was tested"


def test_another_layout_goes_on(tmp_path: Path) -> None:
    """A table split over stages is read whole, and a whole table is split."""
    whole, cut = (pipelined("untied", size, "message-driven", WHOLE, placed=placed, steps=LAST)
                  for size, placed in ((1, {}), (3, SPREAD)))  # fmt: skip
    wanted = losses_of(legs(whole, None, None, range(LAST)))
    for writer, reader in ((cut, whole), (whole, cut)):
        folder = tmp_path / str(writer.layout.pipeline.size)
        states = written(legs(writer, None, folder, range(FIRST)))
        step = folder / f"step-{FIRST}"
        assert_same_states(read_whole(Checkpoint(step), KINDS), states)
        after = legs(reader, step, None, range(FIRST, LAST))
        assert_same_states(taken_up(after), states)
        torch.testing.assert_close(losses_of(after), wanted[FIRST:], rtol=1e-10, atol=0)


def test_the_head_goes_before_layers() -> None:
    """A late stage makes all others wait. A microbatch enters the head when the microbatch before has left the head."""
    placement = ChunkPlacement(3, spreads_head=True)
    process = stage_process(MESSAGE_DRIVEN.limited(3).view(1, 3, 4, placement), with_spread_head)
    forward, backward, weight = (partial_task(kind) for kind in TaskKind)
    assert next(process) == forward(0, 1)  # the gate: hidden states may arrive
    arrived: list[Arrival] = [forward(0, 0), forward(1, 0)]
    done = [process.send(arrived), process.send([forward(0, 2)])]
    assert done == [forward(0, 0), forward(0, 2)]
    # The stage's part of the gradient is sent at once, and the gate opens for the next microbatch.
    assert [process.send([]) for _ in range(4)] == [backward(0, 2), weight(0, 2), forward(1, 1), forward(1, 0)]


def partial_task(kind: TaskKind) -> Any:
    return lambda microbatch, piece: Task(kind, microbatch, piece)


UNTIED = {"family": "gpt2", "tied": False, "vocabulary": 300, "vocabulary_multiple": 12, "layers": 4}


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ("model.tied=true",),
            "model.tied=True keeps a table whole that .*head=spread cuts.*valid: .*head=last, or model.tied=false",
        ),
        (
            ("layout.pipeline.schedule=1f1b",),
            "schedule=1f1b has an order .*valid: .*head=last, or .*schedule=message-driven",
        ),
        (("layout.pipeline.chunks=2",), "chunks=2 does not go with .*head=spread"),
        (("layout.data=2", "layout.data.sync=zero2"), "sync=zero2 sums each microbatch's buckets"),
        (("layout.tensor={kind: megatron, size: 2}",), "kind=megatron cuts the classes"),
        (("model.vocabulary_multiple=7",), "vocabulary_multiple=7 makes 301 rows"),
        (("model.family=bert",), "model.family=bert has losses that .*valid: .*head=last, or model.family=gpt2, llama"),
    ],
)
def test_what_it_does_not_go_with(words: tuple[str, ...], message: str) -> None:
    tree = {"model": UNTIED, "layout": {"pipeline": {"size": 2} | SPREAD}}
    with pytest.raises(ConfigError, match=message):
        parse_run(tree, words)


def test_no_plan_counts_it() -> None:
    with pytest.raises(ConfigError, match=r"layout.pipeline.head=spread lets all stages wait"):
        Planner(FLAT).predict(spread(2))
