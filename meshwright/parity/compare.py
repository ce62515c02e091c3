"""Comparisons and errors for `meshwright verify` and `meshwright parity`; factors between tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor


@dataclass(frozen=True)
class Row:
    """One comparison: the relative error of `name` (for tensors in the 2-norm), and the largest allowed error.

    `step`: the step before the comparison; 0 before the first step.
    """

    kind: str
    name: str
    error: float
    allowed: float
    step: int = 0

    @property
    def label(self) -> str:
        """The name with the step; the name of a number is its step."""
        return f"{self.name}, step {self.step}" if self.step and self.name != f"step {self.step}" else self.name

    @property
    def holds(self) -> bool:
        return self.error <= self.allowed  # False for not-a-number


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return norm(ours - theirs) / norm(theirs) in the 2-norm; norm(ours - theirs) if `theirs` is zero."""
    # Accumulated in float64: a sum of squares in bf16 would round by more than the measured error.
    norm = partial(torch.linalg.vector_norm, dtype=torch.float64)
    difference, size = float(norm(ours.double() - theirs.double())), float(norm(theirs))
    return difference / size if size else difference


def factor_of(ours: Tensor, theirs: Tensor, tolerance: float = 1e-2) -> float | None:
    """Return c with ours = c · theirs, up to a rest of `tolerance` times the norm of c · theirs; None without one."""
    a, b = ours.double().flatten(), theirs.double().flatten()
    size = float(b @ b)
    if not size or not bool(torch.isfinite(a).all()):
        return None
    # Least squares gives the factor with the smallest rest; the rest must then be small.
    factor = float(a @ b) / size
    rest = float(torch.linalg.vector_norm(a - factor * b))
    return factor if rest <= tolerance * abs(factor) * math.sqrt(size) else None


def axis_words(sizes: Mapping[str, int], factor: float | None) -> str:
    """Return the end of a sentence on a factor that is an axis's size, or 1 / size; empty for other factors."""
    for axis, n in sizes.items() if factor is not None else ():
        # A factor equal to the sizes of two axes is attributed to the outer axis, since one number cannot decide.
        if n > 1 and math.isclose(factor or 0, n, rel_tol=1e-2):
            return f", the size of {axis}: added up once too often, or a sum where a mean belongs"
        if n > 1 and math.isclose(factor or 0, 1 / n, rel_tol=1e-2):
            return f", one over the size of {axis}: a mean where a sum belongs"
    return ""


NARROW = (("bfloat16", torch.bfloat16), ("float16", torch.float16), ("float32", torch.float32))


def narrow_type(ours: Sequence[Tensor], theirs: Sequence[Tensor], dtype: str) -> str:
    """Return the type narrower than `dtype` with a rounding error that explains the tensors' error; empty if none."""
    x, y = (torch.cat([each.double().flatten() for each in tensors]) for tensors in (ours, theirs))
    error, widest = relative_error(x, y), vars(torch)[dtype]
    size = float(y @ y)
    # An error that a single factor explains is no rounding.
    if size and relative_error(x, float(x @ y) / size * y) < 0.2 * error:
        return ""
    narrower = {name: t for name, t in NARROW if torch.finfo(t).eps > torch.finfo(widest).eps}
    # The error of one rounding; a chain of layers, or a sum over ranks, has several times this error.
    off = {name: relative_error(y.to(t), y) for name, t in narrower.items()}
    known = {name: abs(math.log(error / e)) for name, e in off.items() if error > 0 and e > 0}
    nearest = min(known, key=lambda name: known[name], default="")
    if not nearest or not off[nearest] / 8 < error < 64 * off[nearest]:
        return ""
    # Rounded numbers, or sums of a few, are exact in the next wider type, perhaps after a division by ranks. This is no
    # accident.
    holds = torch.float32 if widest is torch.float64 else narrower[nearest]
    exact = max(float(((x * n).to(holds).double() == x * n).double().mean()) for n in (1, 2, 3, 4, 6, 8))
    # Rounding errors are smaller for smaller numbers.
    small = y.abs() <= y.abs().median()
    rest, values = (
        float(z[small].square().mean().sqrt() / z[~small].square().mean().sqrt()) if bool((~small).any()) else 0.0
        for z in (x - y, y)
    )
    proportional = rest <= 1.5 * values
    is_float32 = nearest == "float32" and error < 3e-6
    return nearest if exact > 0.95 or proportional or is_float32 else ""
