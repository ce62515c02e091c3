"""Common layers between branches, on ranks with rows and on ranks without.

Under D&SP-cSub the first rank of a segment computes the common layers alone. The other ranks declare the same
parameters without rows and pass activations [0, T, H] through the layers, so all ranks call each split and join in both
passes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.shard import Initial, ShardedModule
from meshwright.compute.subgraph.segment import Segment
from meshwright.compute.tensor.cross_entropy import Objective
from meshwright.compute.tensor.linear import autocast_dtype
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.compute.tensor.serial import SerialLinear


class _Common(ShardedModule):
    """A layer on the rows of a segment's rank.

    Attributes:
        joins: Whether the input is concatenated from the ranks' slices, [B, T, N/g] -> [b, T, N].
        slices: Whether the output is cut along the width, one slice for each rank, [b, T, N] -> [B, T, ..., N/g].
    """

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
        """Return the layer's output for x [0, T, N]: no rows, of the weight's width."""
        # A function of x, since the backward pass must reach the next split on this rank too: other ranks wait there.
        nothing = x.sum(-1)[..., *[None] * len(width)].expand(*x.shape[:-1], *width)
        return nothing.to(autocast_dtype(x) or x.dtype)  # the product's dtype, which the next split sends


class CommonLinear(_Common, SerialLinear):
    """x W + b on ranks with rows."""

    def __init__(
        self, segment: Segment, inputs: int, outputs: tuple[int, ...], initial: Initial, *, bias: bool,
        products: Products = PLAIN, joins: bool = False, slices: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(segment.mesh, inputs, outputs, initial, bias=bias, products=products)
        self.segment, self.joins, self.slices = segment, joins, slices
        self.set_owner(segment.owner)

    def of_no_rows(self, x: Tensor, *width: int) -> Tensor:
        if len(width) == 1:  # ranks that share a key-value head have a copy each; groups are not cut
            width = (self.products.outputs_of(width[0]),)
        return super().of_no_rows(x, *width)


class Absent(ShardedModule):
    """A layer without rows, owned by another rank."""

    def __init__(self, layer: ShardedModule) -> None:
        """Declare the parameters of `layer`, which has an owner."""
        super().__init__(layer.mesh)
        for name, spec in layer.specs.items():
            self.declare(name, spec)


class AbsentNorm(Absent):
    """[0, T, H] -> [0, T, H]."""

    def forward(self, h: Tensor) -> Tensor:
        return h


class AbsentTable(Absent):
    """Map ids [0, T] or patches [0, T, P] to [0, T, H], a leaf of the graph; map positions [T] to zeros."""

    def forward(self, x: Tensor) -> Tensor:
        table = self.get_parameter("weight")
        # Ids have no gradient, so the graph of a rank without a table begins with these zeros.
        return table.new_zeros(*x.shape[:2], table.shape[-1]).requires_grad_(torch.is_grad_enabled())


class AbsentHead(Absent):
    """A head without tokens: the loss is 0, and the backward pass of this rank begins here."""

    def forward(self, h: Tensor, labels: Tensor, scale: float | Objective) -> Tensor:
        # The sum of no elements is 0, with a gradient of no rows.
        return scale(h.flatten(1).sum(1)) if callable(scale) else h.sum()

    def num_correct(self, h: Tensor, labels: Tensor) -> Tensor:
        return torch.zeros((), dtype=torch.int64, device=h.device)
