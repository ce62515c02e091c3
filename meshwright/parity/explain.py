"""Explains the ranks' tensors by the reference's tensor: copies, cuts, partial sums, or none of these.

| explanation | each rank holds                                                          |
|-------------|--------------------------------------------------------------------------|
| copy        | the reference's tensor                                                   |
| cut         | a block of the reference's tensor, two along a dim, or slices of one dim |
| partial     | a term; the sum over an axis is the reference's tensor, or a cut         |
| wrong       | other values; `factor` if they are a multiple of the reference's         |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

import torch
from torch import Tensor

from meshwright.parity.compare import factor_of
from meshwright.parity.parts import Part, box_candidates

COPY, CUT, PARTIAL, WRONG = "copy", "cut", "partial", "wrong"

MOST_SLICES = 4096
"""The most slices of a dim for the search of nearest slices."""


@dataclass(frozen=True)
class Explanation:
    """The best explanation of the ranks' tensors."""

    kind: str
    error: float
    """The relative error of the explanation."""
    allowed: float
    axis: str = ""
    """The axis of the sum, for partial sums."""
    factor: float | None = None
    """The multiple of the reference's tensor, if wrong tensors are one."""
    rank: int = 0
    """The rank with the largest error."""
    leaves_out: bool = False
    """True if every rank has a cut, but no rank has some slices of the reference's tensor."""

    @property
    def explained(self) -> bool:
        return self.kind != WRONG


@dataclass(frozen=True)
class Fit:
    """The fit of a local tensor to a piece of the reference's tensor."""

    error: float
    piece: Tensor
    """The values of `shard` in `view`."""
    shard: Part
    view: Tensor
    """The reference's tensor, with dims swapped or flattened if necessary."""


def fit(local: Tensor, whole: Tensor, allowed: float, any_order: bool = False) -> Fit | None:
    """Return the best fit of a local tensor among the copy, blocks and slices of the whole; None if no shape fits.

    Args:
        local: a rank's tensor.
        whole: the reference's tensor.
        allowed: the relative error in the 2-norm that ends the search.
        any_order: rows may have another order.
    """
    best: Fit | None = None
    for view in _views(local, whole):
        # The expected norm of a piece of this size; the norm of the piece would be too small for small values.
        scale = float(torch.linalg.vector_norm(view)) * math.sqrt(local.numel() / max(1, view.numel()))
        for candidate in _candidates(local, view, any_order):
            piece = candidate.take(view)
            difference = float(torch.linalg.vector_norm(local - piece))
            error = difference / scale if scale else difference
            if best is None or not error >= best.error:
                best = Fit(error, piece, candidate, view)
            # Take the first that fits: candidates are ordered from simple to contrived.
            if error <= allowed:
                return best
    return best


def _views(local: Tensor, whole: Tensor) -> Iterator[Tensor]:
    """Yield the reference's tensor with batch and sequence unchanged, swapped, or flattened into one dim."""
    # [B, T, H] is [T, B, H] in Megatron, and [B * T, H] for heads or experts that read tokens.
    if local.ndim == whole.ndim:
        yield whole
        if whole.ndim >= 3:
            yield whole.transpose(0, 1)
    elif local.ndim == whole.ndim - 1:
        yield whole.flatten(0, 1)
        if whole.ndim >= 3:
            yield whole.transpose(0, 1).flatten(0, 1)
    elif local.ndim == whole.ndim + 1 and local.shape[0] * local.shape[1] == whole.shape[0]:
        yield whole.view(*local.shape[:2], *whole.shape[1:])


def _candidates(local: Tensor, whole: Tensor, any_order: bool = False) -> Iterator[Part]:
    """Yield parts that a local tensor may be: the whole, blocks, and blocks of the nearest slices along a cut dim."""
    cut = [dim for dim in range(whole.ndim) if local.shape[dim] != whole.shape[dim]]
    if not cut:
        yield Part("", (None,) * whole.ndim)
        if not any_order:
            return
    if any_order and 0 not in cut:
        cut = [0, *cut]
    # There are few blocks, found without distances; slices cost a matrix of distances per cut dim.
    yield from _blocks(local, whole, cut)
    for dim in cut:
        longest = whole.shape[dim] if any_order else whole.shape[dim] - 1
        if not 0 < local.shape[dim] <= longest < MOST_SLICES:
            continue
        for block in _blocks(local, whole, [d for d in cut if d != dim]):
            mine, theirs = (x.movedim(dim, 0).reshape(x.shape[dim], -1) for x in (local, block.take(whole)))
            # By distance, not by equality: outputs have rounding errors, unlike first weights.
            nearest = tuple(torch.cdist(mine, theirs).argmin(1).tolist())
            yield Part("", tuple(nearest if d == dim else index for d, index in enumerate(block.index)))


def _blocks(local: Tensor, whole: Tensor, cut: Sequence[int]) -> Iterator[Part]:
    """Yield blocks of a local shape along the dims `cut`, and pairs of half blocks along one dim.

    A pair is the k-th half block from the beginning and the k-th from the end, as in a causal ring (zigzag).
    """
    yield from box_candidates("", local.shape, whole.shape, cut)
    for dim in cut:
        half, ranks = local.shape[dim] // 2, whole.shape[dim] // max(1, local.shape[dim])
        if half == 0 or whole.shape[dim] != 2 * half * ranks or ranks == 1:
            continue
        for block in box_candidates("", local.shape, whole.shape, [d for d in cut if d != dim]):
            for k in range(ranks):
                # Rank k of a causal ring has pieces k and 2 * ranks - 1 - k, for equal work under the mask.
                ends = tuple(half * at + i for at in (k, 2 * ranks - 1 - k) for i in range(half))
                yield Part("", tuple(ends if d == dim else index for d, index in enumerate(block.index)))


def _leaves_out(fits: Sequence[Fit], allowed: float) -> bool:
    """Return True if the ranks' cuts together lack slices of the reference that differ from all covered slices."""
    view = fits[0].view
    for dim in range(view.ndim):
        if any(f.view.shape != view.shape or f.shard.index[dim] is None for f in fits):
            continue
        covered = sorted({i for f in fits for i in f.shard.index[dim] or ()})
        rest = sorted(set(range(view.shape[dim])) - set(covered))
        if rest:
            slices = view.movedim(dim, 0).reshape(view.shape[dim], -1)
            # A slice that is equal to a covered one, such as a row of padding, may be left out.
            nearest = torch.cdist(slices[rest], slices[covered]).min(1).values
            size = float(torch.linalg.vector_norm(slices)) / math.sqrt(len(slices))
            if bool((nearest > max(allowed, 1e-3) * size).any()):
                return True
    return False


def explain_tensors(
    locals_: Mapping[int, Tensor], whole: Tensor, allowed: float, coordinates: Sequence[Mapping[str, int]], *,
    any_order: bool = False, equal_terms: bool = True,
) -> Explanation:  # fmt: skip
    """Explain the ranks' tensors.

    Args:
        locals_: by rank, the local tensor.
        whole: the reference's tensor.
        allowed: the allowed relative error.
        coordinates: each rank's index on every axis.
        any_order: rows may have another order.
        equal_terms: equal tensors may be terms of a sum; else they are the whole divided by a number.
    """
    fits = {rank: fit(x, whole, allowed, any_order) for rank, x in locals_.items()}
    errors = {rank: math.inf if f is None else f.error for rank, f in fits.items()}
    # (True, nan) sorts above every (False, number): not-a-number is the worst.
    worst = max(errors, key=lambda rank: (errors[rank] != errors[rank], errors[rank]))
    if all(error <= allowed for error in errors.values()):
        good = [f for f in fits.values() if f is not None]
        if all(f.shard.whole for f in good):
            return Explanation(COPY, errors[worst], allowed, rank=worst)
        if not _leaves_out(good, allowed):
            return Explanation(CUT, errors[worst], allowed, rank=worst)
        return Explanation(WRONG, 1.0, allowed, rank=worst, leaves_out=True)
    # Look for a sum only if the tensors are neither copies nor cuts.
    terms = list(locals_.values())
    equal = len({x.shape for x in terms}) == 1 and all(torch.allclose(x, terms[0], rtol=1e-9) for x in terms)
    for axes in axis_subsets(coordinates) if equal_terms or not equal else ():
        error = _sum_error(locals_, whole, allowed, coordinates, axes, any_order)
        if error is not None and error <= allowed:
            return Explanation(PARTIAL, error, allowed, "+".join(axes), rank=worst)
    found = fits[worst]
    factor = None if found is None else factor_of(locals_[worst], found.piece)
    # A factor near 1 must explain nearly all of the error.
    if factor is not None and found is not None and abs(factor - 1) <= 0.1:
        factor = factor_of(locals_[worst], found.piece, 0.1 * abs(factor - 1))
    return Explanation(WRONG, errors[worst], allowed, factor=factor, rank=worst)


def axis_subsets(coordinates: Sequence[Mapping[str, int]]) -> list[tuple[str, ...]]:
    """Return the sets of axes with more than one rank, smaller sets first."""
    axes = [axis for axis in coordinates[0] if len({indices[axis] for indices in coordinates}) > 1]
    return list(chain.from_iterable(combinations(axes, n) for n in range(1, len(axes) + 1)))


def groups_over(coordinates: Sequence[Mapping[str, int]], axes: Sequence[str]) -> list[list[int]]:
    """Return the groups of ranks that differ only in the indices on `axes`."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, indices in enumerate(coordinates):
        groups.setdefault(tuple(i for axis, i in indices.items() if axis not in axes), []).append(rank)
    return list(groups.values())


def _sum_error(
    locals_: Mapping[int, Tensor], whole: Tensor, allowed: float, coordinates: Sequence[Mapping[str, int]],
    axes: Sequence[str], any_order: bool,
) -> float | None:  # fmt: skip
    """Return the error of sums over some axes as pieces of the whole; None for other shapes, or missing slices.

    The error is relative to the terms if these are larger than the sum, since rounding grows with the terms.
    """
    errors, fits = [], []
    for group in groups_over(coordinates, axes):
        terms = [locals_[rank] for rank in group if rank in locals_]
        if not terms:
            continue  # a stage of a pipeline without the module
        # A group with a missing term has no sum, since the missing term would count as zero.
        if len(terms) < len(group) or len({x.shape for x in terms}) > 1:
            return None
        total = torch.stack(terms).sum(0)
        found = fit(total, whole, allowed, any_order)
        if found is None:
            return None
        fits.append(found)
        size = float(torch.linalg.vector_norm(total))
        larger = sum(float(torch.linalg.vector_norm(x)) for x in terms) / size if size else 1.0
        errors.append(found.error / max(1.0, larger))
    return None if fits and _leaves_out(fits, allowed) else max(errors, default=None)
