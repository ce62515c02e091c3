"""Norms over a width that falls into parts: ranks that hold some of them end with the bits of one that holds all.

Parts: bits/blocks.py. Each part's sums are made by a kernel of its own, every rank gets those of all parts, and adds
them by a tree over the part's index:

| pass     | sums over a part [B, T, H/N], float64 | then                                                       |
|----------|---------------------------------------|------------------------------------------------------------|
| forward  | x, x² (rms: x²)                       | x̂ = (x - mean) / sqrt(variance + ε)                        |
| backward | dx̂, dx̂ x̂ (rms: dx̂ x̂)                 | dx = (dx̂ - mean(dx̂) - x̂ mean(dx̂ x̂)) / sqrt(variance + ε)   |

Sends, both ways: an all-gather of [N, 2, B, T], of rms [N, 1, B, T].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.bits.blocks import Blocks, parts_of, tree_sum
from meshwright.parameters.shard import ONES, ZEROS, Placements, ShardedModule, ShardSpec
from meshwright.ranks.agreement import all_rows
from meshwright.ranks.mesh import Mesh
from meshwright.tensor.norms import scaled_by_block


class PartNorm(ShardedModule):
    """Layer norm or rms over the hidden width between pairs, in float32 or better."""

    def __init__(
        self, mesh: Mesh, width: int, epsilon: float, kind: Literal["layer", "rms"], placements: Placements,
        *, bias: bool, blocks: Blocks,
    ) -> None:  # fmt: skip
        """`placements`: of the width; `blocks`: between pairs."""
        super().__init__(mesh)
        self.width, self.epsilon, self.centred, self.blocks = width, epsilon, kind == "layer", blocks
        self.comm = mesh.comm(*placements)
        spec = ShardSpec((width,), placements, ONES, matrix=False, full_precision=True)
        self.weight = self.declare("weight", spec)
        self.bias = self.declare("bias", replace(spec, initial=ZEROS)) if bias else None

    def forward(self, h: Tensor) -> Tensor:
        normed: Tensor = _Normed.apply(h.to(self.weight.dtype), self)
        return scaled_by_block(normed, self, self.bias, self.blocks, columns=self.blocks.parts).to(h.dtype)

    def means(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The mean over the whole width of each of some values [B, T, H/n], [B, T, 1] float64."""
        of_parts = zip(*(parts_of(x, self.blocks.parts, -1) for x in values), strict=True)
        sums = torch.stack([
            torch.stack([part.sum(-1, dtype=torch.float64) for part in parts]) for parts in of_parts
        ])  # fmt: skip
        total = tree_sum(all_rows(sums, self.comm).flatten(0, 1).unbind()).div_(self.width)
        return tuple(mean.unsqueeze(-1) for mean in total)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PartNorm) -> Tensor:
        wide = x.to(torch.float64)
        *mean, square = layer.means([x, wide * wide] if layer.centred else [wide * wide])
        for own in mean:
            square = (square - own * own).clamp_(min=0)
            x = x - own.to(x.dtype)
        scale = (square + layer.epsilon).rsqrt_().to(x.dtype)
        normed = x * scale
        ctx.save_for_backward(normed, scale)
        ctx.layer = layer
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        normed, scale = ctx.saved_tensors
        layer: PartNorm = ctx.layer
        *mean, projection = layer.means([dy, dy * normed] if layer.centred else [dy * normed])
        dx = dy - normed * projection.to(dy.dtype)
        for own in mean:
            dx = dx - own.to(dy.dtype)
        return dx * scale, None
