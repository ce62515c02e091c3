"""Planted mistakes are found, with the right modules and kinds. Right programs are not disturbed."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from meshwright.parity.check import ParityCheck, judged
from meshwright.parity.job import ParityJob
from meshwright.parity.worker import call_check
from meshwright.ranks.grid import Grid
from meshwright.ranks.launch import Ranks, run
from meshwright.ranks.mesh import Mesh
from tests.parity.__main__ import names_it, run_cases, settings
from tests.workers import run_ranks

CASES = {name: (setting, mistake) for name, setting, mistake in settings()}
TENSOR = (("tp", 2),)
FEW = ["g-missing@blocks.0.attention.out", "same-slice", "sequence-no-norms", "clip-local", "dropout", "right-17"]
MANY = {
    axes: [name for name, (setting, _) in CASES.items() if setting.axes == axes] for axes in (TENSOR, (("data", 2),))
}


def check_cases(names: list[str], axes: tuple[tuple[str, int], ...], precision: str, folder: Path) -> None:
    run(run_cases, Ranks(axes), names=names, precisions=[precision], out=folder)
    for name in names:
        check = ParityCheck(name, Path(__file__), axes, precision)
        result = judged(check, precision, folder / f"{name}-{precision}", time.monotonic())
        _, mistake = CASES[name]
        if mistake is None:
            assert result.holds, result.verdict
        else:
            assert result.finding is not None, f"{name} is not seen"
            assert names_it(result, mistake), result.verdict
            assert result.finding.kind in mistake.kinds, result.verdict


def test_some_on_two_tensor_ranks(tmp_path: Path) -> None:
    check_cases(FEW, TENSOR, "float64", tmp_path)


def test_copies_in_half_precision_have_equal_bits(tmp_path: Path) -> None:
    """A norm without the other rank's part moves gradients by less than bf16 rounds."""
    check_cases(["clip-local", "right-20"], TENSOR, "bf16", tmp_path)


def one_rank_forgets(mesh: Mesh, folder: Path) -> None:
    def batch_of(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(8, 4, generator=generator)

    def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def forgets(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        return loss_of(model, batch)

    def check(job: ParityJob) -> None:
        job.reference(nn.Linear(4, 3), loss=loss_of, batch=batch_of)
        job.parallel(job.copy(), loss=forgets)

    call_check(check, mesh, "float64", folder)


def test_a_step_is_also_taken_in_two_halves(tmp_path: Path) -> None:
    run_ranks(one_rank_forgets, Grid((("data", 2),)), tmp_path, transport="torch")
    result = judged(ParityCheck("halves", Path(__file__), (("data", 2),), "float64"), "float64", tmp_path, 0.0)
    assert result.finding is not None
    assert result.finding.kind == "accumulation"


@pytest.mark.long
@pytest.mark.parametrize("axes", MANY, ids=str)
def test_all_on_two_ranks(axes: tuple[tuple[str, int], ...], tmp_path: Path) -> None:
    check_cases(MANY[axes], axes, "float64", tmp_path)
