"""Attention of whole sequences in equal parts of the heads (blocks.py): neither kernels nor masks depend on ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.bits.blocks import Blocks, Draw, apart
from meshwright.compute.context.context import HEADS, Heads
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.parameters.shard import own_stream
from meshwright.ranks.trees import tree_sum


@dataclass(frozen=True)
class HeadParts(Heads):
    """Heads that attend in equal parts: each part is one call of one shape with random numbers of its own, so that
    neither kernels nor masks depend on which rank holds which heads (bits/blocks.py)."""

    blocks: Blocks
    draw: Draw = field(default=lambda grains: [0] * grains, kw_only=True)
    """By default the numbers of a model that is planned and not trained."""
    widens: bool = field(default=False, kw_only=True)

    def shared(self, key: Tensor, value: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        parts = self.blocks.head_parts * ranks
        if (heads := key.shape[HEADS]) < parts:
            key, value = (_Repeat.apply(x, parts // heads) for x in (key, value))
        return key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend grain by grain, and in each grain part by part of the heads."""
        outs = [
            self._attend_grain(q, k, v, own, seed) for (q, k, v), own, seed in self.by_grain((query, key, value), spec)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def by_grain(
        self, operands: Sequence[Tensor], spec: AttentionSpec
    ) -> Iterator[tuple[tuple[Tensor, ...], AttentionSpec, int]]:
        """Each grain's rows of the operands and of the spec, and the number from which the grain's masks are drawn."""
        count = self.blocks.grains
        seeds = self.draw(count) if spec.dropout else [0] * count
        rows = zip(*(x.chunk(count) for x in operands), strict=True)
        yield from zip(rows, spec.by_rows(count), seeds, strict=True)

    def _attend_grain(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, seed: int) -> Tensor:
        count = self.blocks.head_parts
        parts = zip(*(x.chunk(count, HEADS) for x in (query, key, value)), strict=True)
        specs = [spec] * count
        if spec.bias is not None and spec.bias.shape[HEADS] > 1:
            specs = [replace(spec, bias=apart(own)) for own in spec.bias.chunk(count, HEADS)]
        outs = []
        for number, (operands, own) in enumerate(zip(parts, specs, strict=True), self.blocks.first_head_part):
            q, k, v = (Apart.apply(x) for x in operands)
            with own_stream(f"{seed}/{number}", query.device) if spec.dropout else nullcontext():
                out = super().attend(q, k, v, own)
            outs.append(Apart.apply(out))
        return torch.cat(outs, HEADS)


class Apart(torch.autograd.Function):
    """A contiguous copy of x, and of its gradient: kernels' choices then do not depend on strides."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        lies_apart = apart(x)
        return x.view_as(x) if lies_apart is x else lies_apart

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return apart(gradient)


class _Repeat(torch.autograd.Function):
    """x.repeat_interleave(copies, HEADS), whose gradient is a sum in the order of a tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return x.repeat_interleave(copies, HEADS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        each = gradient.unflatten(HEADS, (-1, ctx.copies)).unbind(HEADS + 1)
        return tree_sum(x.float() for x in (one.clone() for one in each)).to(gradient.dtype), None
