"""Linears and look-ups that add up their gradients where the buckets hold them.

A linear is x W + b with weights stored [in, out], so that the weight gradient xᵀ dy has the weight's own layout.

forward:  y  = x W + b        [B·T, out]
backward: dx = dy Wᵀ          [B·T, in]
          dW = xᵀ dy          [in, out], added up straight in the parameter's room in its bucket, where it has one
          db = sum of dy      [out], likewise

A look-up reads rows of a table:

forward:  y = table[ids]             [B, T, H]
backward: dtable[ids] += dy          [V, H], in the table's room: only the rows that were read are touched after the
                                     first microbatch; torch's embedding makes and adds a table for each
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.parameters.shard import ShardedModule, ShardSpec
from meshwright.compute.precision import DTYPES
from meshwright.compute.tensor.products import PLAIN, Products, add_gradients

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.ranks.mesh import Mesh

Addends = Callable[[Tensor, Tensor], Iterable[tuple[Tensor, Tensor]]]
"""addends(ids, dy): the ids and rows of dy of each addend of a table's gradient."""


class Local(ShardedModule):
    """`weight`, as its spec cuts it: a table of attention's biases by head, the kernels of a grouped convolution."""

    def __init__(self, mesh: Mesh, spec: ShardSpec) -> None:
        super().__init__(mesh)
        self.weight = self.declare("weight", spec)

    def forward(self) -> Tensor:
        return self.weight


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


def autocast_device(device: torch.device) -> str:
    """The type of device whose autocast is on or off for tensors there. Torch has none for meta tensors: theirs is the
    CPU's, under which a plan casts them as the device that it is for would (on_device.py)."""
    return "cpu" if device.type == "meta" else device.type


def autocasts_of(config: Config, mesh: Mesh) -> tuple[str, torch.dtype] | None:
    """Return (device type, dtype) of autocast under O1; else None."""
    return (autocast_device(mesh.device), DTYPES[config.precision.dtype]) if config.precision.level == "O1" else None


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype in which autocast computes a product of x; None where it is off."""
    device = autocast_device(x.device)
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def cast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The operands in autocast's dtype, where it is on."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weight, bias
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, layer: ShardedModule, products: Products = PLAIN
) -> Tensor:  # fmt: skip
    """[B, ..., in] x [in, out] + [out] -> [B, ..., out]; under autocast in its dtype.

    `weight` and `bias` are the `layer`'s parameters of these names, or views of them.
    """
    x, weight, bias = cast(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, layer, products)
    return y.view(*x.shape[:-1], weight.shape[1])


def at_once(ids: Tensor, dy: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
    """The addends of a table whose gradient is one sum."""
    return ((ids, dy),)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, layer: ShardedModule, addends: Addends) -> Tensor:
        ctx.save_for_backward(ids)  # not the weight itself, which zero3 may have released by then
        ctx.layer, ctx.addends = layer, addends
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        layer: ShardedModule = ctx.layer
        device = layer.mesh.device_type
        writes = (partial(write_rows, own, rows, device) for own, rows in ctx.addends(ids, dy))
        return None, add_gradients(layer, "weight", layer.get_parameter("weight"), writes), None, None


def write_rows(ids: Tensor, rows: Tensor, device_type: str, out: Tensor, beta: int) -> None:
    """beta · out, and out[ids] += rows, ids [...] with repeats, rows [..., H]; in an order, and so with bits, that are
    always the same.

    Of torch's two forms one is, and not the same one everywhere: on GPUs `index_put_` sorts the ids and `index_add_`
    adds atomically; on CPUs `index_add_` goes id by id and `index_put_` adds atomically, from several threads.
    """
    if not beta:
        out.zero_()
    ids, rows = ids.flatten(), rows.flatten(0, -2).to(out.dtype)
    if device_type == "cuda":
        out.index_put_((ids,), rows, accumulate=True)
    else:
        out.index_add_(0, ids, rows)


def lookup(ids: Tensor, layer: ShardedModule, addends: Addends = at_once) -> Tensor:
    """ids [..., T] -> [..., T, H]: rows of the layer's `weight` [V, H], whose gradient is the sum of the addends."""
    y: Tensor = _Lookup.apply(ids, layer.weight, layer, addends)
    return y
