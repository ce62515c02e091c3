"""A checkpoint moves between contexts, shard groups, chunks of stages and one device: bit for bit, and the run goes on
as one device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from meshwright.ranks.grid import Grid
from tests.oracle.context import ONE_D, config_for
from tests.training.checkpoint.round_trip import assert_same_bits, taken_up, written
from tests.training.checkpoint.states import Leg, run_leg
from tests.workers import run_ranks

LOOP = {"size": 2, "schedule": "1f1b", "chunks": 2}
V = {"size": 2, "schedule": "message-driven", "chunks": 2, "placement": "v"}
LAYOUTS: list[dict[str, Any]] = [
    {"context": {"size": 3}},
    {"context": {"size": 2, "kind": "ring"}, "tensor": ONE_D},
    {"context": {"size": 1}},
    {"context": {"size": 2, "kind": "ring"}, "data": {"size": 2, "sync": "zero1", "bucket": 8192}},
    {"data": {"size": 4, "sync": "zero2", "shard": 2, "bucket": 8192}},
    {"context": {"size": 2}, "data": {"sync": "zero3"}, "pipeline": V},
    {"data": {"size": 4, "sync": "zero3", "shard": 2}},
    {"pipeline": LOOP},
]


def leg(layout: dict[str, Any], source: Path | None, target: Path, first: int, last: int) -> list[Leg]:
    config = config_for("gpt2", {}, layout=layout, batch={"global": 8, "micro": 2}, steps=len(LAYOUTS))
    grid = Grid(config.layout.axes)
    return run_ranks(run_leg, grid, config, source, target, first, last, token_axes=config.layout.token_axes)


def test_a_checkpoint_moves_between_layouts(tmp_path: Path) -> None:
    alone = leg({"context": {"size": 1}}, None, tmp_path / "alone", 0, len(LAYOUTS))
    states, source = None, None
    for step, layout in enumerate(LAYOUTS):
        ranks = leg(layout, source, tmp_path, step, step + 1)
        if states is not None:
            assert_same_bits(taken_up(ranks), states)
        loss = max(losses[0] for losses, _, _ in ranks)  # 0 on ranks without the chain's end
        torch.testing.assert_close(loss, alone[0][0][step], rtol=1e-10, atol=0)
        states, source = written(ranks), tmp_path / f"step-{step + 1}"
