"""A pair of linears whose inner width is cut over an axis (Megatron-LM, arXiv 1909.08053, section 3).

p: the axis's size. How activations enter and leave the pair is a `Boundary`'s business.

| layer    | input        | weight          | output            | forward sends | backward sends |
|----------|--------------|-----------------|-------------------|---------------|----------------|
| expand   | [B, T, H]    | [H, G, N/G/p]   | [B, T, G, N/G/p]  | enter         | leave (dx), enter (x, unless kept) |
| of heads that are shared (copies.py) | [H, (G + 2) E] | [B, T, (G/c + 2) E] | enter | the same |
| contract | [B, T, N/p]  | [N/p, H]        | [B, T, H]         | leave         | enter (dy)     |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.parameters.shard import ZEROS, Initial, Shard, ShardedModule, ShardSpec
from meshwright.ranks.collectives import here
from meshwright.ranks.mesh import Mesh
from meshwright.tensor.boundary import Boundary
from meshwright.tensor.copies import ALL_COLUMNS, Columns
from meshwright.tensor.linear import bias_gradient, cast, weight_gradient, write_product


class _Expand(torch.autograd.Function):
    """y = x W + b with W cut by columns; x enters the pair."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: CutExpand, boundary: Boundary
    ) -> Tensor:
        whole = boundary.start_enter(x).wait()  # [B, T, H]
        ctx.save_for_backward(whole if boundary.keeps else x, weight)
        ctx.layer, ctx.boundary, ctx.biased = layer, boundary, bias is not None
        rows, own = whole.flatten(0, -2), layer.columns.of(weight)
        y = rows @ own if bias is None else torch.addmm(layer.columns.of(bias), rows, own)
        return y.view(*whole.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        boundary: Boundary = ctx.boundary
        columns: Columns = ctx.layer.columns
        entering = here(x) if boundary.keeps else ctx.layer.gradients.start(lambda: boundary.start_enter(x))
        rows = dy.flatten(0, -2)  # x enters under dx's product
        dx = (rows @ columns.of(weight).t()).view(*dy.shape[:-1], -1)
        leaving = boundary.start_leave(dx)  # under dW's product

        def write(out: Tensor, beta: int) -> None:
            write_product(out, entering.wait().flatten(0, -2).t(), rows, beta)

        dweight = ctx.layer.add_gradient("weight", weight, columns.write(write))
        dbias = bias_gradient(rows, ctx.layer, columns) if ctx.biased else None
        return leaving.wait(), dweight, dbias, None, None


class _Contract(torch.autograd.Function):
    """y = sum over ranks of x W, + b, with W cut by rows; y leaves the pair."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ShardedModule, boundary: Boundary
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.boundary, ctx.biased = layer, boundary, bias is not None
        part = (x.flatten(0, -2) @ weight).view(*x.shape[:-1], -1)  # [B, T, H], one of the sum's terms
        y = boundary.start_leave(part).wait()
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        entering = ctx.boundary.start_enter(dy)  # under db's sum
        dbias = bias_gradient(dy.flatten(0, -2), ctx.layer) if ctx.biased else None
        whole = entering.wait().flatten(0, -2)
        dweight = weight_gradient(x.flatten(0, -2), whole, weight, ctx.layer)
        return (whole @ weight.t()).view(x.shape), dweight, dbias, None, None


class CutExpand(ShardedModule):
    """The first linear of a pair."""

    def __init__(
        self,
        mesh: Mesh,
        inputs: int,
        outputs: tuple[int, ...],
        initial: Initial,
        boundary: Boundary,
        *,
        bias: bool,
        columns: Columns = ALL_COLUMNS,
    ) -> None:
        super().__init__(mesh)
        self.boundary, self.columns = boundary, columns
        last, copies = len(outputs) - 1, columns.copies
        placements = {boundary.axis: Shard(last + 1, copies)}
        self.weight = self.declare("weight", ShardSpec((inputs, *outputs), placements, initial))
        spec = ShardSpec(outputs, {boundary.axis: Shard(last, copies)}, ZEROS, matrix=False)
        self.bias = self.declare("bias", spec) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        y: Tensor = _Expand.apply(*cast(x, self.weight.flatten(1), bias), self, self.boundary)
        return y.unflatten(-1, self.weight.shape[1:]) if self.weight.dim() > 2 else y


class CutContract(ShardedModule):
    """The second linear of a pair. Its bias is added once, to the sum, where it is held."""

    def __init__(
        self, mesh: Mesh, inputs: int, outputs: int, initial: Initial, boundary: Boundary, *, bias: ShardSpec | None
    ) -> None:
        super().__init__(mesh)
        self.boundary = boundary
        self.weight = self.declare("weight", ShardSpec((inputs, outputs), {boundary.axis: Shard(0)}, initial))
        self.bias = self.declare("bias", bias) if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.boundary.holds else None
        y: Tensor = _Contract.apply(*cast(x, self.weight, bias), self, self.boundary)
        return y
