"""Attention from one run of queries at a time to all keys, with equal bits if a ring cuts the sequence.

The partial softmax of a ring adds blocks in order of arrival, which depends on the ranks. With `bits.attention=runs`
every layout, one device included, attends from one run of queries (1 / `bits.sequence` of a sequence) to the keys of
all runs that these queries may see, in one kernel call of a fixed shape. Ranks of a ring hold runs of queries and
gather all keys and values:

| tensor | outside        | in a kernel             | forward sends              | backward sends                 |
|--------|----------------|-------------------------|----------------------------|--------------------------------|
| Q      | [B, A, T/c, E] | [B, A/parts, T/runs, E] | -                          | -                              |
| K, V   | [B, K, T/c, E] | [B, K/parts, s, E]      | all-gather of 2·[B K T E]  | reduce-scatter of 2·[B K T E]  |

s: if causal, the keys up to the run's end, without the runs before a window; else T.

The gradient of a key is summed over the R runs of queries by a balanced tree in float32, and reduced over ranks in
float32. Zigzag's rank i of c holds chunks i and 2c-1-i. So the leaves of the tree are in the order 0, R-1, 1, R-2, ...
and each rank holds a subtree; of R ranks rank i holds the run of leaf i. During attention a rank holds all keys of a
layer; a plain ring holds two blocks of keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.bits.blocks import apart
from meshwright.compute.bits.heads import HeadParts, JoinedParts, PartsApart, specs_of
from meshwright.compute.context.context import TOKENS, Heads
from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.parameters.shard import own_stream
from meshwright.ranks.trees import start_tree_reduce_scatter, tree_sum


def leaf_of(run: int, count: int) -> int:
    """Return the leaf of a run of queries in the tree of `count` runs. Run `count - 1 - run` is the next leaf."""
    return 2 * run if 2 * run < count else 2 * (count - 1 - run) + 1


def run_of(leaf: int, count: int) -> int:
    """Return the run of queries at a leaf of the tree of `count` runs: the inverse of `leaf_of`."""
    return count - 1 - leaf // 2 if leaf % 2 else leaf // 2


@dataclass(frozen=True)
class RunsOfQueries(HeadParts):
    """Attention over whole sequences, with a separate kernel call for each of `count` runs of queries."""

    count: int

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend run by run over whole sequences. Gradients of keys and values are summed over runs by the tree."""
        runs = range(self.count)
        keys, values = self.for_each_run(key, value, runs, spec)
        return self.attend_runs(query, keys, values, runs, spec)

    def attend_run(
        self, query: Tensor, key: Tensor, value: Tensor, run: slice, spec: AttentionSpec
    ) -> Tensor:  # fmt: skip
        """Attend from the queries of one run alone, in one kernel call a part; arguments as in HeadParts."""
        index = run.start // query.shape[TOKENS]
        keys = self.keys_of(index, query.shape[TOKENS], spec)
        return self.attend_runs(query, (key[:, :, keys],), (value[:, :, keys],), (index,), spec)

    def keys_of(self, run: int, length: int, spec: AttentionSpec) -> slice:
        """Return the keys in the kernel call of a run of `length` queries: of the runs that a query may see."""
        if not spec.causal:
            return slice(0, self.count * length)
        first = 0 if spec.window is None else max(run * length - spec.window + 1, 0) // length
        return slice(first * length, (run + 1) * length)

    def for_each_run(
        self, key: Tensor, value: Tensor, runs: Sequence[int], spec: AttentionSpec, ring: GatheredRing | None = None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the keys and the values of each run's kernel call.

        Args:
            key: [B, K, t, E], this rank's.
            value: [B, K, t, E], this rank's.
            runs: indices of this rank's runs.
            spec: the attention of the whole sequence.
            ring: gathers; None: this rank has whole sequences.
        """
        length = key.shape[TOKENS] // (len(runs) if ring else self.count)
        seen = [self.keys_of(run, length, spec) for run in runs]
        each: tuple[Tensor, ...] = _ForEachRun.apply(key, value, ring, seen, [leaf_of(run, self.count) for run in runs])
        return each[: len(runs)], each[len(runs) :]

    def attend_runs(
        self, query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], runs: Sequence[int],
        spec: AttentionSpec,
    ) -> Tensor:  # fmt: skip
        """Attend from the queries of some runs to whole sequences.

        Args:
            query: [B, A, t, E], the queries of the runs in the order of `runs`.
            keys: [B, K, s, E] for each run, the keys of `keys_of`.
            values: [B, K, s, E] for each run.
            runs: indices of the runs in the sequence.
            spec: the attention of the whole sequence.

        Returns [B, A, t, E].
        """
        count, grains, parts = len(runs), [], self.blocks.head_parts
        length = query.shape[TOKENS] // count
        for (queries, *operands), grain_spec, seed in self.by_grain((query, *keys, *values), spec):
            outs = []
            uses = zip(runs, queries.chunk(count, TOKENS), operands[:count], operands[count:], strict=True)
            for use, (run, *tensors) in enumerate(uses):
                at, seen = slice(run * length, (run + 1) * length), self.keys_of(run, length, spec)
                specs = specs_of(spec_of_run(grain_spec.of_use(use), at, seen, query), parts)
                by_part = zip(*(PartsApart.apply(x, parts) for x in tensors), specs, strict=True)
                for index, (q, k, v, head_spec) in enumerate(by_part, self.blocks.first_head_part):
                    with own_stream(f"{seed}/{index}/{run}", query.device) if spec.dropout else nullcontext():
                        # One part of one run: the base class's attend, since HeadParts' would split again.
                        outs.append(Heads.attend(self, q, k, v, head_spec))
            grains.append(JoinedParts.apply(parts, *outs))
        return grains[0] if len(grains) == 1 else torch.cat(grains)


def spec_of_run(spec: AttentionSpec, run: slice, keys: slice, like: Tensor) -> AttentionSpec:
    """Return the spec for one run of queries and the keys of the run's kernel call.

    A mask replaces `causal`, since kernels align the causal diagonal with the first key.

    Args:
        spec: the attention of the whole sequence.
        run: the positions of the queries in the sequence.
        keys: the positions of the keys: all, unless the attention is causal.
        like: a tensor on the device and with the dtype of the queries.
    """
    bias = spec.bias
    if bias is not None and bias.shape[TOKENS] > 1:
        bias = bias[:, :, run]
    if not spec.causal:
        seen, bias = (None if x is None else apart(x) for x in (spec.seen, bias))
        return replace(spec, seen=seen, bias=bias)
    positions = torch.arange(keys.stop, device=like.device)
    seen = positions[run, None] >= positions[keys]
    if spec.window is not None:
        seen &= positions[run, None] - positions[keys] < spec.window
    if spec.documents is None:
        return replace(spec, causal=False, window=None, seen=seen)
    starts = spec.documents.to(like.device)
    # Documents as a mask over this run's queries, since kernels by document have other shapes. Freed after the run.
    hidden = ~((starts[:, run, None] == starts[:, None, keys]) & seen).unsqueeze(1)
    bias = torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
    return replace(spec, causal=False, window=None, documents=None, bias=bias)


class _ForEachRun(torch.autograd.Function):
    """Keys and values [B, K, t, E] of this rank; returns the keys, then the values, of each run's kernel call."""

    @staticmethod
    def forward(
        ctx: Any, key: Tensor, value: Tensor, ring: GatheredRing | None, seen: Sequence[slice], leaves: Sequence[int]
    ) -> tuple[Tensor, ...]:  # fmt: skip
        ctx.ring, ctx.dtype, ctx.seen, ctx.shapes = ring, key.dtype, seen, (key.shape, value.shape)
        ctx.order = sorted(range(len(seen)), key=lambda index: leaves[index])
        wholes = (key, value) if ring is None else ring.gathered(key, value)
        return tuple(whole[:, :, keys] for whole in wholes for keys in seen)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ring, wide = ctx.ring, torch.promote_types(ctx.dtype, torch.float32)
        size = 1 if ring is None else ring.size
        sums = []
        for index, shape in enumerate(ctx.shapes):
            whole = (*shape[:TOKENS], shape[TOKENS] * size, shape[-1])

            def leaf(run: int, index: int = index, whole: Sequence[int] = whole) -> Tensor:
                # Zeros for keys without a query: every layout adds the same numbers, of equal shapes.
                gradient, keys = gradients[index * len(ctx.seen) + run], ctx.seen[run]
                addend = gradient.new_empty(whole, dtype=wide)
                addend[:, :, : keys.start].zero_()
                addend[:, :, keys] = gradient
                addend[:, :, keys.stop :].zero_()
                return addend

            sums.append(tree_sum(map(leaf, ctx.order)))
        if ring is not None:
            sums = ring.own_sums(sums)
        dk, dv = (total.to(ctx.dtype) for total in sums)
        return dk, dv, None, None, None


class GatheredRing(RingAttention):
    """Attention of a ring rank's runs of queries to gathered keys and values."""

    heads: RunsOfQueries

    def runs(self, length: int, index: int | None = None) -> tuple[range, ...]:
        if self.heads.count > self.size:
            return super().runs(length, index)
        chunk, run = length // self.size, run_of(self.index if index is None else index, self.size)
        return (range(run * chunk, (run + 1) * chunk),)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        key, value = self.heads.shared(key, value, 1)
        runs = self.runs_of(self.index)
        keys, values = self.heads.for_each_run(key, value, runs, spec, self)
        return self.heads.attend_runs(query, keys, values, runs, spec)

    def runs_of(self, index: int) -> list[int]:
        """Return the runs of queries of a rank, in the order of the rank's tokens."""
        return [run for chunk in self.runs(self.heads.count, index) for run in chunk]

    def gathered(self, *tensors: Tensor) -> list[Tensor]:
        """Gather every rank's x [B, K, T/c, E] of each of the tensors, in one call; each in the order of the sequence,
        [B, K, T, E]."""
        local = torch.cat([x.flatten() for x in tensors])
        every = local.new_empty(self.size, len(local))
        self.comm.all_gather(every, local)
        runs, wholes = [self.runs_of(rank) for rank in range(self.size)], []
        for x, of_ranks in zip(tensors, every.split([x.numel() for x in tensors], 1), strict=True):
            by_run = dict[int, Tensor]()
            for indices, of_rank in zip(runs, of_ranks, strict=True):
                by_run |= zip(indices, of_rank.view(x.shape).chunk(len(indices), TOKENS), strict=True)
            wholes.append(torch.cat([by_run[run] for run in range(self.heads.count)], TOKENS))
        return wholes

    def own_sums(self, addends: Sequence[Tensor]) -> list[Tensor]:
        """Sum every rank's addends [B, K, T, E] over ranks, in one call. Returns this rank's [B, K, T/c, E] of each."""
        runs = [self.runs_of(rank) for rank in range(self.size)]
        cut = [x.chunk(self.heads.count, TOKENS) for x in addends]
        dealt = [torch.cat([x[run] for run in indices], TOKENS).flatten() for indices in runs for x in cut]
        total = start_tree_reduce_scatter(torch.cat(dealt).view(self.size, -1), self.comm, 0).wait()
        shapes = [(*x.shape[:TOKENS], x.shape[TOKENS] // self.size, x.shape[-1]) for x in addends]
        sums = total.flatten().split([math.prod(shape) for shape in shapes])
        return [total.view(shape) for total, shape in zip(sums, shapes, strict=True)]
