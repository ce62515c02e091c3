"""A checkpoint moves between contexts, and to one device and back: bit for bit, and the run goes on as one device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from meshwright.ranks.grid import Grid
from tests.checkpoint.states import Leg, run_leg
from tests.checkpoint.test_round_trip import assert_same_bits, taken_up, written
from tests.context.test_equality import ONE_D, config_for
from tests.workers import run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"context": {"size": 3}},
    {"context": {"size": 2, "kind": "ring"}, "tensor": ONE_D},
    {"context": {"size": 1}},
    {"context": {"size": 2, "kind": "ring"}, "data": {"size": 2, "sync": "zero1", "bucket": 8192}},
    {"context": {"size": 2}, "data": {"size": 2, "sync": "zero3"}},
]


def leg(layout: dict[str, Any], source: Path | None, target: Path, first: int, last: int) -> list[Leg]:
    config = config_for("gpt2", {}, layout=layout, batch={"global": 8, "micro": 2}, steps=len(LAYOUTS))
    grid = Grid(config.layout.axes)
    return run_ranks(run_leg, grid, config, source, target, first, last, token_axes=config.layout.token_axes)


def test_a_checkpoint_moves_between_contexts(tmp_path: Path) -> None:
    alone = leg({"context": {"size": 1}}, None, tmp_path / "alone", 0, len(LAYOUTS))
    states, source = None, None
    for step, layout in enumerate(LAYOUTS):
        ranks = leg(layout, source, tmp_path, step, step + 1)
        if states is not None:
            assert_same_bits(taken_up(ranks), states)
        for losses, _, _ in ranks:
            torch.testing.assert_close(losses, alone[0][0][step : step + 1], rtol=1e-10, atol=0)
        states, source = written(ranks), tmp_path / f"step-{step + 1}"
