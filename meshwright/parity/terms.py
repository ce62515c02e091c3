"""A wrong sum by its terms: which of them are lost, added twice, or rounded on the way.

A wrong sum over ranks, microbatches, pieces of a sequence or uses of a weight is w_1 t_1 + ... + w_n t_n + rest; the
reference gives the terms t and the rest. One least-squares problem gives the weights: a right sum has 1 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.parity.compare import NARROW, relative_error


def weights_of(ours: Tensor, theirs: Tensor, terms: Sequence[Tensor], allowed: float) -> list[float] | None:
    """How often `ours` has each term of the sum `theirs`; None where no weights explain what it is off by.

    All tensors have one shape. A term that `ours` has once too often counts 2, one that it lacks counts 0.
    """
    off = (ours - theirs).flatten()
    matrix = torch.stack([x.flatten() for x in terms], 1)
    # With as many terms as elements any tensor is a sum of them.
    if matrix.shape[0] < 2 * matrix.shape[1] or not bool(torch.isfinite(off).all()):
        return None
    # Equal or dependent terms have no weights of their own.
    sizes = torch.linalg.vector_norm(matrix, dim=0)
    if not bool(sizes.all()) or float(torch.linalg.cond(matrix / sizes)) > 1e4:
        return None
    solved = torch.linalg.lstsq(matrix, off[:, None]).solution
    rest = relative_error((matrix @ solved)[:, 0] + theirs.flatten(), ours.flatten())
    if rest > min(allowed, 0.05 * relative_error(ours, theirs)):
        return None
    return [1 + float(w) for w in solved[:, 0]]


def lost_words(weights: Sequence[float], names: Sequence[str]) -> tuple[str, str] | None:
    """The kind and a sentence's end on terms with other weights than 1; None where the weights are no whole numbers, or
    no term has the weight 1."""
    whole = [round(w) for w in weights]
    if any(abs(w - n) > 0.05 or n < 0 for w, n in zip(weights, whole, strict=True)) or 1 not in whole:
        return None
    lost = [name for name, n in zip(names, whole, strict=True) if n == 0]
    repeated = [f"{name} {n} times" for name, n in zip(names, whole, strict=True) if n > 1]
    if lost:
        return "incomplete sum", f"the sum without {' and '.join(lost)}"
    return ("scaled", f"the sum with {' and '.join(repeated)}") if repeated else None


def rounded_sum(ours: Tensor, terms: Sequence[Tensor], rest: Tensor, dtype: str, allowed: float) -> str:
    """The type, narrower than `dtype`, to which terms were rounded before they were added; empty where none was.

    `rest`: what the sum has beside the terms.
    """
    total = torch.stack(list(terms)).sum(0) + rest
    for name, narrow in NARROW:
        if torch.finfo(narrow).eps <= torch.finfo(vars(torch)[dtype]).eps:
            continue
        travelled = [x.to(narrow) for x in terms]
        wide = torch.stack([x.double() for x in travelled]).sum(0) + rest
        # A transport adds in the narrow type, in the order of the ranks; two terms have one order.
        coarse = torch.stack(travelled).sum(0, dtype=narrow).double() + rest
        for made in (wide, coarse):
            if relative_error(ours, made) <= min(allowed, 0.1 * relative_error(ours, total)):
                return name
    return ""


def pieces_of(values: Callable[[slice], Tensor], length: int) -> Mapping[int, list[Tensor]]:
    """By number of pieces, the terms that equal pieces of a dim of this length give: `values` of each piece."""
    counts = [n for n in range(2, min(length, 16) + 1) if length % n == 0]
    return {n: [values(slice(i * length // n, (i + 1) * length // n)) for i in range(n)] for n in counts}
