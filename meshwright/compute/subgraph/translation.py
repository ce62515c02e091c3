"""The general translation between two grids of ranks (SUPER, IPDPS 2021, section IV): point-to-point messages.

A translation takes a tensor from one distribution over an axis's ranks to another, for layouts without a segmented
collective. A distribution is a `RowLayout`: each rank's box of the tensor. A message is the intersection of a sender's
and a receiver's box. Elements in several source boxes are summed; elements in several target boxes are copied. The
backward pass is therefore the reverse translation, and the paper's four steps are four pairs of layouts:

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
"""The box of each rank of an axis, in some dims of a tensor; the other dims are whole."""


@dataclass(frozen=True)
class Transfer:
    """A message with `box` of the whole tensor, from one rank of the axis to another or to itself."""

    sender: int
    receiver: int
    box: Box


def plan_translation(source: RowLayout, target: RowLayout) -> tuple[Transfer, ...]:
    """List the messages of a translation, by receiver, then by sender; includes a rank's messages to itself."""
    return tuple(
        Transfer(sender, receiver, box)
        for receiver, wanted in enumerate(target)
        for sender, held in enumerate(source)
        if (box := held.intersection(wanted)) is not None
    )


def intervals(lengths: Sequence[int]) -> tuple[range, ...]:
    """Make consecutive ranges of these lengths: (2, 3) -> 0..2, 2..5."""
    return tuple(range(stop - length, stop) for length, stop in zip(lengths, accumulate(lengths), strict=True))


def nearly_even(length: int, holders: range, size: int) -> tuple[range, ...]:
    """Cut 0..length over the `holders` of an axis's `size` ranks; the first holders may have one more, other ranks have
    none."""
    least, more = divmod(length, len(holders))
    counts = [least + (holder < more) for holder in range(len(holders))]
    return intervals([counts[rank - holders.start] if rank in holders else 0 for rank in range(size)])


def moved(x: Tensor, comm: Comm, source: RowLayout, target: RowLayout, dims: Sequence[int] = (0,)) -> Tensor:
    """Translate a tensor.

    In turn k the ranks i and k - i (modulo n) exchange messages. A waiting rank waits for a turn that is not later than
    its own, so no cycle forms under any transport.

    Args:
        x: This rank's box of the source.
        comm: The axis's comm.
        source, target: The two layouts.
        dims: The dims of x that the boxes cut, in order.

    Returns:
        This rank's box of the target.
    """
    mine, wanted = source[comm.index], target[comm.index]
    # Every rank knows both layouts, so ranks need no agreement on messages.
    messages = plan_translation(source, target)
    sent = {message.receiver: message.box for message in messages if message.sender == comm.index}
    due = {message.sender: message.box for message in messages if message.receiver == comm.index}
    outgoing = {peer: _part(x, box.within(mine), dims).contiguous() for peer, box in sent.items()}
    incoming = {
        # A rank's message to itself is not sent.
        peer: outgoing[peer] if peer == comm.index else x.new_empty(_shape(x, box, dims))
        for peer, box in due.items()
    }
    for turn in range(comm.size):
        peer = (turn - comm.index) % comm.size
        if peer != comm.index:
            # Both ranks have the same plan: they exchange, or one sends and the other receives.
            ours, theirs = outgoing.get(peer), incoming.get(peer)
            if ours is not None and theirs is not None:
                comm.exchange(ours, peer, theirs, peer)
            elif ours is not None:
                comm.send(ours, peer)
            elif theirs is not None:
                comm.receive(theirs, peer)
    result = x.new_zeros(_shape(x, wanted, dims))
    for peer, box in due.items():  # in rank order, so that sums have the same bits in each run
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
    """Translate x, differentiably; the backward pass is the reverse translation."""
    comm = mesh.comm(axis)
    # The adjoint of a sum is a copy, and the reverse.
    return cross(
        x,
        lambda x: here(moved(x, comm, source, target, dims)),
        lambda gradient: here(moved(gradient, comm, target, source, dims)),
    )


class Translated:
    """A segment (segment.py) by messages, for rows on any ranks and parts of any widths."""

    def __init__(self, mesh: Mesh, axis: str, num_rows: int, holders: range, shares: Sequence[int]) -> None:
        """Make the segment of a rank.

        Args:
            mesh: The rank's mesh.
            axis: The segment's axis.
            num_rows: B.
            holders: Ranks with rows outside of branches.
            shares: Each rank's part of a sliced or concatenated dim, in any unit.
        """
        self.mesh = mesh
        self.axis = axis
        self.num_rows = num_rows
        self.shares = tuple(shares)
        held = nearly_even(num_rows, holders, mesh.size(axis))
        self.outside: RowLayout = tuple(Box((rows.start,), (len(rows),)) for rows in held)
        self.inside: RowLayout = (Box((0,), (num_rows,)),) * mesh.size(axis)

    def enter(self, x: Tensor) -> Tensor:
        """Gather all rows: [b, ...] -> [B, ...]."""
        return translate(x, self.mesh, self.axis, self.outside, self.inside)

    def leave(self, x: Tensor) -> Tensor:
        """Sum all ranks' x, each row on its holder: [B, ...] -> [b, ...]."""
        return translate(x, self.mesh, self.axis, self.inside, self.outside)

    def slice(self, x: Tensor, dim: int) -> Tensor:
        """Get this rank's part along `dim`, of all rows: [b, ..., N] -> [B, ..., N_c]."""
        rows, parts = self._layouts(x.shape[dim] // sum(self.shares))
        return translate(x, self.mesh, self.axis, rows, parts, (0, dim))

    def concat(self, x: Tensor, dim: int) -> Tensor:
        """Concatenate all ranks' parts along `dim`, each row on its holder: [B, ..., N_c] -> [b, ..., N]."""
        rows, parts = self._layouts(x.shape[dim] // self.shares[self.mesh.index(self.axis)])
        return translate(x, self.mesh, self.axis, parts, rows, (0, dim))

    def _layouts(self, unit: int) -> tuple[RowLayout, RowLayout]:
        """Return the layouts of whole rows and of parts; `unit`: elements of a share."""
        # Shares are in any unit, and a slice and a concat may have different widths.
        widths = [share * unit for share in self.shares]
        rows = tuple(Box((*box.offsets, 0), (*box.lengths, sum(widths))) for box in self.outside)
        parts = tuple(Box((0, interval.start), (self.num_rows, len(interval))) for interval in intervals(widths))
        return rows, parts
