"""How activations cross into a pair of linears that is cut over an axis, and out of it again.

How 1-D tensor parallelism holds activations between two pairs of linears: whole on every rank, or cut by sequence.

| form  | activation between pairs | into a pair              | out of a pair                        |
|-------|--------------------------|--------------------------|--------------------------------------|
| whole | [B, T, H]                | as it is                 | all-reduce                           |
| cut   | [B, T/tensor, H]         | all-gather along T       | reduce-scatter along T               |

Going back, gradients enter and leave a pair as activations do. The cut form moves the same bytes as the whole one, but
for an all-gather of the pair's input that the backward pass does again instead of keeping it.
(Megatron-LM: arXiv 1909.08053; sequence parallelism: Korthikanti et al., arXiv 2205.05198.)
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from meshwright.bits.blocks import start_tree_all_reduce, start_tree_reduce_scatter
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


class Boundary(Protocol):
    """How activations enter a pair and leave it: Megatron's f and g. Here for 1-D, in subgraph/segment.py for branches.

    `start_*` are for layers that write their own backward, `enter` and `leave` for others. `axis`: cuts the pair.
    `keeps`: the whole activation is kept for the backward pass, where it would have to travel again.
    `holds`: this rank holds activations outside of the pair, and what belongs to them: the bias behind the sum.
    """

    axis: str
    split_axes: tuple[str, ...]
    keeps: bool
    holds: bool

    def start_enter(self, x: Tensor) -> Moving:
        """The whole activation [B, T, H] of what a rank holds of it."""

    def start_leave(self, x: Tensor) -> Moving:
        """This rank's part of the sum of every rank's x [B, T, H]; x is overwritten."""

    def enter(self, x: Tensor) -> Tensor:
        """Like start_enter, differentiable."""

    def leave(self, x: Tensor) -> Tensor:
        """Like start_leave, differentiable; x is kept."""


SEQUENCE = -2
"""The dim of T in [B, T, H] and in [T, H]."""


class Sequence(Boundary, Protocol):
    """One of the two forms."""

    def part(self, x: Tensor) -> Tensor:
        """This rank's part of x [B, T, H], which every rank has whole and which needs no gradient."""


class WholeSequence:
    """Every rank holds all tokens. `by_tree`: sums have the order of a balanced tree (bits/blocks.py). `enter` and
    `leave` need none: with it they only add zeros."""

    axis = "tensor"
    split_axes: tuple[str, ...] = ()
    keeps = False
    holds = True

    def __init__(self, mesh: Mesh, *, by_tree: bool = False) -> None:
        self.mesh = mesh
        self.start_sum = start_tree_all_reduce if by_tree else start_all_reduce

    def start_enter(self, x: Tensor) -> Moving:
        return here(x)

    def start_leave(self, x: Tensor) -> Moving:
        return self.start_sum(x, self.mesh.comm("tensor"))

    def enter(self, x: Tensor) -> Tensor:
        return all_reduce_gradient(x, self.mesh, "tensor")

    def leave(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.mesh, "tensor")

    def part(self, x: Tensor) -> Tensor:
        return x


class CutSequence:
    """Rank r holds the r-th part of each sequence's tokens."""

    axis = "tensor"
    split_axes: tuple[str, ...] = ("tensor",)
    keeps = False
    holds = True

    def __init__(self, mesh: Mesh, *, by_tree: bool = False) -> None:
        self.mesh = mesh
        self.start_sum = start_tree_reduce_scatter if by_tree else start_reduce_scatter

    def start_enter(self, x: Tensor) -> Moving:
        return start_all_gather(x, self.mesh.comm("tensor"), SEQUENCE)

    def start_leave(self, x: Tensor) -> Moving:
        return self.start_sum(x, self.mesh.comm("tensor"), SEQUENCE)

    def enter(self, x: Tensor) -> Tensor:
        return all_gather(x, self.mesh, "tensor", SEQUENCE)

    def leave(self, x: Tensor) -> Tensor:
        return reduce_scatter(x, self.mesh, "tensor", SEQUENCE)

    def part(self, x: Tensor) -> Tensor:
        return x.chunk(self.mesh.size("tensor"), SEQUENCE)[self.mesh.index("tensor")]
