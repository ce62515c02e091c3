"""Both ends of a pipeline share tied weights. All stages decide together on the norm and on skipped steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.config import Config, parse_config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.parts import Parts
from meshwright.training.step import train_step
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.pipeline import WHOLE, pipelined
from tests.oracle.tensor import BLOCKS, ONE_D
from tests.workers import run_ranks

TIED = "tokens.weight"


@dataclass(frozen=True)
class Outcome:
    """A rank's results after some steps."""

    losses: list[float]
    norms: list[float]
    applied: list[bool]
    scale: float
    weights: dict[str, Tensor]


def train(parts: Parts, step: int, overflow: bool = False) -> tuple[float, float, bool]:
    """Make one step. Return the loss, the gradient's norm, and whether the step was applied. `overflow`: on this
    rank."""

    def damage() -> None:
        if overflow:
            parts.strategy.slots[0].parameter.grad[0] = torch.inf

    batch = BATCHES[parts.config.model.family](parts.config, step)
    result = train_step(parts, batch, step, observe=damage)
    return result.loss, result.gradient_norm, result.applied


def outcome(mesh: Mesh, config: Config, overflows: tuple[tuple[int, int], ...] = ()) -> Outcome:
    """Return the results of a rank. `overflows`: (step, rank) pairs."""
    parts = build(config, mesh)
    steps = [train(parts, step, (step, mesh.rank) in overflows) for step in range(config.steps)]
    losses, norms, applied = (list(column) for column in zip(*steps, strict=True))
    assert parts.strategy.make_replicas_equal() == []
    assert parts.optimizer.make_replicas_equal() == []
    weights = {name: parameter.detach().clone() for name, parameter in parts.model.named_parameters()}
    return Outcome(losses, norms, applied, parts.optimizer.scaler.scale, weights)


def run(config: Config, *arguments: Any) -> list[Outcome]:
    return run_ranks(outcome, Grid(config.layout.axes), config, *arguments, token_axes=config.layout.token_axes)


def in_precision(config: Config, level: str, dtype: str, **changes: Any) -> Config:
    precision = {"level": level, "dtype": dtype, "loss_scale": {"initial": 1024.0}}
    return parse_config(config.model_dump(mode="json", by_alias=True) | {"precision": precision} | changes)


LAYOUTS: dict[str, tuple[int, dict[str, Any], int]] = {
    "2 stages": (2, WHOLE, 1),
    "3 stages": (3, WHOLE, 1),
    "2 replicas of 2 stages": (2, WHOLE, 2),
    "2 stages, 1-D": (2, ONE_D[0], 1),
    "2 stages, 2-D": (2, BLOCKS[1], 1),
}


@pytest.fixture(scope="module")
def serial() -> Outcome:
    return run(pipelined("gpt2", 1, "gpipe", WHOLE))[0]


@pytest.mark.few(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_both_copies_of_a_tied_weight_stay_one(layout: str, serial: Outcome) -> None:
    """The norm counts the weight once: the norm equals serial's, and the steps are clipped by this norm."""
    stages, tensor, data = LAYOUTS[layout]
    config = pipelined("gpt2", stages, "message-driven", tensor, data)
    results = run(config)
    grid = Grid(config.layout.axes)
    for rank, result in enumerate(results):
        assert result.norms == pytest.approx(serial.norms, rel=1e-12)
        here = grid.coordinates(rank)
        assert (TIED in result.weights) == (here["pipe"] in (0, stages - 1))
        if here["pipe"] == 0:
            other = results[grid.rank(here | {"pipe": stages - 1})]
            assert torch.equal(result.weights[TIED], other.weights[TIED])
    assert max(serial.norms) > config.optimizer.clip, "nothing was clipped: the norm did not matter"


def planted(mesh: Mesh, config: Config) -> tuple[list[str], list[str], list[str], Tensor | None]:
    """Plant a wrong copy of the tied weight, and another wrong weight, on the last stage. Return the results of two
    searches, and the weight after."""
    parts = build(config, mesh)
    wrong = (TIED, "norm.weight")
    if mesh.index("pipe") == mesh.size("pipe") - 1:
        for name in wrong:
            parts.model.get_parameter(name).data.flatten()[-1] += 1
    found = parts.strategy.make_replicas_equal()
    by_masters = parts.optimizer.make_replicas_equal()
    again = [*parts.strategy.make_replicas_equal(), *parts.optimizer.make_replicas_equal()]
    held = dict(parts.model.named_parameters()).get(TIED)
    return found, by_masters, again, None if held is None else held.detach().clone()


@pytest.mark.parametrize("level, dtype", [("O0", "float64"), ("O2", "bf16")])
@pytest.mark.parametrize("stages", [2, 3])
def test_a_copy_that_differs_is_found_and_mended(stages: int, level: str, dtype: str) -> None:
    config = in_precision(pipelined("gpt2", stages, "message-driven", WHOLE), level, dtype)
    first, *between, last = run_ranks(planted, Grid(config.layout.axes), config)
    assert first[0] == last[0] == [TIED]  # a weight on one rank alone has no copy to differ from
    for _, _, again, _ in (first, *between, last):
        assert again == []
    assert torch.equal(first[3], last[3])
    assert all(found == [] and held is None for found, _, _, held in between)
    fresh = run_ranks(
        tied_weight, Grid((("data", 1),)), in_precision(pipelined("gpt2", 1, "gpipe", WHOLE), level, dtype)
    )
    assert torch.equal(last[3], fresh[0])


def tied_weight(mesh: Mesh, config: Config) -> Tensor:
    return build(config, mesh).model.get_parameter(TIED).detach().clone()


@pytest.mark.few(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_half_precision_follows_serial(level: str, dtype: str) -> None:
    (wanted,) = run(in_precision(pipelined("gpt2", 1, "gpipe", WHOLE), level, dtype))
    for stages, schedule in ((2, "message-driven"), (3, "1f1b")):
        for result in run(in_precision(pipelined("gpt2", stages, schedule, WHOLE), level, dtype)):
            assert result.losses == pytest.approx(wanted.losses, rel=0.02)
            assert result.norms == pytest.approx(wanted.norms, rel=0.02)
            assert all(result.applied)


@pytest.mark.few(1)
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_all_stages_skip_a_step_that_overflows_on_one(level: str) -> None:
    config = in_precision(pipelined("gpt2", 3, "message-driven", WHOLE), level, "fp16")
    clean = run(in_precision(config, level, "fp16", steps=3))
    results = run(config, ((0, 1), (1, 2)))  # the middle stage, then the last
    for result, other in zip(results, clean, strict=True):
        assert result.applied == [False, False, True]
        assert result.scale == 1024.0 / 4
        assert other.applied == [True, True, True]
    twin = in_precision(pipelined("gpt2", 1, "gpipe", WHOLE), level, "fp16")
    (alone,) = run(twin, ((0, 0), (1, 0)))
    assert results[0].losses == pytest.approx(alone.losses, rel=0.02)
    assert results[0].norms[2] == pytest.approx(alone.norms[2], rel=0.02)


def test_a_scale_that_is_too_large_shrinks_on_all_stages() -> None:
    """The overflows are real: gradients in fp16, on any stage."""
    config = pipelined("gpt2", 2, "message-driven", WHOLE, steps=12)
    tree = config.model_dump(mode="json", by_alias=True)
    precision = {"level": "O2", "dtype": "fp16", "loss_scale": {"initial": 2.0**24}}
    results = run(parse_config(tree | {"precision": precision}))
    assert results[0].applied == results[1].applied
    assert results[0].scale == results[1].scale == 2.0 ** (24 - results[0].applied.count(False))
    assert not results[0].applied[0]
    assert results[0].applied[-1]
