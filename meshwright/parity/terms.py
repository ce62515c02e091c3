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
    rows = torch.stack([x.flatten() for x in terms])  # [terms, elements]
    # With a term for every element or two any tensor is a sum of terms.
    if rows.shape[1] < 2 * len(rows) or not bool(torch.isfinite(off).all()):
        return None
    sizes = torch.linalg.vector_norm(rows, dim=1)
    if not bool(sizes.all()):
        return None
    rows = rows / sizes[:, None]
    gram = rows @ rows.T  # [terms, terms]: a table of millions of elements is not decomposed itself
    # Equal or dependent terms have no weights of their own.
    if float(torch.linalg.eigvalsh(gram)[0]) < 1e-8:
        return None
    weights, rest = torch.zeros(len(rows), dtype=rows.dtype), off
    for _ in range(3):  # the Gram matrix has squared the rounding: each turn takes up the rest of the last
        weights = weights + torch.linalg.solve(gram, rows @ rest)
        rest = off - weights @ rows
    size = float(torch.linalg.vector_norm(ours))
    if float(torch.linalg.vector_norm(rest)) > min(allowed, 0.05 * relative_error(ours, theirs)) * size:
        return None
    return [1 + float(w) for w in weights / sizes]


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
