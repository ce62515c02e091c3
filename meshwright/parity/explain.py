"""Explains the ranks' tensors by the reference's: copies of it, cuts, partial sums, or none of these.

| explanation | the ranks hold                                                    |
|-------------|-------------------------------------------------------------------|
| copy        | the reference's tensor, each                                      |
| cut         | a block of it, or some of its slices along one dim                |
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

from meshwright.parity.parts import Part, box_candidates

COPY, CUT, PARTIAL, WRONG = "copy", "cut", "partial", "wrong"

MOST_SLICES = 4096
"""The most slices among which the nearest is searched."""


@dataclass(frozen=True)
class Explanation:
    """`error`: relative, of the best explanation. `axis`: over which partial sums are added. `rank`: the worst."""

    kind: str
    error: float
    allowed: float
    axis: str = ""
    factor: float | None = None
    rank: int = 0

    @property
    def explained(self) -> bool:
        return self.kind != WRONG


@dataclass(frozen=True)
class Fit:
    """How well one local tensor is a piece of the reference's. `piece`: the reference's values there."""

    error: float
    piece: Tensor
    whole: bool


def fit(local: Tensor, whole: Tensor, allowed: float) -> Fit | None:
    """The best fit of a local tensor among the copy, blocks and slices of the whole; None where no shape fits."""
    best: Fit | None = None
    for view in _views(local, whole):
        for piece in _pieces(local, view):
            scale = float(torch.linalg.vector_norm(view)) * math.sqrt(local.numel() / max(1, view.numel()))
            difference = float(torch.linalg.vector_norm(local - piece))
            error = difference / scale if scale else difference
            if best is None or not error >= best.error:
                best = Fit(error, piece, local.shape == view.shape)
            if error <= allowed:
                return best
    return best


def _views(local: Tensor, whole: Tensor) -> Iterator[Tensor]:
    """The reference's tensor with batch and sequence in their order, swapped, or flattened into one dim."""
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


def _pieces(local: Tensor, whole: Tensor) -> Iterator[Tensor]:
    """Candidates for what a local tensor is: all, blocks, and the nearest slices along the one dim that is cut."""
    cut = [dim for dim in range(whole.ndim) if local.shape[dim] != whole.shape[dim]]
    if not cut:
        yield whole
        return
    for part in box_candidates("", local.shape, whole.shape, cut):
        yield part.take(whole)
    if len(cut) == 1 and local.shape[cut[0]] < whole.shape[cut[0]] <= MOST_SLICES:
        mine, theirs = (x.movedim(cut[0], 0).flatten(1) if x.ndim > 1 else x[:, None] for x in (local, whole))
        nearest = tuple(torch.cdist(mine, theirs).argmin(1).tolist())
        yield Part("", tuple(nearest if dim == cut[0] else None for dim in range(whole.ndim))).take(whole)
    if len(cut) == 1 and local.shape[cut[0]] > whole.shape[cut[0]]:  # a padded vocabulary
        rows = whole.shape[cut[0]]
        yield torch.cat([whole, local.narrow(cut[0], rows, local.shape[cut[0]] - rows)], cut[0])


def explain_tensors(
    locals_: Mapping[int, Tensor], whole: Tensor, allowed: float, coordinates: Sequence[Mapping[str, int]]
) -> Explanation:
    """Explain what the ranks hold. `coordinates`: each rank's place on every axis."""
    fits = {rank: fit(x, whole, allowed) for rank, x in locals_.items()}
    errors = {rank: math.inf if f is None else f.error for rank, f in fits.items()}
    worst = max(errors, key=lambda rank: (errors[rank] != errors[rank], errors[rank]))
    if all(error <= allowed for error in errors.values()):
        kind = COPY if all(f is not None and f.whole for f in fits.values()) else CUT
        return Explanation(kind, errors[worst], allowed, rank=worst)
    for axes in _subsets(coordinates):
        error = _sum_error(locals_, whole, allowed, coordinates, axes)
        if error is not None and error <= allowed:
            return Explanation(PARTIAL, error, allowed, "+".join(axes), rank=worst)
    found = fits[worst]
    factor = None if found is None else factor_of(locals_[worst], found.piece)
    return Explanation(WRONG, errors[worst], allowed, factor=factor, rank=worst)


def factor_of(ours: Tensor, theirs: Tensor, tolerance: float = 1e-2) -> float | None:
    """The number by which ours is theirs; None where it is not a multiple of it."""
    a, b = ours.double().flatten(), theirs.double().flatten()
    size = float(b @ b)
    if not size or not bool(torch.isfinite(a).all()):
        return None
    factor = float(a @ b) / size
    rest = float(torch.linalg.vector_norm(a - factor * b))
    return factor if rest <= tolerance * abs(factor) * math.sqrt(size) else None


def _subsets(coordinates: Sequence[Mapping[str, int]]) -> list[tuple[str, ...]]:
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
    axes: Sequence[str],
) -> float | None:  # fmt: skip
    """The error of the sums over some axes as pieces of the whole; None where they have other shapes.

    Terms may be larger than their sum, and so is what rounding does to it.
    """
    errors = []
    for group in groups_over(coordinates, axes):
        terms = [locals_[rank] for rank in group if rank in locals_]
        if len(terms) < len(group) or len({x.shape for x in terms}) > 1:
            return None
        total = torch.stack(terms).sum(0)
        found = fit(total, whole, allowed)
        if found is None:
            return None
        size = float(torch.linalg.vector_norm(total))
        larger = sum(float(torch.linalg.vector_norm(x)) for x in terms) / size if size else 1.0
        errors.append(found.error / max(1.0, larger))
    return max(errors)
