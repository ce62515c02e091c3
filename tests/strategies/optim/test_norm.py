"""The gradient's norm counts each element once, on any rank; clipping bounds the norm."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from meshwright.compute.parameters.bucket import Slot
from meshwright.compute.parameters.role import StepRule
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.optim.norm import gradient_norm
from meshwright.training.step import backward
from tests.harness import build
from tests.oracle.batches import global_batch
from tests.oracle.data_parallel import config_for
from tests.workers import run_ranks

SYNCS = ("allreduce", "zero1", "server-gradient", "zero3")

DECAYS = StepRule("elements", decays=True)


def norms(mesh: Mesh, clip: float | None) -> dict[str, tuple[float, float, float]]:
    """Return by sync the norm, the norm that the optimizer reports, and the norm of the stepped gradient."""
    return {sync: _norms(mesh, sync, clip) for sync in SYNCS}


def _norms(mesh: Mesh, sync: str, clip: float | None) -> tuple[float, float, float]:
    config = config_for(sync, mesh.size("data"), batch={"global": 12}, optimizer={"lr": 1e-2, "clip": clip})
    parts = build(config, mesh)
    backward(parts, global_batch(config, 0))
    parts.strategy.finish()
    before = float(gradient_norm(parts.strategy.slots, mesh))
    result = parts.optimizer.step(0)
    assert result.applied
    return before, result.gradient_norm, float(gradient_norm(parts.strategy.slots, mesh))


@cache
def serial() -> float:
    return run_ranks(norms, Grid((("data", 1),)), None)[0]["allreduce"][0]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_sync_has_the_serial_norm(size: int) -> None:
    assert serial() > 0.5
    for answers in run_ranks(norms, Grid((("data", size),)), None, transport="torch"):
        for sync, (norm, reported, stepped) in answers.items():
            assert norm == pytest.approx(serial(), rel=1e-12), sync
            assert reported == stepped == norm, sync  # no gradient to clip


@pytest.mark.parametrize("size", [1, 2])
def test_clipping_bounds_what_is_stepped_and_reports_what_was(size: int) -> None:
    for answers in run_ranks(norms, Grid((("data", size),)), 0.25, transport="torch"):
        for sync, (_, reported, stepped) in answers.items():
            assert reported == pytest.approx(serial(), rel=1e-12), sync
            # By 0.25 / (norm + 1e-6), like torch.nn.utils.clip_grad_norm_.
            assert stepped == pytest.approx(0.25 * serial() / (serial() + 1e-6), rel=1e-12), sync


LARGE = 2**24 + 12345
"""GPT-2 small's table has 2.3 times this number of elements."""


def norms_of_large(mesh: Mesh, dtype: str) -> tuple[float, list[float]]:
    """Return numpy's norm of a large gradient in float64, and Meshwright's norms of the gradient in one slot and in
    several."""
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(LARGE, generator=generator).mul_(1e-3).to(getattr(torch, dtype))
    found = []
    for cuts in ([], [2**12], [2**22, 2**23 + 1], list(range(2**20, LARGE, 2**20 + 7))):
        slots = []
        for start, stop in zip([0, *cuts], [*cuts, LARGE], strict=True):
            parameter = nn.Parameter(torch.empty(0, dtype=whole.dtype))
            parameter.data = whole[start:stop]
            parameter.grad = whole[start:stop]
            slots.append(Slot(parameter, (), DECAYS, ()))
        found.append(float(gradient_norm(slots, mesh)))
    return float(np.linalg.norm(whole.double().numpy())), found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_large_gradients(dtype: str) -> None:
    """The norm is right at any precision and with any cuts of the gradient by buckets."""
    ((wanted, found),) = run_ranks(norms_of_large, Grid((("data", 1),)), dtype)
    assert found == pytest.approx([wanted] * len(found), rel=1e-12, abs=0)


def half_slots(mesh: Mesh) -> float:
    """Return the norm of fp16 gradients with squares that overflow fp16; all ranks hold one part, and one part is
    cut."""

    def slot(values: list[float], axes: tuple[str, ...]) -> Slot:
        parameter = nn.Parameter(torch.zeros(len(values), dtype=torch.float16))
        parameter.grad = torch.tensor(values, dtype=torch.float16)
        return Slot(parameter, (), DECAYS, axes)

    mine = [[600.0], [], [0.0, 800.0]][mesh.rank]
    return float(gradient_norm([slot([300.0, 400.0], ()), slot(mine, ("data",))], mesh))


def test_parts_are_summed_over_their_axes_and_copies_are_not() -> None:
    wanted = (300**2 + 400**2 + 600**2 + 800**2) ** 0.5
    assert run_ranks(half_slots, Grid((("data", 3),))) == pytest.approx([wanted] * 3, rel=1e-6)


def stages(mesh: Mesh) -> float:
    """Return the norm of three stages of two replicas. The ends share a slot, whole on both (3), and another in parts
    (1, 2)."""

    def slot(values: list[float], axes: tuple[str, ...], tied: bool = False) -> Slot:
        parameter = nn.Parameter(torch.zeros(len(values)))
        parameter.grad = torch.tensor(values)
        return Slot(parameter, (), DECAYS, axes, ("ends",) if tied else ())

    stage, replica = mesh.index("pipe"), mesh.index("data")
    slots = [slot([4.0 + stage], ())]
    if stage != 1:
        slots += [slot([3.0], (), True), slot([1.0 + stage + replica], ("data", "ends"), True)]
    else:
        slots += [slot([10.0 + replica], ("data",))]
    return float(gradient_norm(slots, mesh))


def test_stages_are_summed_and_their_shared_slots_count_once() -> None:
    wanted = (4**2 + 5**2 + 6**2 + 3**2 + (1 + 2**2 + 3**2 + 4**2) + 10**2 + 11**2) ** 0.5
    results = run_ranks(stages, Grid((("data", 2), ("pipe", 3))))
    assert results == pytest.approx([wanted] * 6, rel=1e-12)
