"""A checkpoint is independent of the layout: any layout restores the same bits and continues as one device does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from meshwright.ranks.grid import Grid
from meshwright.training.checkpoint import Checkpoint
from tests.oracle.data_parallel import SYNCS, config_for
from tests.training.checkpoint.round_trip import KINDS, assert_same_bits, read_whole, taken_up, written
from tests.training.checkpoint.states import Leg, run_leg
from tests.workers import run_ranks

FIRST, LAST = 3, 5
NEXT = dict(zip(SYNCS, [*SYNCS[1:], SYNCS[0]], strict=True))


def legs(sync: str, size: int, source: Path | None, target: Path | None, span: range, **changes: object) -> list[Leg]:
    config = config_for(sync, size, **changes)
    return run_ranks(run_leg, Grid((("data", size),)), config, source, target, span.start, span.stop)


@pytest.fixture(scope="module")
def serial() -> list[float]:
    return legs("allreduce", 1, None, None, range(LAST))[0][0]


@pytest.mark.diagonal
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("sync", SYNCS)
def test_another_layout_goes_on(sync: str, size: int, serial: list[float], tmp_path: Path) -> None:
    before = legs(sync, size, None, tmp_path, range(FIRST))
    states = written(before)
    assert {kind for kind, _ in states} == KINDS
    assert any(bool(state.any()) for (kind, _), state in states.items() if kind == "exp_avg")
    assert_same_bits(read_whole(Checkpoint(tmp_path / f"step-{FIRST}"), KINDS), states)

    after = legs(NEXT[sync], size % 3 + 2, tmp_path / f"step-{FIRST}", None, range(FIRST, LAST))
    assert_same_bits(taken_up(after), states)
    for losses, _, _ in after:
        torch.testing.assert_close(losses, serial[FIRST:], rtol=1e-10, atol=0)


OTHERS = {
    "momentum": {"optimizer": {"name": "momentum", "lr": 1e-2}},
    "sgd": {"optimizer": {"name": "sgd", "lr": 1e-2}},
    "bf16": {"precision": {"level": "O2", "dtype": "bf16"}},
    "fp16": {"precision": {"level": "O2", "dtype": "fp16", "loss_scale": {"initial": 1024}}},
}


@pytest.mark.few(2)
@pytest.mark.diagonal
@pytest.mark.parametrize("changes", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("sync", ["allreduce", "zero1", "zero3"])
def test_resumed_run_is_the_run(sync: str, changes: dict[str, object], tmp_path: Path) -> None:
    """A resumed run has the bits of an uninterrupted run: momentum, masters and the loss scale are restored."""
    through = legs(sync, 2, None, None, range(LAST), **changes)
    before = legs(sync, 2, None, tmp_path, range(FIRST), **changes)
    after = legs(sync, 2, tmp_path / f"step-{FIRST}", None, range(FIRST, LAST), **changes)
    assert_same_bits(taken_up(after), written(before))
    assert_same_bits(written(after), written(through))
    assert [losses for losses, _, _ in after] == [losses[FIRST:] for losses, _, _ in through]


def test_masters_move_between_layouts(tmp_path: Path) -> None:
    before = legs("allreduce", 2, None, tmp_path, range(FIRST), **OTHERS["bf16"])
    assert {state.dtype for state in written(before).values()} == {torch.float32}
    for sync in ("zero1", "zero3", "server-gradient"):
        after = legs(sync, 3, tmp_path / f"step-{FIRST}", None, range(FIRST, FIRST), **OTHERS["bf16"])
        assert_same_bits(taken_up(after), written(before))
