"""The norm probe on public mistakes of clipping, in programs that were written for checks before the probe."""

from __future__ import annotations

import copy
import inspect
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright import parity
from meshwright.parity.check import collect
from meshwright.parity.norm import NormProbe
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.workers import run_ranks

FOLDER = Path(__file__).resolve().parents[2] / "examples/parity/public"
NAMED = {
    "attention_sink_norm": ("left out", "1", "it leaves out 1.sinks of rank 1"),
    "clip_generator": ("not scaled", "1", "give the clipping function all that the optimizer trains"),
    "copies_in_norm": ("copies", "0", "it counts 2 copies"),
    "expert_norm": ("left out", "experts.1", "it leaves out experts.1.weight, experts.1.bias of rank 1"),
    "expert_norm_mean": ("wrong sum", "(all parameters)", "it is the mean of norms of 2 ranks"),
    "stage_norm": ("own part", "", "each rank counts its own part alone"),
}


class Job:
    """The methods of a check's job that the programs use. Steps run under a probe, without a reference."""

    def __init__(self, axis: str, clip: float | None) -> None:
        self.rank, self.clip = dist.get_rank(), clip
        self.device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
        self.probe: NormProbe

    def reference(self, model: nn.Module, loss: Any, batch: Any, clip: float) -> None:
        self.model, self.batch = model, batch

    def copy(self) -> nn.Module:
        return copy.deepcopy(self.model)

    def rows(self, axis: str) -> Any:
        return lambda batch: batch.chunk(2)[self.rank]

    def parallel(self, model: Any, step: Any, batch: Any = lambda batch: batch) -> None:
        optimizer = inspect.getclosurevars(step).nonlocals["optimizer"]
        models = model if isinstance(model, nn.Module) else nn.ModuleDict(model)
        self.probe = parity.norm_probe(models, optimizer, max_norm=self.clip)
        generator = torch.Generator().manual_seed(3)
        for _ in range(3):
            step(model, batch(self.batch(generator)))


def probed(mesh: Mesh) -> dict[str, tuple[list[Any], str]]:
    """Return the findings and the verdict on each program, wrong and right."""
    sys.path.insert(0, str(FOLDER))
    found = {}
    for name in NAMED:
        names = runpy.run_path(str(FOLDER / f"{name}.py"))
        for check in collect(FOLDER / f"{name}.py"):
            torch.manual_seed(1)
            job = Job(check.axes[0][0], None if name == "clip_generator" else names["CLIP"])
            names[check.name](job)
            found[f"{name}.{check.name.partition('_')[0]}"] = (job.probe.findings, job.probe.line)
    return found


@pytest.fixture(scope="module")
def found() -> dict[str, tuple[list[Any], str]]:
    first, second = run_ranks(probed, Grid((("data", 2),)), transport="torch")
    assert first == second
    return dict(first)


@pytest.mark.parametrize("name", NAMED)
def test_a_public_mistake_is_named(found: dict[str, tuple[list[Any], str]], name: str) -> None:
    kind, module, words = NAMED[name]
    findings, line = found[f"{name}.wrong"]
    assert [finding.kind for finding in findings] == [kind], line
    assert findings[0].module == module or not module, line
    assert words in line


@pytest.mark.parametrize("name", NAMED)
def test_its_right_form_passes(found: dict[str, tuple[list[Any], str]], name: str) -> None:
    findings, line = found[f"{name}.right"]
    assert findings == [], line
    assert "3 steps of 2 ranks clip by the norm of the full gradients" in line
