"""Norms, computed in float32 or better. RMS norm and group norm take activations whose hidden dim a rank holds whole.

| norm  | of             | over                        | weights   |
|-------|----------------|-----------------------------|-----------|
| rms   | [B, T, H]      | H; no mean (arXiv 1910.07467) | [H]     |
| group | [B, T, H]      | T and the channels of a group (arXiv 1803.08494) | [H], [H] |

Layer norm over a hidden dim that is cut over an axis.

forward:  sums of x and x² over H: one all-reduce of [R, 2]        x̂ = (x - mean) / sqrt(variance + ε),  y = x̂ γ + β
backward: sums of dx̂ and dx̂ x̂ over H: one all-reduce of [R, 2]     dx = (dx̂ - mean(dx̂) - x̂ mean(dx̂ x̂)) / sqrt(...)

R rows. (Tesseract, section 3.2.2.) Forward sums are float64: E[x²] - E[x]² would lose float32's digits where the mean
is large.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.parameters.shard import ONES, ZEROS, Placements, ShardedModule, ShardSpec
from meshwright.ranks.comm import Comm
from meshwright.ranks.mesh import Mesh


class RmsNorm(ShardedModule):
    """x / sqrt(mean(x^2) + epsilon) · weight."""

    def __init__(self, mesh: Mesh, hidden: int, epsilon: float) -> None:
        super().__init__(mesh)
        self.epsilon = epsilon
        self.weight = self.declare("weight", ShardSpec((hidden,), initial=ONES, matrix=False, full_precision=True))

    def forward(self, h: Tensor) -> Tensor:
        x = h.to(self.weight.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon).to(h.dtype)


class GroupNorm(ShardedModule):
    """The channels of `groups` groups, each group with its own mean and variance over all positions.

    `placements`: of the channels, of which a rank holds whole groups.
    """

    def __init__(self, mesh: Mesh, channels: int, groups: int, epsilon: float, placements: Placements) -> None:
        super().__init__(mesh)
        self.groups, self.epsilon = groups // mesh.size(*placements), epsilon
        self.weight = self.declare(
            "weight", ShardSpec((channels,), placements, ONES, matrix=False, full_precision=True)
        )
        self.bias = self.declare("bias", ShardSpec((channels,), placements, ZEROS, matrix=False, full_precision=True))

    def forward(self, h: Tensor) -> Tensor:
        x = h.to(self.weight.dtype).transpose(1, 2)  # [B, H, T]
        return F.group_norm(x, self.groups, self.weight, self.bias, self.epsilon).transpose(1, 2).to(h.dtype)


class _SplitLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, hidden: int, epsilon: float, comm: Comm) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64).square_()
        sums = torch.stack([x.sum(-1, dtype=torch.float64), squares], -1)
        comm.all_reduce(sums)
        mean, square = (sums / hidden).unbind(-1)
        scale = (square - mean.square()).clamp_(min=0).add_(epsilon).rsqrt_()
        normed = (x - mean.to(x.dtype).unsqueeze(-1)).mul_(scale.to(x.dtype).unsqueeze(-1))
        ctx.save_for_backward(normed, scale.to(x.dtype).unsqueeze(-1), weight)
        ctx.hidden, ctx.comm = hidden, comm
        return torch.addcmul(bias, normed, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        normed, scale, weight = ctx.saved_tensors
        dnormed = dy * weight
        product = dy * normed
        sums = torch.stack([dnormed.sum(-1), torch.mv(product.flatten(0, -2), weight).view(dy.shape[:-1])], -1)
        moving = ctx.comm.all_reduce(sums, wait=False)  # under the vectors' gradients
        dweight = product.flatten(0, -2).sum(0)
        dbias = dy.flatten(0, -2).sum(0)
        moving.wait()
        means = sums / ctx.hidden
        dx = dnormed.sub_(means[..., :1]).sub_(normed * means[..., 1:]).mul_(scale)
        return dx, dweight, dbias, None, None, None


def split_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, hidden: int, epsilon: float, comm: Comm) -> Tensor:
    """Layer norm of x [..., H/n] over all `hidden` elements; weight and bias [H/n]; float32 or float64."""
    y: Tensor = _SplitLayerNorm.apply(x, weight, bias, hidden, epsilon, comm)
    return y
