"""O1 and O2 train like float32, within the effect of half-precision rounding. O2 keeps float32 masters."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch

from meshwright.compute.model import counts_of, rows_of
from meshwright.compute.parameters.bucket import StepWeights
from meshwright.config import Config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.optim import states as states_file
from meshwright.strategies.optim.states import InPlace
from meshwright.training.parts import Parts
from meshwright.training.step import train_step
from tests.harness import build, forward_and_backward
from tests.oracle.batches import global_batch
from tests.oracle.data_parallel import config_for
from tests.workers import run_ranks

STEPS = 10
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3}
"""Relative tolerance of each step's loss: about five units in the last place of 8 and 11 bits."""


def config_of(sync: str, size: int, level: str, dtype: str, name: str) -> Config:
    return config_for(
        sync, size, batch={"global": 12, "micro": 12 // size // 2},
        precision={"level": level, "dtype": dtype, "loss_scale": {"initial": 1024.0}},
        optimizer={"name": name, "lr": 3e-3 if name == "adamw" else 0.3},
    )  # fmt: skip


def losses(mesh: Mesh, sync: str, level: str, dtype: str, name: str = "adamw") -> list[float]:
    """Return the global losses of ten steps over the same batch, which makes the losses fall by a lot."""
    config = config_of(sync, mesh.size("data"), level, dtype, name)
    parts = build(config, mesh)
    everyone = global_batch(config, 0)
    results = [train_step(parts, everyone, step) for step in range(STEPS)]
    assert all(result.applied for result in results)
    _check_storage(parts, config)
    return [result.loss for result in results]


def _check_storage(parts: Parts, config: Config) -> None:
    """Assert that every state is stored in the state's dtype, and that weights are the rounded masters."""
    wanted = {"bf16": torch.bfloat16, "fp16": torch.float16, "float32": torch.float32}[config.precision.dtype]
    held = parts.optimizer.held
    assert isinstance(held, InPlace)
    for master in held.masters:
        assert master.dtype == torch.float32
    for name, parameter in parts.model.named_parameters():
        half = config.precision.level == "O2" and parts.specs[name].role.stored == "run"
        assert parameter.dtype == (wanted if half else torch.float32), name
    for slot, master in zip(held.slots, held.masters, strict=True):
        assert torch.equal(slot.parameter, master.to(slot.parameter.dtype))
        assert (slot.parameter is master) == (slot.parameter.dtype == torch.float32)


def all_losses(mesh: Mesh, sync: str) -> dict[tuple[str, str], list[float]]:
    return {(level, dtype): losses(mesh, sync, level, dtype) for level in ("O1", "O2") for dtype in TOLERANCE}


@cache
def full_precision() -> list[float]:
    return run_ranks(losses, Grid((("data", 1),)), "allreduce", "O0", "float32")[0]


@cache
def half_precision(sync: str) -> list[dict[tuple[str, str], list[float]]]:
    return run_ranks(all_losses, Grid((("data", 2),)), sync)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.parametrize("sync", ["allreduce", "zero1", "zero2"])
def test_losses_follow_float32(sync: str, level: str, dtype: str) -> None:
    reference = full_precision()
    assert reference[0] - reference[-1] > 0.3
    for answers in half_precision(sync):
        assert answers[level, dtype] == pytest.approx(reference, rel=TOLERANCE[dtype])
        assert answers[level, dtype] != reference  # the run was in half precision


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_loss_scale_is_taken_out_again(level: str) -> None:
    """The optimizer is SGD, with steps proportional to the gradient: AdamW would hide a wrong scale."""
    (reference,) = run_ranks(losses, Grid((("data", 1),)), "allreduce", "O0", "float32", "sgd")
    assert reference[0] - reference[-1] > 0.3
    (mine,) = run_ranks(losses, Grid((("data", 1),)), "allreduce", level, "fp16", "sgd")
    assert mine == pytest.approx(reference, rel=TOLERANCE["fp16"])


def summed(mesh: Mesh, sync: str) -> tuple[bool, bool, bool]:
    """Give both ranks the same rows, and a loss large enough that twice the gradient is too large for fp16.

    Returns whether a rank's own gradients are finite, the sums, and the sums of a loss that was divided beforehand.
    """
    config = config_of(sync, mesh.size("data"), "O2", "fp16", "sgd")
    stored = config.precision.model_copy(update={"accumulate": "stored"})
    parts = build(config.model_copy(update={"precision": stored}), mesh)
    batch = rows_of(global_batch(parts.config, 0), slice(0, 6))
    (count,) = counts_of(batch, parts.model.labels)

    def own(scale: float) -> torch.Tensor:
        forward_and_backward(parts, batch, {"labels": scale}, final=False)
        gradients = [p.grad.flatten().float() for p in parts.model.parameters() if p.grad is not None]
        for parameter in parts.model.parameters():
            parameter.grad = None
        return torch.cat(gradients)

    def together(scale: float) -> bool:
        forward_and_backward(parts, batch, {"labels": scale}, final=True)
        parts.strategy.finish()
        finite = all(bool(slot.parameter.grad.isfinite().all()) for slot in parts.strategy.slots)
        everyone = torch.empty(mesh.world.size, dtype=torch.bool, device=mesh.device)
        mesh.world.all_gather(everyone, torch.tensor([finite], device=mesh.device))
        parts.strategy.publish()
        return bool(everyone.all())

    scale = 50_000.0 / float(own(1.0).abs().max())
    return bool(own(scale).isfinite().all()), together(scale), together(scale / (count * mesh.size("data")))


@pytest.mark.parametrize("sync", ["allreduce", "zero1", "ring"])
def test_half_precision_sums_do_not_overflow_as_the_loss_is_divided_beforehand(sync: str) -> None:
    for own, sums, sums_of_divided in run_ranks(summed, Grid((("data", 2),)), sync):
        assert own
        assert not sums
        assert sums_of_divided


def widened(mesh: Mesh, limit: int) -> tuple[list[torch.Tensor], int]:
    """Make three steps of one microbatch in bf16. Return the masters, and the most bytes of gradients in one call."""
    config = config_for("allreduce", 1, batch={"global": 12, "micro": 12}, precision={"level": "O2", "dtype": "bf16"})
    parts, most = build(config, mesh), 0
    states: Any = parts.optimizer.held
    together = states._step_together

    def noting(members: list[int], matrix: bool, step: StepWeights) -> None:
        nonlocal most
        own = [states.slots[index].parameter.grad for index in members]
        most = max(most, sum(4 * gradient.numel() for gradient in own if gradient.dtype == torch.bfloat16))
        together(members, matrix, step)

    with patch.object(states_file, "WIDENED_BYTES", limit), patch.object(states, "_step_together", noting):
        for step in range(3):
            train_step(parts, global_batch(config, step), step)
    return [master.detach().clone() for master in states.masters], most


def test_few_gradients_are_widened_at_a_time() -> None:
    assert list(states_file.stepped_together([])) == []
    with patch.object(states_file, "WIDENED_BYTES", 6):
        assert list(states_file.stepped_together([3, 3, 0, 3, 9, 1])) == [[0, 1, 2], [3], [4], [5]]
    one = Grid((("data", 1),))
    ((together, most),), ((apart, least),) = (run_ranks(widened, one, limit) for limit in (2**28, 1))
    assert 0 < 2 * least < most
    assert all(map(torch.equal, together, apart))
