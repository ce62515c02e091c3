"""A pair of linears with the inner width sharded over an axis (Megatron-LM, arXiv 1909.08053, section 3).

p: the axis's size. A `Boundary` says how activations enter and leave the pair.

| layer    | input        | weight          | output            | forward sends | backward sends |
|----------|--------------|-----------------|-------------------|---------------|----------------|
| expand   | [B, T, H]    | [H, G, N/G/p]   | [B, T, G, N/G/p]  | enter         | leave (dx), enter (x, unless kept) |
| of heads that are shared (copies.py) | [H, (G + 2) E] | [B, T, (G/c + 2) E] | enter | the same |
| contract | [B, T, N/p]  | [N/p, H]        | [B, T, H]         | leave         | enter (dy)     |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.parameters.role import BIAS
from meshwright.compute.parameters.shard import (
    UNPLACED,
    ZEROS,
    Initial,
    Placements,
    Shard,
    ShardSpec,
)
from meshwright.compute.tensor.boundary import Boundary
from meshwright.compute.tensor.linear import cast
from meshwright.compute.tensor.products import PLAIN, LinearLayer, Products, add_gradients
from meshwright.ranks.collectives import Moving, here
from meshwright.ranks.mesh import Mesh


class _Expand(torch.autograd.Function):
    """y = x W + b with W cut by columns; x enters the pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: CutExpand) -> Tensor:
        boundary = layer.boundary
        whole = boundary.start_enter(x).wait()  # [B, T, H]
        saved = whole if boundary.keeps else x
        ctx.save_for_backward(saved if ctx.needs_input_grad[1] else None, weight)
        ctx.layer, ctx.bias = layer, bias
        return layer.product(whole, weight, bias).view(*whole.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        layer: CutExpand = ctx.layer
        boundary, products = layer.boundary, layer.products
        entering: Moving | None = None
        if ctx.needs_input_grad[1]:  # the gradient of a frozen weight, the only reader of x, is not computed
            entering = here(x) if boundary.keeps else layer.gradients.start(lambda: boundary.start_enter(x))
        incoming = products.read(dy)  # x enters under dx's products
        leaving: Moving | None = None
        if ctx.needs_input_grad[0]:  # patches of pictures need no gradient
            dx = layer.input_gradient(incoming, weight).view(*dy.shape[:-1], -1)
            leaving = boundary.start_leave(dx)  # under dW's product
        dbias = dweight = None
        if entering is not None:
            dweight = layer.add_weight_gradients(weight, entering.wait, incoming)
        if ctx.bias is not None:
            dbias = add_gradients(layer, "bias", ctx.bias, products.bias_gradients(incoming))
        return None if leaving is None else leaving.wait().to(dy.dtype), dweight, dbias, None


class _Contract(torch.autograd.Function):
    """y = sum over ranks of x W, + b, with W cut by rows; y leaves the pair."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: CutContract) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.layer, ctx.bias, ctx.shape = layer, bias, x.shape
        term = layer.products.forward(x, weight).view(*x.shape[:-1], -1)  # [B, T, H], one of the sum's
        y = layer.boundary.start_leave(term).wait().to(x.dtype)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        layer: CutContract = ctx.layer
        products = layer.products
        dy = dy.contiguous()
        entering = layer.boundary.start_enter(dy)  # under db's sum
        dbias = incoming = None
        if ctx.bias is not None:
            between = products.between
            incoming = between.read(dy)
            dbias = add_gradients(layer, "bias", ctx.bias, between.bias_gradients(incoming))
        whole = entering.wait()
        if incoming is None or whole is not dy or between != products:  # the read form is of other rows
            incoming = products.read(whole)
        dweight = add_gradients(layer, "weight", weight, products.weight_gradients(lambda: x, incoming))
        return products.input_gradient(incoming, weight).view(ctx.shape), dweight, dbias, None


class CutExpand(LinearLayer):
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
        products: Products = PLAIN,
        copies: int = 1,
        rows: Placements = UNPLACED,
    ) -> None:
        """`copies`: ranks that hold the same columns (copies.py). `rows`: placements of the weight's rows, if an axis
        cuts these too."""
        super().__init__(mesh)
        self.boundary, self.products = boundary, products
        last = len(outputs) - 1
        placements = {axis: Shard(shard.dim, copies) for axis, shard in boundary.inner(last + 1).items()}
        self.weight = self.declare("weight", ShardSpec((inputs, *outputs), {**rows, **placements}, initial))
        placements = {axis: Shard(shard.dim, copies) for axis, shard in boundary.inner(last).items()}
        spec = ShardSpec(outputs, placements, ZEROS, BIAS)
        self.bias = self.declare("bias", spec) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        y: Tensor = _Expand.apply(*cast(x, self.weight.flatten(1), bias), self)
        return y.unflatten(-1, self.weight.shape[1:]) if self.weight.dim() > 2 else y

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return x W + b of the whole x [B, T, H], as `Products.forward`. `weight`: this rank's, flattened."""
        return self.products.forward(x, weight, bias)

    def input_gradient(self, dy: Any, weight: Tensor) -> Tensor:
        """Return dy Wᵀ, as `Products.input_gradient`. `dy`: the result of `Products.read`."""
        return self.products.input_gradient(dy, weight)

    def add_weight_gradients(self, weight: Tensor, x: Callable[[], Tensor], dy: Any) -> Tensor | None:
        """Add xᵀ dy to the gradient of the weight. `x`: returns the whole x [B, T, H] when a gradient is due."""
        return add_gradients(self, "weight", weight, self.products.weight_gradients(x, dy))


class CutContract(LinearLayer):
    """The second linear of a pair. The bias is added once, to the sum, on ranks that hold the result."""

    def __init__(
        self, mesh: Mesh, inputs: int, outputs: int, initial: Initial, boundary: Boundary, *, bias: ShardSpec | None,
        products: Products = PLAIN,
    ) -> None:  # fmt: skip
        super().__init__(mesh)
        self.boundary, self.products = boundary, products
        self.weight = self.declare("weight", ShardSpec((inputs, outputs), boundary.inner(0), initial))
        self.bias = self.declare("bias", bias) if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.boundary.holds else None
        y: Tensor = _Contract.apply(*cast(x, self.weight, bias), self)
        return y
