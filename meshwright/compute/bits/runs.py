"""Attention from one run of queries at a time to all keys, with equal bits if a ring cuts the sequence.

The partial softmax of a ring adds blocks in order of arrival, which depends on the ranks. With `bits.attention=runs`
every layout, one device included, attends from one run of queries (1 / `bits.sequence` of a sequence) to the whole
sequence in one kernel call of a fixed shape. Ranks of a ring hold runs of queries and gather all keys and values:

| tensor | outside        | in a kernel             | forward sends               | backward sends                 |
|--------|----------------|-------------------------|-----------------------------|--------------------------------|
| Q      | [B, A, T/c, E] | [B, A/parts, T/runs, E] | -                           | -                              |
| K, V   | [B, K, T/c, E] | [B, K/parts, T, E]      | all-gathers of [B, K, T, E] | reduce-scatters of [B, K, T, E]|

The gradient of a key is summed over the R runs of queries by a balanced tree in float32, and reduced over ranks in
float32. Zigzag's rank i of c holds chunks i and 2c-1-i. So the leaves of the tree are in the order 0, R-1, 1, R-2, ...
and each rank holds a subtree. During attention a rank holds all keys of a layer; a plain ring holds two blocks of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.bits.blocks import apart
from meshwright.compute.bits.heads import Apart, HeadParts, specs_of
from meshwright.compute.context.context import HEADS, TOKENS, Heads
from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.parameters.shard import own_stream
from meshwright.ranks.trees import start_tree_reduce_scatter, tree_sum


def leaf_of(run: int, count: int) -> int:
    """Return the leaf of a run of queries in the tree of `count` runs. Run `count - 1 - run` is the next leaf."""
    return 2 * run if 2 * run < count else 2 * (count - 1 - run) + 1


@dataclass(frozen=True)
class RunsOfQueries(HeadParts):
    """Attention over whole sequences, with a separate kernel call for each of `count` runs of queries."""

    count: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend run by run over whole sequences. Gradients of keys and values are summed over runs by the tree."""
        runs = range(self.count)
        keys, values = (_ForEachRun.apply(x, None, runs, self.count) for x in (key, value))
        return self.attend_runs(query, keys, values, runs, spec)

    def attend_run(
        self, query: Tensor, key: Tensor, value: Tensor, run: slice, spec: AttentionSpec
    ) -> Tensor:  # fmt: skip
        """Attend from the queries of one run alone, in one kernel call a part; arguments as in HeadParts."""
        return self.attend_runs(query, (key,), (value,), (run.start // query.shape[TOKENS],), spec)

    def attend_runs(
        self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Sequence[int],
        spec: AttentionSpec,
    ) -> Tensor:  # fmt: skip
        """Attend from the queries of some runs to whole sequences.

        Args:
            query: [B, A, t, E], the queries of the runs in the order of `runs`.
            keys: [B, K, T, E] for each run.
            values: [B, K, T, E] for each run.
            runs: indices of the runs in the sequence.
            spec: the attention of the whole sequence.

        Returns [B, A, t, E].
        """
        count = len(runs)
        outs = [
            self._attend_grain_runs(operands[0], operands[1 : count + 1], operands[count + 1 :], runs, grain_spec, seed)
            for operands, grain_spec, seed in self.by_grain((query, *keys, *values), spec)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _attend_grain_runs(
        self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Sequence[int],
        spec: AttentionSpec, seed: int,
    ) -> Tensor:  # fmt: skip
        parts = self.blocks.head_parts
        length, total = query.shape[TOKENS] // len(runs), keys[0].shape[TOKENS]
        outs = []
        operands = zip(runs, query.chunk(len(runs), TOKENS), keys, values, strict=True)
        for use, (run, queries, k, v) in enumerate(operands):
            by_head: list[Tensor] = []
            of_run = spec_of_run(spec.of_use(use), slice(run * length, (run + 1) * length), total, query)
            specs = specs_of(of_run, parts)
            for index in range(parts):
                q, part_k, part_v = (Apart.apply(x.chunk(parts, HEADS)[index]) for x in (queries, k, v))
                label = f"{seed}/{self.blocks.first_head_part + index}/{run}"
                with own_stream(label, query.device) if spec.dropout else nullcontext():
                    # One part of one run: the base class's attend, since HeadParts' would split again.
                    out = Heads.attend(self, q, part_k, part_v, specs[index])
                by_head.append(Apart.apply(out))
            outs.append(torch.cat(by_head, HEADS))
        return torch.cat(outs, TOKENS)


def spec_of_run(spec: AttentionSpec, run: slice, total: int, like: Tensor) -> AttentionSpec:
    """Return the spec for one run of queries and all keys.

    A mask replaces `causal`, since kernels align the causal diagonal with the first key.

    Args:
        spec: the attention of the whole sequence.
        run: the places of the queries in the sequence.
        total: number of keys.
        like: a tensor on the device and with the dtype of the queries.
    """
    bias = spec.bias
    if bias is not None and bias.shape[TOKENS] > 1:
        bias = bias[:, :, run]
    if not spec.causal:
        seen, bias = (None if x is None else apart(x) for x in (spec.seen, bias))
        return replace(spec, seen=seen, bias=bias)
    places = torch.arange(total, device=like.device)
    seen = places[run, None] >= places
    if spec.window is not None:
        seen &= places[run, None] - places < spec.window
    if spec.documents is None:
        return replace(spec, causal=False, window=None, seen=seen)
    starts = spec.documents.to(like.device)
    # Documents as a mask over this run's queries, since kernels by document have other shapes. Freed after the run.
    hidden = ~((starts[:, run, None] == starts[:, None, :]) & seen).unsqueeze(1)
    bias = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
    return replace(spec, causal=False, window=None, documents=None, bias=bias)


class _ForEachRun(torch.autograd.Function):
    """Whole keys or values [B, K, T, E], once for each run of this rank's queries. Input: this rank's [B, K, t, E]."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, ring: GatheredRing | None, runs: Sequence[int], count: int
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.ring, ctx.dtype = ring, x.dtype
        ctx.order = sorted(range(len(runs)), key=lambda index: leaf_of(runs[index], count))
        whole = x if ring is None else ring.gathered(x)
        return tuple(whole.view_as(whole) for _ in runs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wide = torch.promote_types(ctx.dtype, torch.float32)
        total = tree_sum(gradients[index].to(wide, copy=True) for index in ctx.order)
        if ctx.ring is not None:  # sum over ranks; this rank's part is [B, K, T/c, E]
            dealt = total.index_select(TOKENS, ctx.ring.dealt(total))
            total = start_tree_reduce_scatter(dealt, ctx.ring.comm, TOKENS).wait()
        return total.to(ctx.dtype), None, None, None


class GatheredRing(RingAttention):
    """Attention of a ring rank's runs of queries to gathered keys and values."""

    heads: RunsOfQueries

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        key, value = self.heads.shared(key, value, 1)
        count = self.heads.count
        runs = [run for chunk in self.runs(count) for run in chunk]  # this rank's runs, assigned as tokens are
        keys, values = (_ForEachRun.apply(x, self, runs, count) for x in (key, value))
        return self.heads.attend_runs(query, keys, values, runs, spec)

    def gathered(self, x: Tensor) -> Tensor:
        """Gather every rank's x [B, K, T/c, E], in the order of the sequence: [B, K, T, E]."""
        local = x.contiguous()
        every = local.new_empty(self.size, *local.shape)
        self.comm.all_gather(every, local)
        whole = torch.cat(list(every), TOKENS)
        return torch.empty_like(whole).index_copy_(TOKENS, self.dealt(whole), whole)

    def dealt(self, x: Tensor) -> Tensor:
        """Return the positions in the sequence of all ranks' tokens, rank by rank."""
        count = x.shape[TOKENS] // self.size
        return torch.cat([self.positions(0, count, x.device, rank) for rank in range(self.size)])
