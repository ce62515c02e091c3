"""Common layers, between branches: on a rank that holds rows, and on one that holds none.

Where the first rank of a segment alone computes the common layers (D&SP-cSub), the others declare their parameters too,
with no rows, and carry activations [0, T, H] through them: in both passes they come by every split and join.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.shard import Initial, ShardedModule
from meshwright.compute.subgraph.segment import Segment
from meshwright.compute.tensor.linear import autocast_dtype
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.compute.tensor.serial import SerialLinear


class _Common(ShardedModule):
    """A layer on the rows that ranks of a segment hold. `joins`: its input is the ranks' slices side by side,
    [B, T, N/g] -> [b, T, N]; `slices`: its output is cut along its width, a slice to each rank, [b, T, N] ->
    [B, T, ..., N/g]."""

    weight: nn.Parameter
    segment: Segment
    joins: bool = False
    slices: bool = False

    def forward(self, x: Tensor) -> Tensor:
        if self.joins:
            x = self.segment.concat(x, -1)
        y: Tensor = super().forward(x) if self.segment.holds else self.of_no_rows(x, *self.weight.shape[1:])
        return self.segment.slice(y, -1) if self.slices else y

    def of_no_rows(self, x: Tensor, *width: int) -> Tensor:
        """The output that a layer whose weight has rows of this width makes of x [0, T, N]."""
        # Of no rows, but a function of x: the backward pass must come by here on this rank, since a collective waits
        # for it on the next split.
        nothing = x.sum(-1)[..., *[None] * len(width)].expand(*x.shape[:-1], *width)
        return nothing.to(autocast_dtype(x) or x.dtype)  # as the product, which a split behind it sends


class CommonLinear(_Common, SerialLinear):
    """x W + b where x is held."""

    def __init__(
        self, segment: Segment, inputs: int, outputs: tuple[int, ...], initial: Initial, *, bias: bool,
        products: Products = PLAIN, joins: bool = False, slices: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(segment.mesh, inputs, outputs, initial, bias=bias, products=products)
        self.segment, self.joins, self.slices = segment, joins, slices
        self.set_owner(segment.owner)

    def of_no_rows(self, x: Tensor, *width: int) -> Tensor:
        if len(width) == 1:  # parts that share a key-value head have a copy each; groups are whole
            width = (self.products.outputs_of(width[0]),)
        return super().of_no_rows(x, *width)


class Absent(ShardedModule):
    """A layer that lives on another rank: maps no rows to no rows."""

    def __init__(self, layer: ShardedModule) -> None:
        """`layer`: whose owner is set."""
        super().__init__(layer.mesh)
        for name, spec in layer.specs.items():
            self.declare(name, spec)


class AbsentNorm(Absent):
    """[0, T, H] -> [0, T, H]."""

    def forward(self, h: Tensor) -> Tensor:
        return h


class AbsentTable(Absent):
    """Ids [0, T] or patches [0, T, P] -> [0, T, H], where gradients begin that end here. (Positions [T] -> zeros.)"""

    def forward(self, x: Tensor) -> Tensor:
        table = self.get_parameter("weight")
        # H follows B and T. Ids have no gradient: the graph of a rank without a table begins with these zeros.
        return table.new_zeros(*x.shape[:2], table.shape[-1]).requires_grad_(torch.is_grad_enabled())


class AbsentHead(Absent):
    """A head without tokens: a loss of 0, from which this rank's backward pass begins."""

    def forward(self, h: Tensor, labels: Tensor, scale: float) -> Tensor:
        # A sum of nothing is 0, and has a gradient of no rows to begin with.
        return h.sum()

    def num_correct(self, h: Tensor, labels: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=h.device)
