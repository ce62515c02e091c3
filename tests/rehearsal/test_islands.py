"""Compiled islands compute as torch's operations do; Inductor compiles the same functions for a CPU here and for a
GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from meshwright.compute.tensor.cross_entropy import Classes, chunked_loss
from meshwright.compute.tensor.gelu import gelu
from meshwright.compute.tensor.islands import Islands, compiled_islands
from meshwright.config import Config
from meshwright.ranks.comm import RankGroup, SoloComm
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.step import train_step
from tests.harness import build
from tests.oracle.batches import BATCHES
from tests.oracle.tensor import ONE_D, config_for
from tests.rehearsal.fake_cuda import compiler
from tests.workers import run_ranks

pytestmark = [
    pytest.mark.skipif(compiler() is None, reason="no C++ compiler here, which Inductor needs on a CPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # warnings inside torch's compiler
    # torch's compiler imports setuptools, perhaps after another test has imported distutils.
    pytest.mark.filterwarnings("ignore:Distutils was imported before Setuptools"),
    pytest.mark.filterwarnings("ignore:Setuptools is replacing distutils"),
]

ONE = Grid((("data", 1),))
TOLERANCES = {torch.float64: 1e-13, torch.float32: 2e-6}


def losses(islands: Islands | None, dtype: torch.dtype, smoothing: float) -> list[torch.Tensor]:
    """Return the loss of 50 tokens over 37 classes of 48 rows and the loss's gradients, and GELU's value and
    gradient."""
    generator = torch.Generator().manual_seed(3)
    h = torch.randn(50, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(48, 8, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(37, (50,), generator=generator)
    labels[::7] = -100
    loss = chunked_loss(
        h, weight, None, labels, Classes(37, SoloComm(RankGroup("", (0,), 0)), smoothing, islands=islands), 1 / 3
    )
    y = gelu(h, islands)
    (loss + y.sum()).backward()
    assert h.grad is not None
    assert weight.grad is not None
    return [loss.detach(), y.detach(), h.grad, weight.grad]


def both(mesh: Mesh, dtype: torch.dtype, smoothing: float) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return losses(compiled_islands(), dtype, smoothing), losses(None, dtype, smoothing)


@pytest.mark.parametrize(
    "dtype, smoothing", [(torch.float64, 0.1), pytest.param(torch.float32, 0.1, marks=pytest.mark.long)]
)
def test_an_island_equals_torch(dtype: torch.dtype, smoothing: float) -> None:
    ((compiled, plain),) = run_ranks(both, ONE, dtype, smoothing, transport="torch")
    for mine, wanted in zip(compiled, plain, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_one_pass_of_all_classes_is_the_two_passes(smoothing: float) -> None:
    islands, scale = compiled_islands(), 1 / 3
    generator = torch.Generator().manual_seed(5)
    logits = 3 * torch.randn(50, 48, generator=generator, dtype=torch.float64)
    columns = torch.randint(37, (50, 1), generator=generator)
    certain, equal = torch.full((50, 1), 1 - smoothing, dtype=torch.float64), torch.tensor(smoothing / 37).double()
    factors = torch.full((50, 1), scale, dtype=torch.float64)
    factors[::7] = 0  # not counted
    two, one = logits.clone(), logits.clone()
    top, total, picked = islands.statistics(two, columns, certain, equal, 37).split(1, 1)
    islands.gradients(two, top, columns, certain, equal, factors / total, factors, 37)
    losses = islands.losses(one, columns, certain, equal, factors, 37)
    torch.testing.assert_close(losses, total.log() + top - picked, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-13)
    assert one[:, 37:].count_nonzero() == 0


def three_steps(mesh: Mesh, config: Config, times: int) -> list[list[float]]:
    """Return the losses of a run of three steps, made `times` times from the beginning."""
    runs = [build(config, mesh) for _ in range(times)]
    return [[train_step(parts, BATCHES["gpt2"](config, step), step).loss for step in range(3)] for parts in runs]


@pytest.mark.long
def test_a_run_with_islands_is_the_run_without() -> None:
    """Two ranks share the vocabulary; two runs have the same bits."""
    config = config_for("gpt2", ONE_D[0], compile="islands", steps=3)
    ranks = run_ranks(three_steps, Grid(config.layout.axes), config, 2, transport="torch")
    ((plain,),) = run_ranks(three_steps, ONE, config_for("gpt2", {"kind": "none"}, steps=3), 1, transport="torch")
    for first, again in ranks:
        assert first == again
        torch.testing.assert_close(first, plain, rtol=1e-10, atol=0)


def test_a_compiler_that_is_missing_is_said_before_any_process() -> None:
    program = (
        "import shutil; shutil.which = lambda name: None\n"
        "from meshwright.config import parse_config\n"
        "from meshwright.training.decisions import resolve_process\n"
        "from meshwright.ranks.machine import Machine\n"
        "resolve_process(parse_config({'compile': 'islands', 'device': 'cpu'}), Machine(1, 2**30))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "compile=islands needs a C++ compiler, and none is here (apt-get install g++); valid: none" in done.stderr
