"""The general translation between two grids of ranks (SUPER, IPDPS 2021, section IV): point-to-point messages.

For layouts that no segmented collective fits: from one distribution of a tensor over an axis's ranks to another. Both
are a `RowLayout`, the box of the tensor that each rank holds; a message is what a sender's and a receiver's box have in
common. What several ranks hold of the source are summands, what several want of the target are copies. So the reverse
translation is the backward pass, and the paper's four steps are four pairs of layouts:

| step   | source                        | target                        | backward |
|--------|-------------------------------|-------------------------------|----------|
| split  | rows on some ranks            | all rows on every rank        | sum      |
| sum    | all rows on every rank, added | rows on some ranks            | split    |
| slice  | rows on some ranks            | all rows of a part of a dim   | concat   |
| concat | all rows of a part of a dim   | rows on some ranks            | slice    |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from meshwright.compute.parameters.shard import Box
from meshwright.ranks.collectives import cross, here
from meshwright.ranks.comm import Comm
from meshwright.ranks.mesh import Mesh

RowLayout = tuple[Box, ...]
"""The box of a tensor that each rank of an axis holds, in some of its dims; the other dims are whole."""


@dataclass(frozen=True)
class Transfer:
    """`box` of the whole tensor goes from one rank of the axis to another, or stays where it is."""

    sender: int
    receiver: int
    box: Box


def plan_translation(source: RowLayout, target: RowLayout) -> tuple[Transfer, ...]:
    """The messages of a translation, by receiver, then by sender; a rank's own part is one to itself."""
    return tuple(
        Transfer(sender, receiver, box)
        for receiver, wanted in enumerate(target)
        for sender, held in enumerate(source)
        if (box := held.intersection(wanted)) is not None
    )


def intervals(lengths: Sequence[int]) -> tuple[range, ...]:
    """Ranges of these lengths, one behind the other: (2, 3) -> 0..2, 2..5."""
    return tuple(range(stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True))


def nearly_even(length: int, holders: range, size: int) -> tuple[range, ...]:
    """0..length over those of an axis's `size` ranks that are `holders`, the first ones with one more; else nothing."""
    least, more = divmod(length, len(holders))
    counts = [least + (holder < more) for holder in range(len(holders))]
    return intervals([counts[rank - holders.start] if rank in holders else 0 for rank in range(size)])


def moved(x: Tensor, comm: Comm, source: RowLayout, target: RowLayout, dims: Sequence[int] = (0,)) -> Tensor:
    """This rank's box of the target. `x`: its box of the source; `dims`: the dims of x that boxes speak of, in order.

    Ranks meet in pairs: in turn k, i and k - i modulo n, who both know what they have for each other. So one that waits
    waits for a turn that is not later than its own, and no cycle forms, however the transport sends.
    """
    mine, wanted = source[comm.index], target[comm.index]
    # Both layouts are known to every rank, so nobody is asked who sends what.
    messages = plan_translation(source, target)
    sent = {message.receiver: message.box for message in messages if message.sender == comm.index}
    due = {message.sender: message.box for message in messages if message.receiver == comm.index}
    outgoing = {peer: _part(x, box.within(mine), dims).contiguous() for peer, box in sent.items()}
    incoming = {
        # What stays on the rank is no message.
        peer: outgoing[peer] if peer == comm.index else x.new_empty(_shape(x, box, dims))
        for peer, box in due.items()
    }
    for turn in range(comm.size):
        peer = (turn - comm.index) % comm.size
        if peer != comm.index:
            # Both have the same plan, so both make the same call: an exchange, or one sends and one receives.
            ours, theirs = outgoing.get(peer), incoming.get(peer)
            if ours is not None and theirs is not None:
                comm.exchange(ours, peer, theirs, peer)
            elif ours is not None:
                comm.send(ours, peer)
            elif theirs is not None:
                comm.receive(theirs, peer)
    result = x.new_zeros(_shape(x, wanted, dims))
    for peer, box in due.items():  # in rank order: a sum that is the same every time
        _part(result, box.within(wanted), dims).add_(incoming[peer])
    return result


def _part(x: Tensor, box: Box, dims: Sequence[int]) -> Tensor:
    for dim, offset, length in zip(dims, box.offsets, box.lengths, strict=True):
        x = x.narrow(dim, offset, length)
    return x


def _shape(x: Tensor, box: Box, dims: Sequence[int]) -> list[int]:
    shape = list(x.shape)
    for dim, length in zip(dims, box.lengths, strict=True):
        shape[dim] = length
    return shape


def translate(
    x: Tensor, mesh: Mesh, axis: str, source: RowLayout, target: RowLayout, dims: tuple[int, ...] = (0,)
) -> Tensor:
    """This rank's box of the target, of its box x of the source. Backward: the reverse translation."""
    comm = mesh.comm(axis)
    # Summands and copies change places on the way back: the adjoint of a sum is a copy.
    return cross(
        x,
        lambda x: here(moved(x, comm, source, target, dims)),
        lambda gradient: here(moved(gradient, comm, target, source, dims)),
    )


class Translated:
    """A segment (segment.py) by messages: for rows on any ranks of it, and parts of any widths.

    `num_rows`: B. `holders`: the ranks that hold the rows outside of branches. `shares`: by rank, its part of a dim
    that is sliced or joined, in any unit.
    """

    def __init__(self, mesh: Mesh, axis: str, num_rows: int, holders: range, shares: Sequence[int]) -> None:
        self.mesh = mesh
        self.axis = axis
        self.num_rows = num_rows
        self.shares = tuple(shares)
        held = nearly_even(num_rows, holders, mesh.size(axis))
        self.outside: RowLayout = tuple(Box((rows.start,), (len(rows),)) for rows in held)
        self.inside: RowLayout = (Box((0,), (num_rows,)),) * mesh.size(axis)

    def enter(self, x: Tensor) -> Tensor:
        """All rows of those that ranks hold: [b, ...] -> [B, ...]."""
        return translate(x, self.mesh, self.axis, self.outside, self.inside)

    def leave(self, x: Tensor) -> Tensor:
        """The sum of every rank's x, rows where they belong: [B, ...] -> [b, ...]."""
        return translate(x, self.mesh, self.axis, self.inside, self.outside)

    def slice(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part along `dim`, of all rows: [b, ..., N] -> [B, ..., N_c]."""
        rows, parts = self._layouts(x.shape[dim] // sum(self.shares))
        return translate(x, self.mesh, self.axis, rows, parts, (0, dim))

    def concat(self, x: Tensor, dim: int) -> Tensor:
        """The ranks' parts side by side, rows where they belong: [B, ..., N_c] -> [b, ..., N]."""
        rows, parts = self._layouts(x.shape[dim] // self.shares[self.mesh.index(self.axis)])
        return translate(x, self.mesh, self.axis, parts, rows, (0, dim))

    def _layouts(self, unit: int) -> tuple[RowLayout, RowLayout]:
        """Rows of whole width; all rows of parts. `unit`: elements of a share."""
        widths = [share * unit for share in self.shares]
        # Widths are of this tensor: shares are in any unit, and a slice and a concat may be of unlike widths.
        rows = tuple(Box((*box.offsets, 0), (*box.lengths, sum(widths))) for box in self.outside)
        parts = tuple(Box((0, part.start), (self.num_rows, len(part))) for part in intervals(widths))
        return rows, parts
