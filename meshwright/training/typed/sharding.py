"""Shardings: the relation of a rank's tensor to the value that all ranks of an axis hold together.

| word     | ranks of the axis hold                                     | a sum over the axis gives             |
|----------|------------------------------------------------------------|---------------------------------------|
| whole    | equal values                                               | n times the value: refused            |
| cut      | parts along a dim, one after the other                     | a sum of different parts: refused     |
| partial  | addends: their sum is the value                            | the value, whole                      |
| varying  | different values without a known relation                  | taken for the value                   |
| unknown  | values received point to point                             | taken for the value                   |

A tensor filled with numbers (zeros, a mask) is `constant` and fits every word. A parameter that an axis does not cut is
*invariant* over the axis: whole, and the gradient must be whole as well when the optimizer reads it.

A dim is a row of factors, the outermost first. If `data` cuts B and `tensor` cuts A, flattening [B, A] gives one dim
[B·A] of two factors, and a later reshape can separate the factors again.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

Axes = frozenset[str]
NONE: Axes = frozenset()

Factor = tuple[int, Axes]
"""A part of a dim: the length on this rank, and the axes that cut this part."""

Dim = tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """A tensor's relation to each axis; over an axis in none of the fields the tensor is whole."""

    dims: tuple[Dim, ...]
    partial: Axes = NONE
    varying: Axes = NONE
    unknown: Axes = NONE
    constant: bool = False
    since: str = field(default="", compare=False)
    """The module that made the tensor partial."""

    @property
    def cut(self) -> Axes:
        return axes_of(*self.dims)

    def word(self, axis: str) -> str:
        """Return the table's word for an axis."""
        sets = {"partial": self.partial, "varying": self.varying, "unknown": self.unknown, "cut": self.cut}
        return next((word for word, axes in sets.items() if axis in axes), "whole")

    def loosened(self, axes: Iterable[str]) -> Sharding:
        """Return the sharding with these axes `varying`; axes that are `unknown` stay so."""
        gone = frozenset(axes)
        if not gone:
            return self
        dims = tuple(tuple((size, held - gone) for size, held in dim) for dim in self.dims)
        return replace(
            self, dims=dims, partial=self.partial - gone, varying=self.varying | (gone - self.unknown), constant=False
        )

    def settled(self, axes: Iterable[str]) -> Sharding:
        """Return the sharding with these axes whole."""
        if self.constant:
            return self
        gone = frozenset(axes)
        loose = self.loosened(gone)
        return replace(loose, varying=loose.varying - gone, unknown=loose.unknown - gone)

    def shaped(self, shape: Sequence[int]) -> Sharding:
        """Return the sharding with another shape; axes that cut a dim become `varying`."""
        return replace(self.loosened(self.cut), dims=uncut(shape))


def uncut(shape: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(((size, NONE),) for size in shape)


def axes_of(*dims: Dim) -> Axes:
    """Return the axes that cut any of the dims."""
    return NONE.union(*(axes for dim in dims for _, axes in dim))


def length(dim: Dim) -> int:
    return math.prod(size for size, _ in dim)


def cut_at(sharding: Sharding, position: int, axis: str) -> Sharding:
    """Return the sharding with the dim at `position` cut by `axis` as well."""
    (size, axes), *inner = sharding.dims[position]
    dims = [*sharding.dims]
    dims[position] = ((size, axes | {axis}), *inner)
    return replace(sharding, dims=tuple(dims), constant=False)


def aligned(left: Dim, right: Dim) -> Dim | None:
    """Return a dim cut by the axes of both of two dims of equal length; None if the factors do not match."""
    if not axes_of(left):
        return right
    if not axes_of(right) or left == right:
        return left
    if axes_of(left) == axes_of(right) and 1 in (len(left), len(right)):
        return max(left, right, key=len)  # the unfactored dim does not show which factor is cut
    if [size for size, _ in left] != [size for size, _ in right]:
        return None
    return tuple((size, axes | more) for (size, axes), (_, more) in zip(left, right, strict=True))


def reshaped(sharding: Sharding, shape: Sequence[int]) -> Sharding:
    """Return the sharding of the same elements in another shape.

    Splitting a factor leaves the cut at the outermost part: a rank holds a run of heads, each head whole. A new dim of
    length 1 before a cut factor may be such a run of one head; the axes of that factor become `varying`.
    """
    waiting = [factor for dim in sharding.dims for factor in dim]
    dims: list[Dim] = []
    lost = NONE
    for size in shape:
        taken: list[Factor] = []
        left = size
        if size == 1 and waiting and waiting[0][0] != 1:
            lost |= waiting[0][1]
        while waiting and (left > 1 or (waiting[0][0] == 1 and not taken)):
            length, axes = waiting.pop(0)
            if left % length and length % left:
                return sharding.shaped(shape)
            if length > left:  # the next dims take the rest
                waiting.insert(0, (length // left, NONE))
                length = left
            if length > 1 or axes or size == 1:
                taken.append((length, axes))
            left //= length
        if left != 1:
            return sharding.shaped(shape)
        dims.append(tuple(taken) or ((size, NONE),))
    # Dims of length 1 that the shape does not have.
    return replace(sharding, dims=tuple(dims)).loosened(lost | axes_of(tuple(waiting)))


def broadcast(shardings: Sequence[Sharding], shape: Sequence[int]) -> tuple[tuple[Dim, ...], Axes]:
    """Return the dims of an element-wise operator's result, and the axes that cut the inputs differently."""
    dims, lost = [], NONE
    for back in range(len(shape), 0, -1):
        result: Dim = ((shape[-back], NONE),)
        for sharding in shardings:
            dim = sharding.dims[-back] if back <= len(sharding.dims) else ((1, NONE),)
            if length(dim) != shape[-back]:
                lost |= axes_of(dim) if shape[-back] else NONE
                continue
            both = aligned(result, dim)
            lost |= axes_of(dim, result) if both is None else NONE
            result = both or result
        dims.append(result)
    seen: Axes = NONE
    for dim in dims:
        # One axis cannot cut two dims: the rank would hold a block of the diagonal.
        lost |= axes_of(dim) & seen
        seen |= axes_of(dim)
    return tuple(dims), lost


def joined(shardings: Sequence[Sharding], dims: tuple[Dim, ...], lost: Axes = NONE, partial: Axes = NONE) -> Sharding:
    """Return the sharding of an operator's result with these dims. `partial`: axes with addends on the ranks; `lost`:
    axes that become `varying`. Axes that are `varying` or `unknown` in an input are so in the result."""
    varying = NONE.union(lost, *(sharding.varying for sharding in shardings))
    unknown = NONE.union(*(sharding.unknown for sharding in shardings))
    loose = varying | unknown
    dims = tuple(tuple((size, axes - loose) for size, axes in dim) for dim in dims)
    return Sharding(dims, partial - loose, varying - unknown, unknown, all(sharding.constant for sharding in shardings))
