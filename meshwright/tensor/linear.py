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

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.bits.blocks import WHOLE, Blocks, added
from meshwright.parameters.shard import ShardedModule, ShardSpec
from meshwright.tensor.copies import ALL_COLUMNS, Columns

if TYPE_CHECKING:
    from meshwright.ranks.mesh import Mesh

ADDS_WIDE = torch.__version__ >= "2.13"
"""Earlier versions of torch add a product of halves only to a half."""


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
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: ShardedModule, blocks: Blocks
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.biased, ctx.blocks = layer, bias is not None, blocks
        own, runs = blocks.own(weight), blocks.rows(x)
        ys = [torch.mm(rows, own) if bias is None else torch.addmm(bias, rows, own) for rows in runs]
        return blocks.joined(ys, x.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        incoming, dweight, dbias, dx = blocks.rows(dy), None, None, None
        for rows, drows in zip(blocks.rows(x), incoming, strict=True):
            dweight = added(dweight, ctx.layer.add_gradient("weight", weight, partial(write_product, rows.t(), drows)))
            if ctx.biased:
                dbias = added(dbias, bias_gradient([drows], ctx.layer))
        if ctx.needs_input_grad[0]:
            own = blocks.own(weight).t()
            dx = blocks.joined([rows @ own for rows in incoming], x.shape[0]).view(x.shape)
        return dx, dweight, dbias, None, None


def write_product(a: Tensor, b: Tensor, out: Tensor, beta: int) -> None:
    """a b + beta · out, in `out`. Where factors are narrower a GPU's kernel adds without rounding; a CPU has none that
    does, and multiplies first. With a and b bound it writes a gradient, as `write_part` and `write_sum` do."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=beta, out=out)
    elif out.device.type == "cuda" and ADDS_WIDE:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    else:
        write_part(a @ b, out, beta)


def write_part(part: Tensor, out: Tensor, beta: int) -> None:
    """part + beta · out, in `out`, which may be wider: sums of rounded parts, not rounded sums."""
    if beta:
        out.add_(part)
    else:
        out.copy_(part)


def write_sum(rows: Tensor, out: Tensor, beta: int) -> None:
    """The sum of rows [n, N] + beta · out, in `out`, which may be wider."""
    if beta or out.dtype != rows.dtype:
        write_part(rows.sum(0), out, beta)
    else:
        torch.sum(rows, 0, out=out)


def bias_gradient(
    parts: Sequence[Tensor], layer: ShardedModule, columns: Sequence[Columns] = (ALL_COLUMNS,)
) -> Tensor | None:
    """The sums of dy [B·T, out] over its rows, of one or several parts: the gradients of their columns of the layer's
    `bias`, none of which two have."""

    def write(out: Tensor, beta: int) -> None:
        for number, (dy, those) in enumerate(zip(parts, columns, strict=True)):
            those.write(partial(write_sum, dy))(out, beta if number == 0 else 1)

    like, held = parts[0][0], columns[0].held
    return layer.add_gradient("bias", like if held is None else like.new_empty(held), write)


def autocast_device(device: torch.device) -> str:
    """The type of device whose autocast is on or off for tensors there. Torch has none for meta tensors: theirs is the
    CPU's, under which a plan casts them as the device that it is for would (on_device.py)."""
    return "cpu" if device.type == "meta" else device.type


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


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, layer: ShardedModule, blocks: Blocks = WHOLE) -> Tensor:
    """[B, ..., in] x [in, out] + [out] -> [B, ..., out]; under autocast in its dtype.

    `weight` and `bias` are the `layer`'s parameters of these names, or views of them. `blocks`: whose outer runs are
    multiplied one by one.
    """
    x, weight, bias = cast(x, weight, bias)
    y: Tensor = _Linear.apply(x, weight, bias, layer, blocks.outer)
    return y.view(*x.shape[:-1], weight.shape[1])


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, layer: ShardedModule, runs: int, grains: int) -> Tensor:
        ctx.save_for_backward(ids)  # not the weight itself, which zero3 may have released by then
        ctx.layer, ctx.runs, ctx.grains = layer, runs, grains
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        dweight = None
        cut = [run for grain in ids.chunk(ctx.grains) for run in grain.chunk(ctx.runs, -1)]
        incoming = [run for grain in dy.chunk(ctx.grains) for run in grain.chunk(ctx.runs, -2)]
        for own, rows in zip(cut, incoming, strict=True):
            write = partial(write_rows, own, rows, ctx.layer.mesh.device_type)
            dweight = added(dweight, ctx.layer.add_gradient("weight", ctx.layer.get_parameter("weight"), write))
        return None, dweight, None, None, None


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


def lookup(ids: Tensor, layer: ShardedModule, runs: int = 1, grains: int = 1) -> Tensor:
    """ids [..., T] -> [..., T, H]: rows of the layer's `weight` [V, H], whose gradient is added run by run of each of
    so many parts of the first dim."""
    y: Tensor = _Lookup.apply(ids, layer.weight, layer, runs, grains)
    return y
