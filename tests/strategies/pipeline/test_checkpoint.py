"""Checkpoints of stages: any other layout restores the same bits, and continues as one device does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import Config, parse_config
from meshwright.training.checkpoint import Checkpoint
from tests.oracle.pipeline import LOOP_OF_THREE, WHOLE, V, pipelined
from tests.oracle.tensor import BLOCKS, ONE_D
from tests.strategies.pipeline.legs import FIRST, LAST, legs, losses_of
from tests.training.checkpoint.round_trip import KINDS, assert_same_bits, read_whole, taken_up, written

LAYOUTS: dict[str, tuple[Any, ...]] = {
    "serial": (1, "gpipe", WHOLE, 1, "allreduce"),
    "2 stages": (2, "message-driven", WHOLE, 1, "allreduce"),
    "3 stages": (3, "axonn", WHOLE, 1, "allreduce"),
    "6 stages": (6, "1f1b", WHOLE, 1, "allreduce"),
    "1-D": (1, "gpipe", ONE_D[0], 1, "allreduce"),
    "2-D": (1, "gpipe", BLOCKS[1], 1, "allreduce"),
    "zero1 x 2 stages": (2, "message-driven", WHOLE, 2, "zero1"),
    "2 stages of 2 chunks, a v": (2, "message-driven", WHOLE, 2, "zero3", V),
    "2 stages of 3 chunks": (2, "1f1b", WHOLE, 1, "allreduce", LOOP_OF_THREE),
    "2 stages, 1-D": (2, "message-driven", ONE_D[0], 1, "allreduce"),
}


def config_of(layout: str, **changes: Any) -> Config:
    stages, schedule, tensor, data, sync, *placed = LAYOUTS[layout]
    config = pipelined("gpt2", stages, schedule, tensor, data, placed[0] if placed else None, steps=LAST)
    tree = config.model_dump(mode="json", by_alias=True)
    tree["layout"]["data"]["sync"] = sync
    return parse_config(tree | changes)


@pytest.fixture(scope="module")
def serial() -> list[float]:
    return losses_of(legs(config_of("serial"), None, None, range(LAST)))


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "writer, readers",
    [
        ("2 stages", ("serial", "3 stages", "1-D")),
        ("zero1 x 2 stages", ("serial", "6 stages", "2-D", "2 stages, 1-D")),
        ("serial", ("2 stages", "zero1 x 2 stages")),
        pytest.param("1-D", ("3 stages",), marks=pytest.mark.long),
        pytest.param("2 stages, 1-D", ("zero1 x 2 stages",), marks=pytest.mark.long),
        ("2 stages of 2 chunks, a v", ("serial", "2 stages of 3 chunks")),
        ("3 stages", ("2 stages of 2 chunks, a v",)),
    ],
)
def test_another_layout_goes_on(writer: str, readers: tuple[str, ...], serial: list[float], tmp_path: Path) -> None:
    before = legs(config_of(writer), None, tmp_path, range(FIRST))
    states = written(before)  # asserts that every element is written by one rank, also a tied weight's
    step = tmp_path / f"step-{FIRST}"
    assert_same_bits(read_whole(Checkpoint(step), KINDS), states)
    for reader in readers:
        after = legs(config_of(reader), step, None, range(FIRST, LAST))
        assert_same_bits(taken_up(after), states)
        torch.testing.assert_close(losses_of(after), serial[FIRST:], rtol=1e-10, atol=0)


def test_a_tied_weight_is_in_it_once(tmp_path: Path) -> None:
    legs(config_of("2 stages"), None, tmp_path, range(1))
    manifest = Checkpoint(tmp_path / "step-1").manifest
    held = manifest.parts["tokens.weight", "weight"]
    assert len(held) == 1


PRECISIONS: dict[str, dict[str, Any]] = {
    "float64": {},
    "bf16": {"precision": {"level": "O2", "dtype": "bf16"}},
    "fp16": {"precision": {"level": "O2", "dtype": "fp16", "loss_scale": {"initial": 1024}}},
}


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "layout, precision",
    [
        ("3 stages", "float64"),
        pytest.param("3 stages", "bf16", marks=pytest.mark.long),
        ("zero1 x 2 stages", "fp16"),
        ("2 stages of 2 chunks, a v", "bf16"),
    ],
)
def test_resumed_run_is_the_run(layout: str, precision: str, tmp_path: Path) -> None:
    config = config_of(layout, **PRECISIONS[precision])
    through = legs(config, None, None, range(LAST))
    before = legs(config, None, tmp_path, range(FIRST))
    after = legs(config, tmp_path / f"step-{FIRST}", None, range(FIRST, LAST))
    assert_same_bits(taken_up(after), written(before))
    assert_same_bits(written(after), written(through))
    assert losses_of(after) == losses_of(through)[FIRST:]
