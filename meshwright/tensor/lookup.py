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
            add_rows(out, ids.flatten(), dy.flatten(0, -2).to(out.dtype), ctx.layer.mesh.device_type)

        return None, ctx.layer.gradient("weight", weight, write), None


def add_rows(table: Tensor, ids: Tensor, rows: Tensor, device_type: str) -> None:
    """table[ids] += rows, ids [n] with repeats, rows [n, H]; in an order, and so with bits, that are always the same.

    Of torch's two forms one is, and not the same one everywhere: on GPUs `index_put_` sorts the ids and `index_add_`
    adds atomically; on CPUs `index_add_` goes id by id and `index_put_` adds atomically, from several threads.
    """
    if device_type == "cuda":
        table.index_put_((ids,), rows, accumulate=True)
    else:
        table.index_add_(0, ids, rows)


def lookup(ids: Tensor, layer: ShardedModule) -> Tensor:
    """ids [...] -> [..., H]: rows of the layer's `weight` [V, H]."""
    y: Tensor = _Lookup.apply(ids, layer.weight, layer)
    return y
