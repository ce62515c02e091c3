"""Programs under torch.compile: traced as written, stepped as compiled."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from meshwright import parity
from meshwright.parity.check import ParityCheck, judged
from meshwright.parity.job import ParityJob
from meshwright.parity.recorded import RecordedRun
from meshwright.parity.runs import compare_runs
from meshwright.parity.worker import call_check
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

WIDTH = 16


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, 4))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def batch_of(generator: torch.Generator) -> Tensor:
    return torch.randn(8, WIDTH, generator=generator)


def wrong_backend(graph: Any, inputs: Any) -> Callable[..., Any]:
    """Return a compiler's output with an error of 1/1000."""
    return lambda *arguments: tuple(1.001 * x for x in graph(*arguments))


def compiled_ddp(mesh: Mesh, folder: Path, backend: str) -> None:
    def check(job: ParityJob) -> None:
        job.reference(model(), loss=loss_of, batch=batch_of)
        chosen = wrong_backend if backend == "wrong" else backend
        compiled = torch.compile(job.copy(), backend=chosen)
        job.parallel(DistributedDataParallel(compiled), batch=job.rows("data"))

    call_check(check, mesh, "float64", folder)


def compiled_recorded(mesh: Mesh, folder: Path, backend: str) -> None:
    for name, compiles, seed in (("plain", False, None), ("plain", False, 1), ("compiled", True, None)):
        torch.manual_seed(1)
        trained = model().double()
        called = torch.compile(trained, backend=backend) if compiles else trained
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        with parity.recording(folder / name, steps=(2,), perturb=seed):
            for step in range(2):
                loss_of(called, batch_of(torch.Generator().manual_seed(step)).double()).backward()
                optimizer.step()
                optimizer.zero_grad()


BACKENDS = [
    "eager",
    pytest.param(
        "inductor",
        marks=[pytest.mark.long, pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++ here")],
    ),
]


@pytest.mark.filterwarnings("ignore")  # warnings of the installed compiler
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_program_holds(backend: str, tmp_path: Path) -> None:
    run_ranks(compiled_ddp, Grid((("data", 2),)), tmp_path, backend, transport="torch")
    check = ParityCheck("compiled", Path(__file__), (("data", 2),), "float64")
    result = judged(check, "float64", tmp_path, 0.0)
    assert result.holds, result.verdict


@pytest.mark.filterwarnings("ignore")
def test_what_the_compiler_does_wrong_is_seen_in_the_steps_that_it_runs(tmp_path: Path) -> None:
    run_ranks(compiled_ddp, Grid((("data", 2),)), tmp_path, "wrong", transport="torch")
    check = ParityCheck("compiled", Path(__file__), (("data", 2),), "float64")
    result = judged(check, "float64", tmp_path, 0.0)
    assert {row.step for row in result.failed if row.kind == "loss"} == {2, 3}
    assert result.finding is not None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_compiled_run_is_recorded_as_it_is_written(backend: str, tmp_path: Path) -> None:
    run_ranks(compiled_recorded, Grid((("data", 1),)), tmp_path, backend, transport="torch")
    (result,) = compare_runs(RecordedRun.read(tmp_path / "plain"), RecordedRun.read(tmp_path / "compiled"))
    assert result.holds, result.verdict
    assert [line.name for line in result.modules] == ["0", "1", "2", ""]
    assert "compiled modules were recorded as they are written: what the compiler makes of them is not compared" in (
        result.notes
    )
