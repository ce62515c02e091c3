"""How activations cross into a pair of linears that is cut over an axis, and out of it again.

How a kit holds activations between two pairs of linears: whole on every rank of the axis, or cut along a dim of them.

| form  | activation between pairs                               | into a pair          | out of a pair            |
|-------|--------------------------------------------------------|----------------------|--------------------------|
| uncut | [B, T, H], of one rank                                 | as it is             | as it is                 |
| whole | [B, T, H] on every rank: 1-D                           | as it is             | all-reduce               |
| cut   | [B, T/tensor, H]: 1-D, cut by sequence; [b, T, H/col]: 2-D | all-gather along it | reduce-scatter along it |

Sub-graphs cut rows, or leave them to one rank (subgraph/segment.py). Going back, gradients enter and leave a pair as
activations do. Cut by sequence moves the same bytes as whole, but for an all-gather of the pair's input that the
backward pass does again instead of keeping it.
(Megatron-LM: arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198.)

What all heads share comes into branches by no linear: a rotary key (multi-head latent attention, arXiv 2405.04434,
section 2.1.2). It enters as activations do, and each head of a rank gets a copy (`start_copies`); its gradient is the
sum over the heads of all ranks, which leaves (arithmetic.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from meshwright.compute.parameters.shard import Placements, Shard
from meshwright.ranks.collectives import (
    Moving,
    all_gather,
    all_reduce,
    all_reduce_gradient,
    here,
    reduce_scatter,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.trees import start_tree_all_reduce, start_tree_reduce_scatter


class Boundary:
    """How activations enter a pair and leave it, Megatron's f and g; by itself one that no axis cuts.

    `start_*` are for layers that write their own backward, `enter` and `leave` for others. `axis`: cuts the pair; "" if
    none does. `split_axes`: the axes whose ranks hold different parts of an activation between pairs. `keeps`: the
    whole activation is kept for the backward pass instead of being gathered again. `holds`: this rank holds activations
    outside of the pair, hence also the bias added to the sum.
    """

    axis: str = ""
    split_axes: tuple[str, ...] = ()
    keeps: bool = False
    holds: bool = True

    def start_enter(self, x: Tensor) -> Moving:
        """Begin to make the whole activation [B, T, H] from this rank's part."""
        return here(x)

    start_leave = start_enter
    """Begin to sum every rank's x [B, T, H] and return this rank's part; x is contiguous, and overwritten."""

    def enter(self, x: Tensor) -> Tensor:
        """Like start_enter, differentiable."""
        return x

    leave = enter
    """Like start_leave, differentiable; x is kept."""

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of x, a whole tensor without a gradient."""
        return x

    whole = part
    """Every rank's x [B, t, n] in the order of tokens, differentiable; all ranks continue with the same result."""

    def inner(self, dim: int) -> Placements:
        """The placements of a parameter whose `dim` is cut like the inner width."""
        return {self.axis: Shard(dim)} if self.axis else {}


UNCUT = Boundary()


@dataclass
class WholeActivations(Boundary):
    """Every rank of the axis holds the whole activation. `in_order`: sums in the order of a balanced tree
    (ranks/trees.py); `enter` and `leave` need no order, since with `in_order` they only add zeros."""

    mesh: Mesh
    axis: str
    in_order: bool = False

    def start_leave(self, x: Tensor) -> Moving:
        start_sum = start_tree_all_reduce if self.in_order else start_all_reduce
        return start_sum(x, self.mesh.comm(self.axis))

    def enter(self, x: Tensor) -> Tensor:
        return all_reduce_gradient(x, self.mesh, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.mesh, self.axis)


SEQUENCE, HIDDEN = -2, -1
"""The dims of T and H in [B, T, H] and in [T, H]."""


class CutActivations(Boundary):
    """Rank r of the axis holds the r-th part of an activation along `dim`. `in_order`: as above."""

    def __init__(self, mesh: Mesh, axis: str, dim: int, *, in_order: bool = False) -> None:
        self.mesh, self.axis, self.dim = mesh, axis, dim
        self.split_axes = (axis,)
        self.start_sum = start_tree_reduce_scatter if in_order else start_reduce_scatter

    def start_enter(self, x: Tensor) -> Moving:
        return start_all_gather(x, self.mesh.comm(self.axis), self.dim)

    def start_leave(self, x: Tensor) -> Moving:
        return self.start_sum(x, self.mesh.comm(self.axis), self.dim)

    def enter(self, x: Tensor) -> Tensor:
        return all_gather(x, self.mesh, self.axis, self.dim)

    def leave(self, x: Tensor) -> Tensor:
        return reduce_scatter(x, self.mesh, self.axis, self.dim)

    def part(self, x: Tensor) -> Tensor:
        return x.chunk(self.mesh.size(self.axis), self.dim)[self.mesh.index(self.axis)]

    def whole(self, x: Tensor) -> Tensor:
        # Each rank's part among zeros, summed: the gradient is whole on every rank, which takes its part.
        size, index, count = self.mesh.size(self.axis), self.mesh.index(self.axis), x.shape[self.dim]
        room = (*(0, 0) * (-1 - self.dim), index * count, (size - 1 - index) * count)
        return all_reduce(F.pad(x, room), self.mesh, self.axis)


def start_copies(x: Tensor, heads: int, boundary: Boundary) -> Moving:
    """Begin to make a copy of x, held as between pairs, for each of this rank's `heads`: [B, T, heads, N]."""
    entering = boundary.start_enter(x)
    return Moving(entering.work, lambda: entering.result().unsqueeze(2).expand(-1, -1, heads, -1))
