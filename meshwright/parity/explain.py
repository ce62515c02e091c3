"""Explains the ranks' tensors by the reference's: copies of it, cuts, partial sums, or none of these.

| explanation | the ranks hold                                                    |
|-------------|-------------------------------------------------------------------|
| copy        | the reference's tensor, each                                      |
| cut         | a block of it, or two along a dim; or its slices along one dim    |
| partial     | terms whose sum over an axis is the reference's, or a cut of it   |
| wrong       | something else; `factor` where it is the reference's times that   |
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
"""The most slices among which the nearest one is searched."""


@dataclass(frozen=True)
class Explanation:
    """`error`: relative, of the best explanation. `axis`: over which partial sums are added. `rank`: the worst.

    `leaves_out`: every rank has a cut, and slices of the reference are on no rank.
    """

    kind: str
    error: float
    allowed: float
    axis: str = ""
    factor: float | None = None
    rank: int = 0
    leaves_out: bool = False

    @property
    def explained(self) -> bool:
        return self.kind != WRONG


@dataclass(frozen=True)
class Fit:
    """How well one local tensor is a piece of the reference's: `part` of `view`, whose values are `piece`."""

    error: float
    piece: Tensor
    part: Part
    view: Tensor


def fit(local: Tensor, whole: Tensor, allowed: float, any_order: bool = False) -> Fit | None:
    """The best fit of a local tensor among the copy, blocks and slices of the whole; None where no shape fits.

    `allowed`: the relative error, in the 2-norm, at which the search ends. `any_order`: rows may lie otherwise.
    """
    best: Fit | None = None
    for view in _views(local, whole):
        # The norm of a piece of this size of an evenly distributed tensor: a piece of small values is not measured by
        # its own small norm.
        scale = float(torch.linalg.vector_norm(view)) * math.sqrt(local.numel() / max(1, view.numel()))
        for part in _candidates(local, view, any_order):
            piece = part.take(view)
            difference = float(torch.linalg.vector_norm(local - piece))
            error = difference / scale if scale else difference
            if best is None or not error >= best.error:
                best = Fit(error, piece, part, view)
            # Take the first that fits: candidates go from simple to contrived.
            if error <= allowed:
                return best
    return best


def _views(local: Tensor, whole: Tensor) -> Iterator[Tensor]:
    """The reference's tensor with batch and sequence in their order, swapped, or flattened into one dim."""
    # [B, T, H] of one framework is [T, B, H] of Megatron, and [B * T, H] where heads or experts take tokens.
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
    """Parts that a local tensor may be: all, blocks, and blocks of slices, the nearest along one of the cut dims."""
    cut = [dim for dim in range(whole.ndim) if local.shape[dim] != whole.shape[dim]]
    if not cut:
        yield Part("", (None,) * whole.ndim)
        if not any_order:
            return
    if any_order and 0 not in cut:
        cut = [0, *cut]
    # Blocks are few, and found without distances; slices cost a matrix of distances per cut dim.
    yield from _blocks(local, whole, cut)
    for dim in cut:
        longest = whole.shape[dim] if any_order else whole.shape[dim] - 1
        if not 0 < local.shape[dim] <= longest < MOST_SLICES:
            continue
        for block in _blocks(local, whole, [d for d in cut if d != dim]):
            mine, theirs = (x.movedim(dim, 0).reshape(x.shape[dim], -1) for x in (local, block.take(whole)))
            # By distance and not by equality: outputs are off by rounding, other than first weights.
            nearest = tuple(torch.cdist(mine, theirs).argmin(1).tolist())
            yield Part("", tuple(nearest if d == dim else index for d, index in enumerate(block.index)))


def _blocks(local: Tensor, whole: Tensor, cut: Sequence[int]) -> Iterator[Part]:
    """Blocks of a local shape along the dims `cut`, and blocks that are two along one of them: the k-th from the
    beginning and the k-th from the end, of half the length, as a ring's ranks share a causal sequence."""
    yield from box_candidates("", local.shape, whole.shape, cut)
    for dim in cut:
        half, ranks = local.shape[dim] // 2, whole.shape[dim] // max(1, local.shape[dim])
        if half == 0 or whole.shape[dim] != 2 * half * ranks or ranks == 1:
            continue
        for block in box_candidates("", local.shape, whole.shape, [d for d in cut if d != dim]):
            for k in range(ranks):
                # Rank k of a causal ring has pieces k and 2 * ranks - 1 - k, which evens out the work under the mask.
                ends = tuple(half * at + i for at in (k, 2 * ranks - 1 - k) for i in range(half))
                yield Part("", tuple(ends if d == dim else index for d, index in enumerate(block.index)))


def _leaves_out(fits: Sequence[Fit], allowed: float) -> bool:
    """Whether the ranks' cuts together lack slices of the reference's that are like none that they have."""
    view = fits[0].view
    for dim in range(view.ndim):
        if any(f.view.shape != view.shape or f.part.index[dim] is None for f in fits):
            continue
        covered = sorted({i for f in fits for i in f.part.index[dim] or ()})
        rest = sorted(set(range(view.shape[dim])) - set(covered))
        if rest:
            slices = view.movedim(dim, 0).reshape(view.shape[dim], -1)
            # Equal slices, such as rows of padding, may be left out: another like them is there.
            nearest = torch.cdist(slices[rest], slices[covered]).min(1).values
            size = float(torch.linalg.vector_norm(slices)) / math.sqrt(len(slices))
            if bool((nearest > max(allowed, 1e-3) * size).any()):
                return True
    return False


def explain_tensors(
    locals_: Mapping[int, Tensor], whole: Tensor, allowed: float, coordinates: Sequence[Mapping[str, int]], *,
    any_order: bool = False, equal_terms: bool = True,
) -> Explanation:  # fmt: skip
    """Explain what the ranks hold. `coordinates`: each rank's place on every axis. `any_order`: of rows. `equal_terms`:
    a sum may be of equal terms; else these are the whole divided by their number."""
    fits = {rank: fit(x, whole, allowed, any_order) for rank, x in locals_.items()}
    errors = {rank: math.inf if f is None else f.error for rank, f in fits.items()}
    # (True, nan) sorts above every (False, number): not-a-number is the worst.
    worst = max(errors, key=lambda rank: (errors[rank] != errors[rank], errors[rank]))
    if all(error <= allowed for error in errors.values()):
        good = [f for f in fits.values() if f is not None]
        if all(f.part.whole for f in good):
            return Explanation(COPY, errors[worst], allowed, rank=worst)
        if not _leaves_out(good, allowed):
            return Explanation(CUT, errors[worst], allowed, rank=worst)
        return Explanation(WRONG, 1.0, allowed, rank=worst, leaves_out=True)
    # Look for a sum only if the tensors by themselves explain nothing.
    terms = list(locals_.values())
    equal = len({x.shape for x in terms}) == 1 and all(torch.allclose(x, terms[0], rtol=1e-9) for x in terms)
    for axes in axis_subsets(coordinates) if equal_terms or not equal else ():
        error = _sum_error(locals_, whole, allowed, coordinates, axes, any_order)
        if error is not None and error <= allowed:
            return Explanation(PARTIAL, error, allowed, "+".join(axes), rank=worst)
    found = fits[worst]
    factor = None if found is None else factor_of(locals_[worst], found.piece)
    # Of a factor near 1 all but a little of the error must be its own.
    if factor is not None and found is not None and abs(factor - 1) <= 0.1:
        factor = factor_of(locals_[worst], found.piece, 0.1 * abs(factor - 1))
    return Explanation(WRONG, errors[worst], allowed, factor=factor, rank=worst)


def axis_subsets(coordinates: Sequence[Mapping[str, int]]) -> list[tuple[str, ...]]:
    """Sets of axes with more than one rank, the smaller first."""
    axes = [axis for axis in coordinates[0] if len({place[axis] for place in coordinates}) > 1]
    return list(chain.from_iterable(combinations(axes, n) for n in range(1, len(axes) + 1)))


def groups_over(coordinates: Sequence[Mapping[str, int]], axes: Sequence[str]) -> list[list[int]]:
    """The ranks that differ only in their places on some axes."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(coordinates):
        groups.setdefault(tuple(i for axis, i in place.items() if axis not in axes), []).append(rank)
    return list(groups.values())


def _sum_error(
    locals_: Mapping[int, Tensor], whole: Tensor, allowed: float, coordinates: Sequence[Mapping[str, int]],
    axes: Sequence[str], any_order: bool,
) -> float | None:  # fmt: skip
    """The error of the sums over some axes as pieces of the whole; None where they have other shapes, or where all
    sums together lack slices of it.

    Terms may be larger than their sum, and so is what rounding does to it.
    """
    errors, fits = [], []
    for group in groups_over(coordinates, axes):
        terms = [locals_[rank] for rank in group if rank in locals_]
        if not terms:
            continue  # a stage of a pipeline that has not the module
        # A group of which a rank lacks its term has no sum: the rank that is missing would count as zero.
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
