"""Norms with equal bits in every layout, also over a hidden width in parts.

Parts: bits/blocks.py. A separate kernel call computes the sums of each part. Every rank receives the sums of all parts,
and adds these by a tree over the index of the part:

| pass     | sums over a part [B, T, H/N], float64 | then                                                       |
|----------|---------------------------------------|------------------------------------------------------------|
| forward  | x, x² (rms: x²)                       | x̂ = (x - mean) / sqrt(variance + ε)                        |
| backward | dx̂, dx̂ x̂ (rms: dx̂ x̂)                 | dx = (dx̂ - mean(dx̂) - x̂ mean(dx̂ x̂)) / sqrt(variance + ε) |

Sent in each direction: an all-gather of [N, 2, B, T]; for rms, of [N, 1, B, T].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.bits.blocks import Blocks, apart, parts_of
from meshwright.compute.parameters.role import NORM
from meshwright.compute.parameters.shard import ONES, ZEROS, Placements, ShardedModule, ShardSpec
from meshwright.compute.tensor.norms import Norm, OneWidth
from meshwright.compute.tensor.products import added, write_sum
from meshwright.ranks.agreement import all_rows
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.trees import tree_sum


class _ByBlock(torch.autograd.Function):
    """x · weight + bias, or x · (1 + weight). The gradients of weight and bias are summed block by block of rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: BlockNorm | PartNorm, cut: _Cut
    ) -> Tensor:  # fmt: skip
        if layer.around_one:
            weight = weight + 1
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.biased, ctx.cut = layer, bias is not None, cut
        return x * weight if bias is None else (x * weight).add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dweight = ctx.cut.add_sums(ctx.layer, "weight", weight, dy, x)
        dbias = ctx.cut.add_sums(ctx.layer, "bias", weight, dy) if ctx.biased else None
        return dy * weight, dweight, dbias, None, None


@dataclass(frozen=True)
class _Cut:
    """The blocks of x [B, T, ..., E] for sums of gradients."""

    blocks: Blocks
    """The runs of tokens."""
    parts: int
    """Parts of the heads (dim 2)."""
    columns: int
    """Parts of the columns (the last dim)."""

    def add_sums(self, layer: ShardedModule, name: str, like: Tensor, *factors: Tensor) -> Tensor | None:
        """Add the sum over each block's rows [n, E] of one tensor, or of the product of two, to the gradient of the
        layer's parameter `name`."""
        total = None
        for blocks in zip(*map(self.of, factors), strict=True):
            write = partial(self.write_sums, apart(reduce(torch.mul, blocks)).flatten(0, -2))
            total = added(total, layer.add_gradient(name, like, write))
        return total

    def of(self, x: Tensor) -> Iterator[Tensor]:
        """Yield the blocks of x."""
        for run in self.blocks.cut(x):
            yield from run.chunk(self.parts, 2) if self.parts > 1 else (run,)

    def write_sums(self, rows: Tensor, out: Tensor, beta: int) -> None:
        """Write the sum over `rows` plus beta · out into `out`, by parts of the columns."""
        for block, target in zip(parts_of(rows, self.columns, -1), out.chunk(self.columns), strict=True):
            write_sum(block, target, beta)


def scaled_by_block(
    x: Tensor, layer: BlockNorm | PartNorm, bias: Tensor | None, blocks: Blocks, parts: int = 1, columns: int = 1
) -> Tensor:
    """Return x · weight + bias, or x · (1 + weight), with gradients summed block by block.

    Args:
        x: [B, T, ..., E].
        layer: the owner of the parameters `weight` [E] and `bias` [E].
        bias: [E], or None.
        blocks: the runs of tokens.
        parts: number of parts of the heads (dim 2).
        columns: number of parts of the last dim.
    """
    y: Tensor = _ByBlock.apply(x, layer.get_parameter("weight"), bias, layer, _Cut(blocks, parts, columns))
    return y


class BlockNorm(Norm):
    """A norm with gradients of weight and bias that are summed block by block of rows."""

    def __init__(
        self, mesh: Mesh, width: int, epsilon: float, norm_kind: OneWidth, *, bias: bool, heads_over: tuple[str, ...],
        blocks: Blocks,
    ) -> None:  # fmt: skip
        """Make the norm. `blocks`: the blocks inside of pairs."""
        super().__init__(mesh, width, epsilon, norm_kind, bias=bias, heads_over=heads_over)
        self.cut = (blocks, blocks.parts) if heads_over else (blocks.outer, 1)

    def normed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return scaled_by_block(self.of_unit_scale(x, weight.shape), self, self.bias, *self.cut)


class AffineNorm(Norm):
    """A norm that applies weight and bias as separate operations, with gradients that are sums over rows.

    torch's layer norm adds these gradients thread by thread, so the bits would depend on the number of threads.
    """

    def normed(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y = self.of_unit_scale(x, weight.shape) * weight
        return y if bias is None else y.add_(bias)


class PartNorm(ShardedModule):
    """Layer norm or rms over the hidden width between pairs, or over all heads inside, in float32 or better."""

    def __init__(
        self, mesh: Mesh, width: int, epsilon: float, norm_kind: OneWidth, placements: Placements, *, bias: bool,
        blocks: Blocks,
    ) -> None:  # fmt: skip
        """Make the norm. `placements`: of the width; `blocks`: the blocks that cut the width."""
        super().__init__(mesh)
        self.width, self.epsilon, self.centred, self.blocks = width, epsilon, norm_kind == "layer", blocks
        self.around_one = norm_kind == "rms-around-one"
        self.comm = mesh.comm(*placements)
        spec = ShardSpec((width,), placements, ZEROS if self.around_one else ONES, NORM)
        self.weight = self.declare("weight", spec)
        self.bias = self.declare("bias", replace(spec, initial=ZEROS)) if bias else None

    def forward(self, h: Tensor) -> Tensor:
        normed: Tensor = _Normed.apply(h.to(self.weight.dtype), self)
        return scaled_by_block(normed, self, self.bias, self.blocks, columns=self.blocks.parts).to(h.dtype)

    def means(self, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the mean over the whole width, [B, T, 1] float64, of each of the values [B, T, H/n]."""
        of_parts = zip(*(parts_of(x, self.blocks.parts, -1) for x in values), strict=True)
        sums = torch.stack([
            torch.stack([block.sum(-1, dtype=torch.float64) for block in parts]) for parts in of_parts
        ])  # fmt: skip
        total = tree_sum(all_rows(sums, self.comm).flatten(0, 1).unbind()).div_(self.width)
        return tuple(mean.unsqueeze(-1) for mean in total)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: PartNorm) -> Tensor:
        wide = x.to(torch.float64)
        *mean, square = layer.means([x, wide * wide] if layer.centred else [wide * wide])
        for average in mean:
            square = (square - average * average).clamp_(min=0)
            x = x - average.to(x.dtype)
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
        for average in mean:
            dx = dx - average.to(dy.dtype)
        return dx * scale, None
