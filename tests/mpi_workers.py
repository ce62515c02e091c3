"""Runs functions on MPI ranks. Python and torch take seconds to start under mpiexec, so one mpiexec a world size runs
all functions.

CASES of `mpi_cases` lists the functions of test modules (name -> `module:function`, arguments). The session's fixture
`mpi` (conftest) starts each world size at its first use and keeps the answers.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from meshwright.ranks.environment import Environment, Rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.launch import Job, StopRequest, launch
from meshwright.ranks.mesh import open_mesh
from tests.workers import with_stages

Answer = tuple[Any, dict[str, torch.Tensor]]
"""A case's result: facts that survive JSON, and tensors by name."""

Held = dict[str, dict[tuple[int, ...], torch.Tensor]]
"""A rank's parts of tensors, by name and offsets."""


def flat(held: Held) -> dict[str, torch.Tensor]:
    """Return the parts by a file's names: `name@offset,offset`."""
    return {
        f"{name}@{','.join(map(str, offsets))}": part for name, parts in held.items() for offsets, part in parts.items()
    }


def unflat(tensors: Mapping[str, torch.Tensor]) -> Held:
    """Return the parts of `flat`, by name and offsets again."""
    held: Held = {}
    for label, part in tensors.items():
        name, _, offsets = label.partition("@")
        held.setdefault(name, {})[tuple(map(int, offsets.split(",")))] = part
    return held


@dataclass(frozen=True)
class Case:
    """`function` is `package.module:name`, called as name(mesh, *arguments) on a grid of `axes`."""

    name: str
    function: str
    arguments: tuple[Any, ...]
    axes: tuple[tuple[str, int], ...]
    token_axes: tuple[str, ...] = ("data",)

    def run(self, environment: Environment) -> Answer:
        module, _, name = self.function.partition(":")
        with open_mesh(
            with_stages(Grid(self.axes)),
            environment,
            "mpi",
            torch.device("cpu"),
            Rendezvous("127.0.0.1", 0, hosted=False),
            self.token_axes,
        ) as mesh:
            answer: Answer = vars(importlib.import_module(module))[name](mesh, *self.arguments)
        return answer


def run_on_mpi(cases: list[Case], num_ranks: int, out: Path) -> None:
    """Run every case on `num_ranks` ranks of one mpiexec; write the answers to `out`."""
    listed = [asdict(case) for case in cases]
    launch(Job("tests.mpi_workers:work", {"cases": listed, "out": str(out)}), num_ranks, "mpi", threads=1)


def answers_of(cases: list[Case], num_ranks: int, out: Path) -> dict[str, list[Answer]]:
    """Read the answers that `run_on_mpi` has written, in rank order by the case's name."""
    return {case.name: [_read(out, case.name, rank) for rank in range(num_ranks)] for case in cases}


def work(environment: Environment, stop: StopRequest, cases: list[Mapping[str, Any]], out: str) -> None:
    """Run the cases on one rank, and write the answers to files."""
    for case in _parsed(cases):
        facts, tensors = case.run(environment)
        stem = Path(out, f"{case.name}-{environment.rank}")
        stem.with_suffix(".json").write_text(json.dumps(facts))
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, stem.with_suffix(".safetensors"))


def _parsed(cases: list[Mapping[str, Any]]) -> Iterator[Case]:
    for case in cases:
        axes = tuple((name, size) for name, size in case["axes"])
        yield Case(case["name"], case["function"], tuple(case["arguments"]), axes, tuple(case["token_axes"]))


def _read(out: Path, name: str, rank: int) -> Answer:
    stem = Path(out, f"{name}-{rank}")
    return json.loads(stem.with_suffix(".json").read_text()), load_file(stem.with_suffix(".safetensors"))
