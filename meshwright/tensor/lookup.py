"""Rows of a table, whose gradient is added up where it belongs.

forward:  y = table[ids]             [B, T, H]
backward: dtable[ids] += dy          [V, H], in the table's room: only the rows that were read are touched after the
                                     first microbatch; torch's embedding makes and adds a table for each
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.shard import ShardedModule


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, layer: ShardedModule) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.layer = layer
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, None]:
        ids, weight = ctx.saved_tensors

        def write(out: Tensor, beta: int) -> None:
            if not beta:
                out.zero_()
            out.index_put_((ids,), dy, accumulate=True)  # of all forms the one whose bits are the same on GPUs too

        return None, ctx.layer.gradient("weight", weight, write), None


def lookup(ids: Tensor, layer: ShardedModule) -> Tensor:
    """ids [...] -> [..., H]: rows of the layer's `weight` [V, H]."""
    y: Tensor = _Lookup.apply(ids, layer.weight, layer)
    return y
