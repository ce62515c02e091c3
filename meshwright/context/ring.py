"""Ring attention (Liu et al., arXiv 2310.01889): blocks of keys and values go round, and what each says is merged.

Softmax over several blocks of keys needs of each its output and the log of its sum of exponentials, l:

    l = log(exp l1 + exp l2)        out = exp(l1 - l) out1 + exp(l2 - l) out2

Zigzag: of 2c chunks of a sequence rank i holds chunks i and 2c-1-i, so that causal ranks all do the same work. At step
s rank i has the block of rank j = (i - s) mod c:

| block    | causal: queries    | keys               | not causal |
|----------|--------------------|--------------------|------------|
| j = i    | both chunks        | both, the diagonal | all of all |
| j < i    | both chunks        | the first          | all of all |
| j > i    | the second         | both               | all of all |

Sends to the next rank, with n = B·A·(T/c)·E numbers: forward c - 1 blocks [2, n] of keys and values; backward these
again, and c times a block's gradients [2, n] in float32 or better, which add up on their way round and end at home.
The next block comes under a block's product, and so do the gradients of the block before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.context.context import AXIS, CutContext, document_bias
from meshwright.ranks.collectives import Moving, here
from meshwright.ranks.mesh import Mesh

TILE_ELEMENTS = 2**24
"""Scores that are there at a time where no fused kernel gives l."""


@dataclass(frozen=True)
class Block:
    """A product of attention between slices of a rank's queries and of a block's keys. `fuses`: by a CPU's kernel.

    Q [B, A, t, E]; K, V [B, A/G, s, E], each head for G queries; bias [B, 1, 1 or t, s] or None; l [B, A, t]; t = s
    where `causal`.
    """

    causal: bool
    scale: float
    fuses: bool

    def attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """The output and l, at least float32."""
        if self.fuses:
            mask = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
            out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, self.causal, attn_mask=mask, scale=self.scale
            )
            return out, sums
        key, value = (_for_each_query(x, query) for x in (key, value))
        outs, all_sums = [], []
        for rows in self._tiles(query, key):
            scores = self._scores(query[:, :, rows], key, bias, rows)
            sums = scores.logsumexp(-1)
            outs.append((scores - sums.unsqueeze(-1)).exp().to(value.dtype) @ value)
            all_sums.append(sums)
        return torch.cat(outs, 2), torch.cat(all_sums, 2)

    def gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
        bias: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The addend of dQ, and dK, dV of the block. out, sums: of the whole sequence, not of the block alone."""
        if self.fuses:
            mask = None if bias is None else bias.expand(-1, -1, query.shape[2], -1)
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                gradient, query, key, value, out, sums, 0.0, self.causal, attn_mask=mask, scale=self.scale
            )
            return dq, dk, dv
        heads, key, value = key.shape[1], _for_each_query(key, query), _for_each_query(value, query)
        inner = (gradient * out).to(sums.dtype).sum(-1, keepdim=True)
        dqs, dk, dv = [], torch.zeros_like(key, dtype=sums.dtype), torch.zeros_like(value, dtype=sums.dtype)
        for rows in self._tiles(query, key):
            scores = self._scores(query[:, :, rows], key, bias, rows)
            weights = (scores - sums[:, :, rows].unsqueeze(-1)).exp()
            dv += weights.to(gradient.dtype).transpose(-1, -2) @ gradient[:, :, rows]
            dweights = (gradient[:, :, rows] @ value.transpose(-1, -2)).to(sums.dtype)
            dscores = (weights * (dweights - inner[:, :, rows]) * self.scale).to(query.dtype)
            dqs.append(dscores @ key)
            dk += dscores.transpose(-1, -2) @ query[:, :, rows]
        dk, dv = (x.unflatten(1, (heads, -1)).sum(2) for x in (dk, dv))
        return torch.cat(dqs, 2), dk, dv

    def _tiles(self, query: Tensor, key: Tensor) -> list[slice]:
        """Runs of queries whose scores fill TILE_ELEMENTS."""
        batch, heads, count, _ = query.shape
        length = max(1, TILE_ELEMENTS // (batch * heads * key.shape[2]))
        return [slice(first, min(first + length, count)) for first in range(0, count, length)]

    def _scores(self, query: Tensor, key: Tensor, bias: Tensor | None, rows: slice) -> Tensor:
        """[B, A, rows, s], at least float32."""
        wide = torch.promote_types(query.dtype, torch.float32)
        scores = (query @ key.transpose(-1, -2)).to(wide) * self.scale
        if bias is not None:
            scores = scores + (bias if bias.shape[2] == 1 else bias[:, :, rows])
        if self.causal:
            places = torch.arange(key.shape[2], device=key.device)
            scores = scores.masked_fill(places > places[rows, None], torch.finfo(wide).min / 2)
        return scores


def _for_each_query(x: Tensor, query: Tensor) -> Tensor:
    """Keys or values [B, A/G, s, E] as many times as queries: [B, A, s, E]."""
    return x.repeat_interleave(query.shape[1] // x.shape[1], 1)


class _AroundRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float,
        ring: RingAttention,
    ) -> Tensor:  # fmt: skip
        block = torch.stack([key, value])
        ctx.save_for_backward(query, key, value, mask)
        ctx.causal, ctx.scale, ctx.ring = causal, scale, ring
        for step in range(ring.size):
            coming = ring.start(block) if step < ring.size - 1 else None
            rows, columns, product = ring.product(step, query.shape[2], causal, scale, mask)
            k, v = block[:, :, :, columns]
            part, part_sums = product.attend(query[:, :, rows], k, v, ring.bias(mask, step, rows, columns, query))
            if step == 0:
                out, sums = part.to(part_sums.dtype), part_sums.clone()
            else:
                _merge(out[:, :, rows], sums[:, :, rows], part, part_sums)
            if coming is not None:
                block = coming.wait()
        out = out.to(query.dtype)
        ctx.attended = (out, sums)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        (out, sums), ring = ctx.attended, ctx.ring
        block = torch.stack([key, value])
        dq = torch.zeros_like(query, dtype=sums.dtype)
        dcoming = here(torch.zeros_like(block, dtype=sums.dtype))  # goes behind its block, and home at the end
        for step in range(ring.size):
            coming = ring.start(block) if step < ring.size - 1 else None
            rows, columns, product = ring.product(step, query.shape[2], ctx.causal, ctx.scale, mask)
            k, v = block[:, :, :, columns]
            more_q, more_k, more_v = product.gradients(
                gradient[:, :, rows], query[:, :, rows], k, v, out[:, :, rows], sums[:, :, rows],
                ring.bias(mask, step, rows, columns, query),
            )  # fmt: skip
            dq[:, :, rows] += more_q
            dblock = dcoming.wait()
            dblock[0, :, :, columns] += more_k
            dblock[1, :, :, columns] += more_v
            dcoming = ring.start(dblock)
            if coming is not None:
                block = coming.wait()
        dk, dv = dcoming.wait().to(key.dtype)
        return dq.to(query.dtype), dk, dv, None, None, None, None


def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Take another block's output and l into those of the blocks before it."""
    both = torch.logaddexp(sums, part_sums)
    out.mul_((sums - both).exp_().unsqueeze(-1)).addcmul_(part.to(out.dtype), (part_sums - both).exp_().unsqueeze(-1))
    sums.copy_(both)


class RingAttention(CutContext):
    """Rank i holds chunks i and 2c-1-i of every sequence; keys and values go to rank i + 1."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.comm, self.fuses = mesh.comm(AXIS), mesh.device_type == "cpu"

    def runs(self, length: int) -> tuple[range, ...]:
        return self._runs(length, self.index)

    def _runs(self, length: int, index: int) -> tuple[range, ...]:
        chunk = length // (2 * self.size)
        return tuple(range(first * chunk, (first + 1) * chunk) for first in (index, 2 * self.size - 1 - index))

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        assert dropout == 0, "config refuses dropout inside of a ring"
        documents = mask is not None and mask.dtype == torch.int64
        assert mask is None or documents or not causal, "a mask of padding, where all tokens are seen, or of documents"
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        attended: Tensor = _AroundRing.apply(query, key, value, mask, causal or documents, scale, self)
        return attended

    def document_mask(self, starts: Tensor, dtype: torch.dtype) -> Tensor:
        """The starts themselves [B, T], of which each block's addend is made: T x T numbers are never there."""
        return starts

    def product(
        self, step: int, count: int, causal: bool, scale: float, mask: Tensor | None
    ) -> tuple[slice, slice, Block]:
        """The queries and the block's keys that see each other at a step, of `count` each, and their product."""
        whole, chunk = slice(0, count), count // 2
        if not causal or step == 0:
            return whole, whole, Block(causal and mask is None, scale, self.fuses)
        earlier = (self.index - step) % self.size < self.index
        rows, columns = (whole, slice(0, chunk)) if earlier else (slice(chunk, count), whole)
        return rows, columns, Block(False, scale, self.fuses)

    def bias(self, mask: Tensor | None, step: int, rows: slice, columns: slice, like: Tensor) -> Tensor | None:
        """The addend of a step's scores, [B, 1, 1, s] for padding, [B, 1, t, s] for documents: half the least number
        where a key is not seen, so that a row that sees none of a block has a finite l, and no part of the output."""
        if mask is None:
            return None
        length, unseen = mask.shape[-1], torch.finfo(like.dtype).min / 2
        keys = self._places(length, (self.index - step) % self.size, mask.device)[columns]
        if mask.dtype == torch.int64:
            queries = self._places(length, self.index, mask.device)[rows]
            return document_bias(mask[:, queries], mask[:, keys], queries, keys, like.dtype, unseen)
        seen = mask[..., keys]
        return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, unseen)

    def _places(self, length: int, index: int, device: torch.device) -> Tensor:
        """The places of a rank's tokens in their sequence."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self._runs(length, index)])

    def start(self, block: Tensor) -> Moving:
        """Begin to send a block to the next rank, and to receive the one before's."""
        came = torch.empty_like(block)
        after, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        return Moving(self.comm.exchange(block, after, came, before, wait=False), lambda: came)
