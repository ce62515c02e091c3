"""Sums of integers by pieces: each rank sums one piece of a bucket, converts the piece to float32, and sends floats.

Used if a sum begins when waited for (`Comm.begins_when_waited_for`): no backward pass hides the message then, and 12
bytes an element are sent and copied instead of the 16 of an all-reduce of int64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compute.parameters.bucket import Bucket
from meshwright.compute.parameters.fixed import FixedPoint, floats_in
from meshwright.ranks.comm import Comm, Work


class Pieces:
    """A bucket's integers [n], of which each rank of `comm` sums n / size elements."""

    def __init__(self, bucket: Bucket, comm: Comm) -> None:
        self.integers, self.comm = bucket.gradients, comm
        length = len(self.integers) // comm.size
        self.piece = slice(comm.index * length, (comm.index + 1) * length)
        """The elements that this rank sums."""

    def reduce(self) -> Work:
        """Begin the sum of this rank's piece."""
        return self.comm.reduce_scatter(self.integers[self.piece], self.integers, wait=False)

    def gather(self, fixed: FixedPoint) -> None:
        """Convert the summed piece to float32, and receive the other ranks' pieces."""
        values, piece = floats_in(self.integers), fixed.to_floats(self.integers[self.piece])
        if piece.data_ptr() != values[self.piece].data_ptr():
            values[self.piece].copy_(piece)
        self.comm.all_gather(values, values[self.piece])


def pieces_of(bucket: Bucket, comm: Comm) -> Pieces | None:
    """Return the pieces of a bucket of int64 sums of float32, if sums of `comm` begin when waited for; else None."""
    integers = floats_in(bucket.gradients).dtype == torch.float32 != bucket.gradients.dtype
    return Pieces(bucket, comm) if comm.begins_when_waited_for and integers else None


def convert(fixed: FixedPoint, total: Tensor, pieces: Pieces | None) -> None:
    """Convert a bucket's sum of integers to floats: `total`, this rank's part, or the whole bucket by pieces."""
    if pieces is None:
        fixed.to_floats(total)
    else:
        pieces.gather(fixed)
