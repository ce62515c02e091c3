"""Checkpoints move freely between serial, 1-D, 2-D, 2.5-D and sub-graph layouts: bit for bit, and training continues as
on one device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.oracle.tensor import config_for
from tests.training.checkpoint.round_trip import assert_same_bits, taken_up, written
from tests.training.checkpoint.states import Leg, run_leg
from tests.workers import run_ranks

FIRST, LAST = 2, 4

LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {"kind": "none"},
    "1-D": {"kind": "megatron", "size": 3},
    "1-D cut": {"kind": "megatron", "size": 2, "sequence_parallel": True},
    "1-D of 4": {"kind": "megatron", "size": 4},
    "2-D": {"kind": "tesseract", "q": 2, "d": 1},
    "2.5-D": {"kind": "tesseract", "q": 2, "d": 2},
    "sub-graphs": {"kind": "subgraph", "size": 2, "common": "all", "branch": "block"},
    "sub-graphs, common one": {"kind": "subgraph", "size": 2, "common": "one", "branch": "attention"},
}

MOVES = [
    *[
        (*move, sync)
        for move in [("serial", "1-D"), ("1-D", "2-D"), ("2-D", "1-D cut"), ("1-D cut", "2.5-D"), ("2.5-D", "serial")]
        for sync in ("allreduce", "zero1")
    ],
    ("serial", "sub-graphs, common one", "zero1"),
    ("sub-graphs, common one", "1-D cut", "allreduce"),
    ("1-D", "sub-graphs", "allreduce"),
    ("sub-graphs", "serial", "zero1"),
]

ONLY_LONG = [
    ("sub-graphs", "1-D", "zero1"),
    ("1-D cut", "sub-graphs, common one", "allreduce"),
    ("serial", "sub-graphs", "zero1"),
    ("sub-graphs, common one", "serial", "server-gradient"),
    ("sub-graphs, common one", "sub-graphs", "zero1"),
    ("sub-graphs", "sub-graphs, common one", "rooted"),
]


def legs(
    layout: str, source: Path | None, target: Path | None, first: int, last: int, sync: str, model: str = "gpt2"
) -> list[Leg]:
    config = config_for(model, LAYOUTS[layout])
    laid = config.layout.model_copy(update={"data": config.layout.data.model_copy(update={"sync": sync})})
    config = config.model_copy(update={"layout": laid})
    return run_ranks(run_leg, config.grid, config, source, target, first, last, token_axes=config.layout.token_axes)


@pytest.fixture(scope="module")
def serial() -> list[float]:
    return legs("serial", None, None, 0, LAST, "allreduce")[0][0]


@pytest.mark.few
@pytest.mark.parametrize(
    "source, target, sync", [*MOVES, *[pytest.param(*move, marks=pytest.mark.long) for move in ONLY_LONG]]
)
def test_moves(source: str, target: str, sync: str, serial: list[float], tmp_path: Path) -> None:
    before = legs(source, None, tmp_path, 0, FIRST, sync)
    after = legs(target, tmp_path / f"step-{FIRST}", None, FIRST, LAST, sync)
    assert_same_bits(taken_up(after), written(before))
    for losses, _, _ in after:
        torch.testing.assert_close(losses, serial[FIRST:], rtol=1e-10, atol=0)


@pytest.mark.parametrize(
    "source, target, sync",
    [("serial", "1-D of 4", "zero1"), ("1-D of 4", "1-D cut", "zero1"), ("1-D of 4", "serial", "allreduce")],
)
def test_moves_of_key_value_heads_that_ranks_share(source: str, target: str, sync: str, tmp_path: Path) -> None:
    """A head on two ranks is written once."""
    before = legs(source, None, tmp_path, 0, FIRST, sync, "grouped")
    after = legs(target, tmp_path / f"step-{FIRST}", None, FIRST, LAST, sync, "grouped")
    assert_same_bits(taken_up(after), written(before))
    whole = legs("serial", None, None, 0, LAST, sync, "grouped")[0][0]
    for losses, _, _ in after:
        torch.testing.assert_close(losses, whole[FIRST:], rtol=1e-10, atol=0)
