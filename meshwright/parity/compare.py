"""The numbers and tensors of a parallel program against those of the reference on one device: `meshwright verify` and
`meshwright parity` compare by these rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


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


def compare_numbers(kind: str, parallel: Sequence[float], reference: Sequence[float], allowed: float) -> Iterator[Row]:
    """Step by step. Two infinities, of a step that overflows on both sides, are equal."""
    assert len(parallel) == len(reference), f"{len(parallel)} steps against {len(reference)}"
    for step, (ours, theirs) in enumerate(zip(parallel, reference, strict=True), 1):
        error = 0.0 if ours == theirs else abs(ours - theirs) / abs(theirs)
        yield Row(kind, f"step {step}", error, allowed)


def compare_tensors(
    kind: str, parallel: Callable[[str], Tensor], reference: Mapping[str, Tensor], allowed: float
) -> Iterator[Row]:
    """Every parameter of the reference, whole. `parallel` reads one by its name."""
    for name, tensor in reference.items():
        yield Row(kind, name, relative_error(parallel(name), tensor), allowed)


def compare_together(
    kind: str, parallel: Callable[[str], Tensor], reference: Mapping[str, Tensor], allowed: float
) -> Iterator[Row]:
    """All parameters as one tensor."""
    found = [_difference(parallel(name), tensor) for name, tensor in reference.items()]
    difference, size = (math.hypot(*norms) for norms in zip(*found, strict=True))
    yield Row(kind, "all parameters", difference / size, allowed)


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """The norm of the difference over that of the second, or the former where the latter is zero."""
    difference, size = _difference(ours, theirs)
    return difference / size if size else difference


def _difference(ours: Tensor, theirs: Tensor) -> tuple[float, float]:
    """The norms of the difference and of the second."""
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    return float(norm(ours.double() - theirs.double())), float(norm(theirs))


def zero_tensors(tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
    """The names of those that are zero everywhere: two dead models would agree on them."""
    return tuple(name for name, tensor in tensors.items() if not tensor.any())


def factor_of(ours: Tensor, theirs: Tensor, tolerance: float = 1e-2) -> float | None:
    """The number by which ours is theirs; None where it is not a multiple of it."""
    a, b = ours.double().flatten(), theirs.double().flatten()
    size = float(b @ b)
    if not size or not bool(torch.isfinite(a).all()):
        return None
    factor = float(a @ b) / size
    rest = float(torch.linalg.vector_norm(a - factor * b))
    return factor if rest <= tolerance * abs(factor) * math.sqrt(size) else None


def axis_words(sizes: Mapping[str, int], factor: float | None) -> str:
    """Which axis a factor is the size of, and what mistakes make it."""
    for axis, n in sizes.items() if factor is not None else ():
        if n > 1 and math.isclose(factor or 0, n, rel_tol=1e-2):
            return f", the size of {axis}: added up once too often, or a sum where a mean belongs"
        if n > 1 and math.isclose(factor or 0, 1 / n, rel_tol=1e-2):
            return f", one over the size of {axis}: a mean where a sum belongs"
    return ""
