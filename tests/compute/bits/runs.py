"""Steps of a run on ranks, and the run's final numbers and tensors, assembled from the ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.config import Config
from meshwright.ranks.mesh import Mesh
from meshwright.training.step import train_step
from tests.compute.models.preferring import pairs_of
from tests.harness import build, resolved
from tests.oracle.batches import BATCHES
from tests.workers import run_ranks

GPT2: dict[str, Any] = {
    "model": {
        "family": "gpt2", "layers": 2, "hidden": 64, "heads": 4, "positions": 64, "vocabulary": 300, "dropout": 0.1,
    },
    "data": {"sequence": 64},
    "batch": {"global": 24, "micro": 4},
    "optimizer": {"lr": 1e-2, "clip": 0.5},
    "steps": 2,
    "bits": {"kind": "layout-free", "samples": 1},
}  # fmt: skip


Plant = Callable[[Mesh], None]
"""A function that breaks something on a rank, before the rank's parts are built."""


@dataclass(frozen=True)
class Ended:
    """The end of a run.

    Attributes:
        numbers: Each step's loss and gradient norm, in hexadecimal.
        tensors: Masters and moments, by kind and parameter.
    """

    numbers: tuple[str, ...]
    tensors: dict[str, Tensor]

    def differing(self, other: Ended) -> list[str]:
        """Return the steps and tensors that differ between the two runs in any bit."""
        found = [f"step {step}" for step, (a, b) in enumerate(zip(self.numbers, other.numbers, strict=True)) if a != b]
        names = self.tensors.keys() | other.tensors.keys()
        return found + sorted(name for name in names if digest(self.tensors[name]) != digest(other.tensors[name]))


def digest(x: Tensor) -> str:
    return hashlib.sha256(x.contiguous().view(torch.uint8).numpy().data).hexdigest()


Pieces = list[tuple[str, tuple[int, ...], tuple[slice, ...], Tensor]]
"""Kind and parameter, the whole's shape, the piece's slices of the whole, and the piece's values."""


def _steps(mesh: Mesh, config: Config, plant: Plant | None) -> tuple[tuple[str, ...], Pieces]:
    if plant is not None:
        plant(mesh)
    parts = build(config, mesh)
    numbers, batch_of = [], pairs_of if config.loss is not None else BATCHES[config.model.family]
    for step in range(config.steps):
        result = train_step(parts, batch_of(config, step), step)
        numbers.append(f"{result.loss.hex()} {result.gradient_norm.hex()}")
    pieces = [
        (
            f"{state.kind} of {place.name}",
            place.shape,
            place.box.slices,
            state.values[place.start : place.stop].view(place.box.lengths),
        )
        for _, states in parts.stored()
        for state in states
        for place in state.places
    ]
    return tuple(numbers), [(*where, values.clone()) for *where, values in pieces]


def ended(config: Config, plant: Plant | None = None, **how: Any) -> Ended:
    """Run a config on the config's ranks; return the numbers and tensors at the end."""
    config = resolved(config)  # fields with `measured` are timed here, not in ranks
    answers = run_ranks(_steps, config.grid, config, plant, token_axes=config.layout.token_axes, **how)
    (numbers,) = {numbers for numbers, _ in answers}
    tensors: dict[str, Tensor] = {}
    for _, pieces in answers:
        for name, shape, slices, values in pieces:
            tensors.setdefault(name, torch.full(shape, torch.nan, dtype=values.dtype))[slices] = values
    return Ended(numbers, tensors)
