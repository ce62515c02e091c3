"""Linears and look-ups that add gradients of parameters directly into the buckets.

A linear is x W + b with weights stored as [in, out], so that the weight gradient xᵀ dy has the layout of the weight.

forward:  y  = x W + b        [B·T, out]
backward: dx = dy Wᵀ          [B·T, in]
          dW = xᵀ dy          [in, out], added in the parameter's gradient memory in the bucket, if there is a bucket
          db = sum of dy      [out], likewise

A look-up reads rows of a table:

forward:  y = table[ids]             [B, T, H]
backward: dtable[ids] += dy          [V, H], in the table's gradient memory. After the first microbatch only the rows
                                     of `ids` are written; torch's embedding allocates and adds a whole table each time
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.compute.parameters.shard import ShardedModule, ShardSpec
from meshwright.compute.parameters.writes import RowGradient
from meshwright.compute.precision import DTYPES
from meshwright.compute.tensor.products import PLAIN, Products, add_gradients, write_part
from meshwright.ranks.collectives import start_all_reduce

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.ranks.mesh import Mesh

Addends = Callable[[Tensor, Tensor], Iterable[tuple[Tensor, Tensor]]]
"""addends(ids, dy): the ids and rows of dy of each addend of a table's gradient."""


class _EachUse(torch.autograd.Function):
    """A layer's parameter `weight`, copied for each use: [uses, ...]. Each copy's gradient is a separate addend."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, layer: Local) -> Tensor:
        ctx.layer = layer
        return weight.repeat(layer.uses, *[1] * weight.dim())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        addends = (partial(write_part, rows) for rows in gradient)
        return add_gradients(ctx.layer, "weight", gradient[0], addends), None


class Local(ShardedModule):
    """A parameter `weight`, sharded by a spec: a table of attention biases by head, or grouped convolution kernels."""

    in_graphs = True

    def __init__(self, mesh: Mesh, spec: ShardSpec, uses: int = 1) -> None:
        """Make the parameter. `uses`: number of copies that `forward` returns, each with a separate addend."""
        super().__init__(mesh)
        self.weight, self.uses = self.declare("weight", spec), uses

    def forward(self) -> Tensor:
        """Return the weight; [uses, ...] if there are several uses."""
        if self.uses == 1:
            return self.weight
        copies: Tensor = _EachUse.apply(self.weight, self)
        return copies


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ShardedModule, products: Products
    ) -> Tensor:
        # A frozen weight's gradient, the only product that reads x, is not computed.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.layer, ctx.bias, ctx.products, ctx.form = layer, bias, products, (x.shape, x.dtype)
        return products.forward(x, weight, bias).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        products, layer, dbias, dx = ctx.products, ctx.layer, None, None
        dy = products.read(dy)
        dweight = add_gradients(layer, "weight", weight, products.weight_gradients(lambda: x, dy))
        if ctx.bias is not None:
            dbias = add_gradients(layer, "bias", ctx.bias, products.bias_gradients(dy))
        if ctx.needs_input_grad[0]:
            shape, dtype = ctx.form
            dx = products.input_gradient(dy, weight).view(shape).to(dtype)
        return dx, dweight, dbias, None, None


def sum_over_rows(layer: nn.Module, x: Tensor) -> Tensor:
    """Sum x, without a gradient, over the ranks that hold other rows of the layer's weight [I, ..., N]."""
    if isinstance(layer, ShardedModule):
        for axis, shard in layer.specs["weight"].placements.items():
            x = start_all_reduce(x, layer.mesh.comm(axis)).wait() if shard.dim == 0 else x
    return x


def autocast_device(device: torch.device) -> str:
    """Return the device type for autocast of tensors on `device`.

    torch has no autocast for meta tensors, so these use the CPU's. A plan then casts meta tensors as the planned device
    would (on_device.py).
    """
    return "cpu" if device.type == "meta" else device.type


def autocasts_of(config: Config, mesh: Mesh) -> tuple[str, torch.dtype] | None:
    """Return (device type, dtype) of autocast under O1; else None."""
    return (autocast_device(mesh.device), DTYPES[config.precision.dtype]) if config.precision.level == "O1" else None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return autocast's dtype for products of x; None if autocast is off."""
    device = autocast_device(x.device)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the operands, cast to autocast's dtype if autocast is on."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weight, bias
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: ShardedModule, products: Products = PLAIN
) -> Tensor:  # fmt: skip
    """Compute x W + b, in autocast's dtype if autocast is on.

    Args:
        x: [B, ..., in].
        weight: [in, out], the layer's parameter `weight` or a view.
        bias: [out], the layer's parameter `bias` or a view, or None.
        layer: the owner of the parameters.
        products: multiplies.

    Returns: [B, ..., out].
    """
    x, weight, bias = cast(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, layer, products)
    return y.view(*x.shape[:-1], products.outputs_of(weight.shape[1]))


def at_once(ids: Tensor, dy: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """Return one addend of a table's gradient: all ids and all rows."""
    return ((ids, dy),)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, layer: ShardedModule, addends: Addends) -> Tensor:
        ctx.save_for_backward(ids)  # not the weight: zero3 may have freed it before the backward pass
        ctx.layer, ctx.addends = layer, addends
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        layer: ShardedModule = ctx.layer
        device = layer.mesh.device_type
        writes = (RowGradient(row_ids, rows, device) for row_ids, rows in ctx.addends(ids, dy))
        return None, add_gradients(layer, "weight", layer.get_parameter("weight"), writes), None, None


def lookup(ids: Tensor, layer: ShardedModule, addends: Addends = at_once) -> Tensor:
    """Return rows [..., T, H] of the layer's `weight` [V, H] at ids [..., T]. The gradient is the sum of `addends`."""
    y: Tensor = _Lookup.apply(ids, layer.weight, layer, addends)
    return y
