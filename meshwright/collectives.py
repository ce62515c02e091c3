"""Differentiable verbs, always `verb(x, mesh, "axis")`: each backward is the mirror verb."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.mesh import Mesh


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, root: int) -> Tensor:
        comm = mesh.comm(axis)
        ctx.comm, ctx.root, ctx.shape = comm, root, x.shape
        rows = x.shape[0] * comm.size if comm.index == root else 0
        whole = x.new_empty(rows, *x.shape[1:])
        comm.gather(whole, x.contiguous(), root)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        part = gradient.new_empty(ctx.shape)
        ctx.comm.scatter(part, gradient.contiguous(), ctx.root)
        return part, None, None, None


def gather(x: Tensor, mesh: Mesh, axis: str, root: int = 0) -> Tensor:
    """The root's rows [n·B, ...], every rank's x [B, ...] in order; elsewhere [0, ...]. Backward: scatter."""
    result: Tensor = _Gather.apply(x, mesh, axis, root)
    return result
