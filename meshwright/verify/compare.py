"""What the layout left behind against what one device left behind, number by number, with stated tolerances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from meshwright.checkpoint import Checkpoint
from meshwright.config import Config
from meshwright.shard import Box


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors allowed: of a loss, of a parameter's gradient, of its weight after the last step."""

    loss: float
    gradient: float
    weight: float


TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-12, 1e-10),
    "float32": Tolerance(1e-5, 1e-5, 1e-4),
    # Half precision rounds at 2^-8 (bf16) and 2^-11 (fp16), and sums in another order round differently.
    "bf16": Tolerance(1e-2, 3e-2, 3e-2),
    "fp16": Tolerance(2e-3, 1e-2, 1e-2),
}


def tolerance_of(config: Config) -> Tolerance:
    return TOLERANCES[config.precision.dtype]


@dataclass(frozen=True)
class Row:
    """One comparison: the relative error of `name` (in the 2-norm, for tensors) and the most it may be."""

    kind: str
    name: str
    error: float
    allowed: float

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed  # False for not-a-number


def compare_losses(layout: Sequence[float], serial: Sequence[float], allowed: float) -> Iterator[Row]:
    """Step by step."""
    assert len(layout) == len(serial), f"{len(layout)} steps against {len(serial)}"
    for step, (ours, reference) in enumerate(zip(layout, serial, strict=True), 1):
        yield Row("loss", f"step {step}", abs(ours - reference) / abs(reference), allowed)


def compare_tensors(layout: Checkpoint, serial: Checkpoint, kind: str, allowed: float) -> Iterator[Row]:
    """Every parameter that one device has, whole. A part that no rank holds raises CheckpointError."""
    shapes = {entry.parameter: entry.shape for entry in serial.manifest.entries if entry.kind == kind}
    for name, shape in shapes.items():
        whole = Box(tuple(0 for _ in shape), shape)
        ours, reference = layout.read(name, kind, whole).double(), serial.read(name, kind, whole).double()
        size = float(torch.linalg.vector_norm(reference))
        difference = float(torch.linalg.vector_norm(ours - reference))
        yield Row(kind, name, difference / size if size else difference, allowed)
