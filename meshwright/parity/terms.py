"""Explains a wrong sum by terms that are missing, added twice, or rounded before the sum.

A wrong sum over ranks, microbatches, pieces of a sequence or uses of a weight is w_1 t_1 + ... + w_n t_n + rest. The
terms t and the rest are known from the reference. Least squares gives the weights w; in a right sum all are 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from meshwright.parity.compare import NARROW, relative_error


def weights_of(ours: Tensor, theirs: Tensor, terms: Sequence[Tensor], allowed: float) -> list[float] | None:
    """Return the weight of each term of the sum `theirs` in `ours`; None if no weights explain the difference.

    All tensors have one shape. A doubled term has the weight 2, a missing term 0.
    """
    off = (ours - theirs).flatten()
    rows = torch.stack([x.flatten() for x in terms])  # [terms, elements]
    # With fewer than two elements per term, any tensor is a sum of the terms.
    if rows.shape[1] < 2 * len(rows) or not bool(torch.isfinite(off).all()):
        return None
    sizes = torch.linalg.vector_norm(rows, dim=1)
    if not bool(sizes.all()):
        return None
    rows = rows / sizes[:, None]
    gram = rows @ rows.T  # [terms, terms], far smaller than a table of millions of elements
    # Equal or dependent terms have no unique weights.
    if float(torch.linalg.eigvalsh(gram)[0]) < 1e-8:
        return None
    weights, rest = torch.zeros(len(rows), dtype=rows.dtype), off
    for _ in range(3):  # iterative refinement, since the Gram matrix squares the condition number
        weights = weights + torch.linalg.solve(gram, rows @ rest)
        rest = off - weights @ rows
    size = float(torch.linalg.vector_norm(ours))
    if float(torch.linalg.vector_norm(rest)) > min(allowed, 0.05 * relative_error(ours, theirs)) * size:
        return None
    return [1 + float(w) for w in weights / sizes]


def lost_words(weights: Sequence[float], names: Sequence[str]) -> tuple[str, str] | None:
    """Return (kind of mistake, end of a sentence) for weights other than 1.

    None if a weight is no whole number, if no term has the weight 1, or if all have it.
    """
    whole = [round(w) for w in weights]
    if any(abs(w - n) > 0.05 or n < 0 for w, n in zip(weights, whole, strict=True)) or 1 not in whole:
        return None
    lost = [name for name, n in zip(names, whole, strict=True) if n == 0]
    repeated = [f"{name} {n} times" for name, n in zip(names, whole, strict=True) if n > 1]
    if lost:
        return "incomplete sum", f"the sum without {' and '.join(lost)}"
    return ("scaled", f"the sum with {' and '.join(repeated)}") if repeated else None


def rounded_sum(ours: Tensor, terms: Sequence[Tensor], rest: Tensor, dtype: str, allowed: float) -> str:
    """Return the type narrower than `dtype` to which terms were rounded before the sum; empty if none explains `ours`.

    `rest`: the part of the sum that is not in the terms.
    """
    total = torch.stack(list(terms)).sum(0) + rest
    for name, narrow in NARROW:
        if torch.finfo(narrow).eps <= torch.finfo(vars(torch)[dtype]).eps:
            continue
        travelled = [x.to(narrow) for x in terms]
        wide = torch.stack([x.double() for x in travelled]).sum(0) + rest
        # A collective may add in the narrow type, in the order of ranks.
        coarse = torch.stack(travelled).sum(0, dtype=narrow).double() + rest
        for made in (wide, coarse):
            if relative_error(ours, made) <= min(allowed, 0.1 * relative_error(ours, total)):
                return name
    return ""


def pieces_of(values: Callable[[slice], Tensor], length: int) -> Mapping[int, list[Tensor]]:
    """Return, by number of equal pieces of a dim of this length, `values` of each piece."""
    counts = [n for n in range(2, min(length, 16) + 1) if length % n == 0]
    return {n: [values(slice(i * length // n, (i + 1) * length // n)) for i in range(n)] for n in counts}
