"""x W + b with weights stored [in, out], so that the weight gradient xᵀ dy is written in the weight's own layout.

forward:  y  = x W + b        [B·T, out]
backward: dx = dy Wᵀ          [B·T, in]
          dW = xᵀ dy          [in, out], written straight into the parameter's room in its bucket where it has one
          db = sum of dy      [out], likewise
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.shard import ShardedModule


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, layer: ShardedModule) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return torch.addmm(bias, x, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        # A fresh view of the bucket's memory: autograd adopts it as the parameter's gradient without a copy.
        dweight, dbias = ctx.layer.sink("weight", weight), ctx.layer.sink("bias", dy[0])
        torch.mm(x.t(), dy, out=dweight)
        torch.sum(dy, 0, out=dbias)
        return dy @ weight.t(), dweight, dbias, None


def linear(x: Tensor, weight: Tensor, bias: Tensor, layer: ShardedModule) -> Tensor:
    """[..., in] x [in, out] + [out] -> [..., out]; under autocast in its dtype.

    `weight` and `bias` are the `layer`'s parameters of these names, or views of them.
    """
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, weight, bias = x.to(dtype), weight.to(dtype), bias.to(dtype)
    y: Tensor = _Linear.apply(x.flatten(0, -2), weight, bias, layer)
    return y.view(*x.shape[:-1], weight.shape[1])
