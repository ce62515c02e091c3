"""Every order of a layout's axes equals one device: float64 gradients to 1e-12, losses to 1e-10."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.ranks.mesh import Mesh
from tests.mpi_workers import Answer, flat, unflat
from tests.oracle.run import check, run, train
from tests.oracle.tensor import config_for as kit_config
from tests.oracle.tensor import serial as serial_of
from tests.orders import LAYOUTS, MEGATRON, SUBGRAPH, config_for
from tests.training.checkpoint.round_trip import assert_same_bits, taken_up, written
from tests.training.checkpoint.states import run_leg
from tests.workers import run_ranks


@cache
def serial() -> Any:
    """Return one device's losses and gradients."""
    return run(config_for("auto"))[0]


ONLY_LONG = ("col-data-row", "row:2-col:2-row-col")


@pytest.mark.parametrize(
    "order", [pytest.param(order, marks=pytest.mark.long) if order in ONLY_LONG else order for order in LAYOUTS]
)
def test_equals_serial(order: str) -> None:
    config = config_for(order)
    nesting = [name for name, size in config.layout.nesting if size > 1]
    assert nesting == [mention.partition(":")[0] for mention in order.split("-")]
    assert config.grid.nesting == config.layout.nesting
    check(run(config), serial())


SPLIT_OTHERS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "shard groups": ("gpt2", 3, {
        "data": {"size": 8, "sync": "zero3", "shard": 4, "bucket": 8192}, "order": ["data:2", "replicate", "data"],
    }),
    "experts": ("experts", 3, {
        "data": {"size": 4, "expert": 4, "sync": "zero1", "bucket": 8192}, "tensor": MEGATRON,
        "order": ["expert:2", "tensor", "expert"],
    }),
    "ring": ("gpt2", 6, {
        "data": {"size": 2}, "context": {"size": 6, "kind": "ring"}, "order": ["context:2", "data", "context"],
    }),
    "key-value heads": ("grouped", 6, {
        "data": {"size": 2, "sync": "zero1", "bucket": 8192}, "tensor": MEGATRON | {"size": 4},
        "order": ["tensor:2", "data", "tensor"],
    }),
    "one common rank": ("gpt2", 6, {
        "data": {"size": 2}, "tensor": SUBGRAPH | {"size": 4, "common": "one"}, "order": ["branch:2", "data", "branch"],
    }),
}  # fmt: skip
"""The model, the size of a microbatch, and the layout, by the split axis."""


@pytest.mark.few(3)
@pytest.mark.parametrize("name", SPLIT_OTHERS)
def test_any_axis_may_be_split(name: str) -> None:
    model, micro, layout = SPLIT_OTHERS[name]
    config = kit_config(model, {"kind": "none"}, batch={"global": 24, "micro": micro}, layout=layout, steps=3)
    assert config.layout.nesting != config.layout.axes
    check(run(config), serial_of(model))


def train_for_files(mesh: Mesh, order: str) -> tuple[list[float], dict[str, Tensor]]:
    losses, gradients = train(mesh, config_for(order))
    return losses, flat(gradients)


def test_equals_serial_over_mpi(mpi: Callable[[int], dict[str, list[Answer]]]) -> None:
    """Branch outermost, data 2."""
    check([(losses, unflat(parts)) for losses, parts in mpi(4)["branch-data"]], serial())


SPLIT = ("row:2-col:2-row-col", "pipe:2-data-pipe", "data:2-tensor-data", "col-row-depth")


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "source, target",
    [
        pytest.param(*pair, marks=[pytest.mark.long] * (number % 2))  # CI runs each order once
        for number, pair in enumerate(pairwise((*SPLIT, SPLIT[0])))
    ],
)
def test_checkpoints_move_between_split_axes(source: str, target: str, tmp_path: Path) -> None:
    def leg(order: str, *where: Any) -> Any:
        config = config_for(order)
        return run_ranks(run_leg, config.grid, config, *where, token_axes=config.layout.token_axes)

    before = leg(source, None, tmp_path, 0, 1)
    after = leg(target, tmp_path / "step-1", None, 1, 3)
    assert_same_bits(taken_up(after), written(before))
    for losses, _, _ in after:
        torch.testing.assert_close(losses, serial()[0][1:], rtol=1e-10, atol=0)
