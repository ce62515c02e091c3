"""Boundaries: the collectives of activations at the two ends of a pair of linears that an axis shards.

Between two pairs of linears, activations are whole on every rank of the axis, or sharded along a dim:

| form  | activation between pairs                               | into a pair          | out of a pair            |
|-------|--------------------------------------------------------|----------------------|--------------------------|
| uncut | [B, T, H], one rank                                    | identity             | identity                 |
| whole | [B, T, H] on every rank: 1-D                           | identity             | all-reduce               |
| cut   | [B, T/tensor, H]: 1-D, cut by sequence; [b, T, H/col]: 2-D | all-gather (dim) | reduce-scatter (dim)     |

Sub-graphs shard rows, or keep all rows on one rank (subgraph/segment.py). In the backward pass gradients cross a pair
in the opposite direction with the same collectives. Cut by sequence sends the same bytes as whole, except that the
backward pass gathers the pair's input again instead of keeping it.
(Megatron-LM: arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198.)

An activation that all heads share, such as a rotary key (multi-head latent attention, arXiv 2405.04434, section 2.1.2),
enters branches without a linear: by the boundary, then as a copy for each head of a rank (`start_copies`). The gradient
is summed over the heads of all ranks (arithmetic.py).
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
    """The collectives at the two ends of a pair, Megatron's f and g. The base class is the form `uncut`.

    `start_*` are for layers with a handwritten backward pass, `enter` and `leave` for others.
    """

    axis: str = ""
    """The axis that shards the pair; "": no axis."""
    split_axes: tuple[str, ...] = ()
    """The axes with different parts of an activation on each rank, between pairs."""
    keeps: bool = False
    """True: the whole activation is kept for the backward pass. False: it is gathered again."""
    holds: bool = True
    """True if this rank holds activations outside of the pair, and hence the bias that is added to the sum."""

    def start_enter(self, x: Tensor) -> Moving:
        """Begin to gather the whole activation [B, T, H] from the parts of all ranks."""
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
    """All ranks' x [B, t, n] in the order of tokens, differentiable. All ranks continue with the same result."""

    def inner(self, dim: int) -> Placements:
        """Return the placements of a parameter with `dim` sharded like the inner width."""
        return {self.axis: Shard(dim)} if self.axis else {}


UNCUT = Boundary()


@dataclass
class WholeActivations(Boundary):
    """The form `whole`: every rank of the axis holds the whole activation.

    `in_order`: sums have the order of a balanced tree (ranks/trees.py). `enter` and `leave` need no order, since their
    sums with `in_order` only add zeros.
    """

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
    """The form `cut`: rank r of the axis holds part r of an activation along `dim`. `in_order`: as above."""

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
        # A sum of parts padded with zeros. The gradient is then whole on every rank, and each rank takes one part.
        size, index, count = self.mesh.size(self.axis), self.mesh.index(self.axis), x.shape[self.dim]
        room = (*(0, 0) * (-1 - self.dim), index * count, (size - 1 - index) * count)
        return all_reduce(F.pad(x, room), self.mesh, self.axis)


def start_copies(x: Tensor, heads: int, boundary: Boundary) -> Moving:
    """Begin to gather x [B, t, N], sharded as between pairs, and copy it for this rank's heads: [B, T, heads, N]."""
    entering = boundary.start_enter(x)
    return Moving(entering.work, lambda: entering.result().unsqueeze(2).expand(-1, -1, heads, -1))
