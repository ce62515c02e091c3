"""A layout's numbers and tensors against those of the reference on one device, with stated tolerances."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from meshwright.config import Config


@dataclass(frozen=True)
class Tolerance:
    """Largest relative errors allowed: of a loss, of a step's gradient norm, of a parameter's gradient, of its weight
    before the first step and after the last.

    `together`: the last weights of all parameters are one tensor. Adam divides a gradient by its own size, so that an
    element whose gradient is nothing but rounding (a key's bias has none at all) moves by the whole rate, either way;
    in half precision a bias that began with zeros can then be off by a fifth in two right programs.
    """

    loss: float
    norm: float
    gradient: float
    weight: float
    together: bool = False


TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-10, 1e-12, 1e-10),
    "float32": Tolerance(1e-5, 1e-5, 1e-5, 1e-4),
    # Half precision rounds at 2^-8 (bf16) and 2^-11 (fp16), and sums in another order round differently.
    "bf16": Tolerance(1e-2, 3e-2, 3e-2, 3e-2, together=True),
    "fp16": Tolerance(2e-3, 1e-2, 1e-2, 1e-2, together=True),
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


def compare_numbers(kind: str, layout: Sequence[float], reference: Sequence[float], allowed: float) -> Iterator[Row]:
    """Step by step. Two infinities, of a step that overflows on both sides, are equal."""
    assert len(layout) == len(reference), f"{len(layout)} steps against {len(reference)}"
    for step, (ours, theirs) in enumerate(zip(layout, reference, strict=True), 1):
        error = 0.0 if ours == theirs else abs(ours - theirs) / abs(theirs)
        yield Row(kind, f"step {step}", error, allowed)


def compare_tensors(
    kind: str, layout: Callable[[str], Tensor], reference: Mapping[str, Tensor], allowed: float
) -> Iterator[Row]:
    """Every parameter of the reference, whole. `layout` reads one by its name."""
    for name, tensor in reference.items():
        difference, size = _difference(layout(name), tensor)
        yield Row(kind, name, difference / size if size else difference, allowed)


def compare_together(
    kind: str, layout: Callable[[str], Tensor], reference: Mapping[str, Tensor], allowed: float
) -> Iterator[Row]:
    """All parameters as one tensor."""
    found = [_difference(layout(name), tensor) for name, tensor in reference.items()]
    difference, size = (math.hypot(*norms) for norms in zip(*found, strict=True))
    yield Row(kind, "all parameters", difference / size, allowed)


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The norms of the difference and of the second."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    return float(norm(ours.double() - theirs.double())), float(norm(theirs))


def zero_tensors(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of those that are zero everywhere: two dead models would agree on them."""
    return tuple(name for name, tensor in tensors.items() if not tensor.any())
