"""Kinds: how a rank's tensor is part of the value that all ranks of an axis hold together.

| word     | ranks of the axis hold                                     | a sum over the axis gives             |
|----------|------------------------------------------------------------|---------------------------------------|
| whole    | the same                                                   | n times the value: refused            |
| cut      | parts along a dim, one after the other                     | a sum of different parts: refused     |
| partial  | addends: their sum is the value                            | the value, whole                      |
| own      | something each, which no rule tells more of                | taken for the value                   |
| unknown  | what came by a message from one rank to another            | taken for the value                   |

A tensor made of numbers alone (zeros, a mask) is `constant`: it is whole, cut and partial as one likes. A parameter
that an axis does not cut is *invariant* over it: whole, and its gradient has to be whole as well when the optimizer
reads it.

A dim is a row of factors, the outermost first: [B, A] of which data cuts B and tensor A is one dim [B·A] of two factors
when they are flattened, and two dims again afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

Axes = frozenset[str]
NONE: Axes = frozenset()

Factor = tuple[int, Axes]
"""A part of a dim: its length on this rank, and the axes that cut it."""

Dim = tuple[Factor, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """A tensor over each axis; over one that is not named it is whole."""

    dims: tuple[Dim, ...]
    partial: Axes = NONE
    own: Axes = NONE
    unknown: Axes = NONE
    constant: bool = False
    since: str = field(default="", compare=False)
    """The module in which it became partial."""

    @property
    def cut(self) -> Axes:
        return NONE.union(*(axes for dim in self.dims for _, axes in dim))

    @property
    def different(self) -> Axes:
        """The axes whose ranks hold other numbers."""
        return self.cut | self.partial | self.own | self.unknown

    def word(self, axis: str) -> str:
        """The axis's word of the table."""
        sets = {"partial": self.partial, "own": self.own, "unknown": self.unknown, "cut": self.cut}
        return next((word for word, axes in sets.items() if axis in axes), "whole")

    def loosened(self, axes: Iterable[str]) -> Kind:
        """The kind with these axes `own`, but those that are unknown already."""
        gone = frozenset(axes)
        if not gone:
            return self
        dims = tuple(tuple((size, held - gone) for size, held in dim) for dim in self.dims)
        return replace(
            self, dims=dims, partial=self.partial - gone, own=self.own | (gone - self.unknown), constant=False
        )

    def settled(self, axes: Iterable[str]) -> Kind:
        """The kind with these axes whole."""
        if self.constant:
            return self
        gone = frozenset(axes)
        loose = self.loosened(gone)
        return replace(loose, own=loose.own - gone, unknown=loose.unknown - gone)

    def shaped(self, shape: Sequence[int]) -> Kind:
        """The kind of another shape: what cut a dim is `own`."""
        return replace(self.loosened(self.cut), dims=uncut(shape))


def uncut(shape: Sequence[int]) -> tuple[Dim, ...]:
    return tuple(((size, NONE),) for size in shape)


def constant(shape: Sequence[int]) -> Kind:
    return Kind(uncut(shape), constant=True)


def axes_of(dim: Dim) -> Axes:
    return NONE.union(*(axes for _, axes in dim))


def length(dim: Dim) -> int:
    return math.prod(size for size, _ in dim)


def shortened(dim: Dim, size: int) -> Dim:
    """A dim of another length, with the same cuts; a length of 1 has none."""
    if length(dim) == size:
        return dim
    return ((size, axes_of(dim) if size > 1 else NONE),)


def cut_at(kind: Kind, position: int, axis: str) -> Kind:
    """The kind, whose dim at the position the axis cuts as well."""
    (size, axes), *inner = kind.dims[position]
    dims = [*kind.dims]
    dims[position] = ((size, axes | {axis}), *inner)
    return replace(kind, dims=tuple(dims), constant=False)


def aligned(one: Dim, other: Dim) -> Dim | None:
    """Two dims of one length, cut by the axes of both; None where their factors do not fit."""
    if not axes_of(one):
        return other
    if not axes_of(other) or one == other:
        return one
    if axes_of(one) == axes_of(other) and 1 in (len(one), len(other)):
        return max(one, other, key=len)  # of the one it is not known which factor is cut
    if [size for size, _ in one] != [size for size, _ in other]:
        return None
    return tuple((size, axes | more) for (size, axes), (_, more) in zip(one, other, strict=True))


def reshaped(kind: Kind, shape: Sequence[int]) -> Kind:
    """The same elements in another shape. Where a factor is split the axes cut its outermost part: a rank holds a run
    of heads, and each of them whole. A new dim of length 1 before a cut one may be such a run, of one head: own."""
    waiting = [factor for dim in kind.dims for factor in dim]
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
                return kind.shaped(shape)
            if length > left:  # the rest is the next dims'
                waiting.insert(0, (length // left, NONE))
                length = left
            if length > 1 or axes or size == 1:
                taken.append((length, axes))
            left //= length
        if left != 1:
            return kind.shaped(shape)
        dims.append(tuple(taken) or ((size, NONE),))
    # Dims of length 1 that the shape has no place for.
    lost = lost.union(*(axes for _, axes in waiting))
    return replace(kind, dims=tuple(dims)).loosened(lost)


def broadcast(kinds: Sequence[Kind], shape: Sequence[int]) -> tuple[tuple[Dim, ...], Axes]:
    """The dims of what element-wise operators make of tensors, and the axes whose cuts do not fit each other."""
    dims, lost = [], NONE
    for back in range(len(shape), 0, -1):
        found: Dim = ((shape[-back], NONE),)
        for kind in kinds:
            dim = kind.dims[-back] if back <= len(kind.dims) else ((1, NONE),)
            if math.prod(size for size, _ in dim) != shape[-back]:
                lost |= axes_of(dim) if shape[-back] else NONE
                continue
            both = aligned(found, dim)
            lost |= axes_of(dim) | axes_of(found) if both is None else NONE
            found = both or found
        dims.append(found)
    seen: Axes = NONE
    for dim in dims:
        # Over one axis two dims cannot be cut: a rank then has a block of the diagonal.
        lost |= axes_of(dim) & seen
        seen |= axes_of(dim)
    return tuple(dims), lost


def joined(kinds: Sequence[Kind], dims: tuple[Dim, ...], lost: Axes = NONE, partial: Axes = NONE) -> Kind:
    """A kind of these dims that differs where one of several does. `partial`: the axes over which it is a sum's
    addend; what one of them has of its own, none is sure of."""
    own = NONE.union(lost, *(kind.own for kind in kinds))
    unknown = NONE.union(*(kind.unknown for kind in kinds))
    loose = own | unknown
    dims = tuple(tuple((size, axes - loose) for size, axes in dim) for dim in dims)
    # A cut that only some dims of the inputs had, and the result has not, is not forgotten.
    return Kind(dims, partial - loose, own - unknown, unknown, all(kind.constant for kind in kinds))
