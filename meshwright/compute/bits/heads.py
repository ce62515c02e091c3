"""Attention over whole sequences in equal parts of the heads (blocks.py), with kernels and masks equal on any rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.bits.blocks import Blocks, Draw, apart, widened
from meshwright.compute.context.context import HEADS, TOKENS, Heads
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.parameters.shard import own_stream
from meshwright.ranks.trees import tree_sum


@dataclass(frozen=True)
class HeadParts(Heads):
    """Heads that attend in equal parts (bits/blocks.py).

    Each part is one kernel call of a fixed shape with a separate random stream. So kernels and masks do not depend on
    the assignment of heads to ranks.
    """

    blocks: Blocks
    draw: Draw = field(default=lambda grains: [0] * grains, kw_only=True)
    """Draws seeds of masks; the default serves models that are planned and not trained."""
    widens: bool = field(default=False, kw_only=True)

    def shared(self, key: Tensor, value: Tensor, ranks: int) -> tuple[Tensor, Tensor]:
        parts = self.blocks.head_parts * ranks
        if (heads := key.shape[HEADS]) < parts:
            key, value = (_Repeat.apply(x, parts // heads) for x in (key, value))
        return key, value

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend grain by grain, and in each grain part by part of the heads."""
        count, grains = self.blocks.head_parts, []
        for rows, whole, seed in self.by_grain((query, key, value), spec):
            parts = zip(*(PartsApart.apply(x, count) for x in rows), specs_of(whole.of_use(0), count), strict=True)
            outs = []
            for index, (q, k, v, head_spec) in enumerate(parts, self.blocks.first_head_part):
                with own_stream(f"{seed}/{index}", query.device) if spec.dropout else nullcontext():
                    outs.append(super().attend(q, k, v, head_spec))
            grains.append(JoinedParts.apply(count, *outs))
        return grains[0] if len(grains) == 1 else torch.cat(grains)

    def attend_run(
        self, query: Tensor, key: Tensor, value: Tensor, run: slice, spec: AttentionSpec
    ) -> Tensor:  # fmt: skip
        """Attend from the queries of one run, with the kernels of whole sequences; queries elsewhere are zeros.

        Args:
            query: [B, A, t, E], the run's queries.
            key: [B, K, T, E], of whole sequences.
            value: [B, K, T, E], of whole sequences.
            run: the places of the queries in the sequence.
            spec: the attention of the whole sequence.

        Returns [B, A, t, E].
        """
        whole = query.new_zeros(*query.shape[:TOKENS], key.shape[TOKENS], query.shape[-1])
        whole[:, :, run] = query
        return self.attend(whole, key, value, spec)[:, :, run]

    def by_grain(
        self, operands: Sequence[Tensor], spec: AttentionSpec
    ) -> Iterator[tuple[tuple[Tensor, ...], AttentionSpec, int]]:
        """Yield each grain's rows of the operands, the spec of these rows, and the seed of the grain's masks."""
        count = self.blocks.grains
        seeds = self.draw(count) if spec.dropout else [0] * count
        rows = zip(*(x.chunk(count) if count > 1 else (x,) for x in operands), strict=True)
        yield from zip(rows, spec.by_rows(count), seeds, strict=True)


def specs_of(spec: AttentionSpec, count: int) -> list[AttentionSpec]:
    """Split a spec for equal parts of the heads. A bias with a head dim is split into copies."""
    specs = spec.by_heads(count)
    if specs[0].bias is spec.bias:
        return specs
    return [replace(head_spec, bias=None if head_spec.bias is None else apart(head_spec.bias)) for head_spec in specs]


class PartsApart(torch.autograd.Function):
    """Equal parts of the heads of x [B, A, T, E], each contiguous and aligned, since libraries choose kernels by
    strides. The gradient of x is contiguous."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(apart(heads) for heads in x.chunk(count, HEADS))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return apart(gradients[0]) if len(gradients) == 1 else torch.cat(gradients, HEADS), None


class JoinedParts(torch.autograd.Function):
    """Outputs [B, A/parts, t, E], by run of queries and then by part of the heads, joined to [B, A, T, E].

    In memory the heads of a token are neighbours, as a linear reads them. The gradient of each output is contiguous and
    aligned.
    """

    @staticmethod
    def forward(ctx: Any, parts: int, *outs: Tensor) -> Tensor:
        (batch, heads, length, width), runs = outs[0].shape, len(outs) // parts
        ctx.parts, ctx.runs = parts, runs
        joined = outs[0].new_empty(batch, runs, length, parts, heads, width)
        for index, out in enumerate(outs):
            joined[:, index // parts, :, index % parts] = out.transpose(HEADS, TOKENS)
        return joined.flatten(3, 4).flatten(1, 2).transpose(HEADS, TOKENS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        runs = gradient.chunk(ctx.runs, TOKENS)
        return None, *(apart(heads) for run in runs for heads in run.chunk(ctx.parts, HEADS))


class _Repeat(torch.autograd.Function):
    """`x.repeat_interleave(copies, HEADS)` with a gradient that is summed over the copies in the order of a tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, copies: int) -> Tensor:
        ctx.copies = copies
        return x.repeat_interleave(copies, HEADS)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        each = gradient.unflatten(HEADS, (-1, ctx.copies)).unbind(HEADS + 1)
        return tree_sum(widened(copy.clone()) for copy in each).to(gradient.dtype), None
