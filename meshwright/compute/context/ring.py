"""Ring attention (Liu et al., arXiv 2310.01889): blocks of keys and values go round, and what each says is merged.

Softmax over several blocks of keys needs of each its output and the log of its sum of exponentials, l (kernels.py):

    l = log(exp l1 + exp l2)        out = exp(l1 - l) out1 + exp(l2 - l) out2

Sinks enter once, when all blocks are merged (by_kernel.py); a rank has their gradient of its own queries.

Zigzag: of 2c chunks of a sequence rank i holds chunks i and 2c-1-i, so that causal ranks all do the same work. At step
s rank i has the block of rank j = (i - s) mod c:

| block    | causal: queries    | keys               | not causal | documents kept apart                     |
|----------|--------------------|--------------------|------------|------------------------------------------|
| j = i    | both chunks        | both, the diagonal | all of all | each document's; the one in both chunks  |
| j < i    | both chunks        | the first          | all of all | those that go on from an earlier chunk,  |
| j > i    | the second         | both               | all of all | one for two chunks at most, or nothing   |

Sends to the next rank, with n = B·A·(T/c)·E numbers: forward c - 1 blocks [2, n] of keys and values; backward these
again, and c times a block's gradients [2, n] in float32 or better, which add up on their way round and end at home.
The next block comes under a block's product, and so do the gradients of the block before.

A window cuts pieces to the keys that it leaves, and a step without pieces is left out too.

Of documents all ranks know where they begin, so a step in which no rank has a document of another's block is left out,
and a block goes straight to who needs it, its gradients straight home: short documents meet their neighbours' chunks
in 2 steps, however many ranks cut the sequence, and one that fills the row sends as much as a ring, less a way home.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.context.by_kernel import sinks_gradient, sunk
from meshwright.compute.context.context import TOKENS, CutContext
from meshwright.compute.context.documents import Piece, pieces_of
from meshwright.compute.context.kernels import Attended, Kernel
from meshwright.compute.context.spec import AttentionSpec, outside
from meshwright.compute.context.widened import kernel_for
from meshwright.ranks.collectives import Moving


class _AroundRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None, documents: Tensor | None,
        sinks: Tensor | None, spec: AttentionSpec, ring: RingAttention,
    ) -> Tensor:  # fmt: skip
        """`spec`: without tensors, with a scale."""
        own, starts = torch.stack([key, value]), ring.starts(query, spec, documents)
        ctx.spec, ctx.ring, scale = spec, ring, spec.scale
        masked = seen is not None or spec.window is not None
        ctx.kernel = ring.kernel_for(query, key, value, masked, spec.soft_cap)
        merged: Attended | None = None
        for step, block in ring.blocks(own, spec, starts):
            for piece in ring.pieces(step, query.shape[2], spec, starts):
                q, (k, v) = query[piece.rows, :, piece.queries], block[:, piece.rows, :, piece.keys]
                part = ctx.kernel.attend(q, k, v, ring.bias(piece, spec, seen, step, query), piece.causal, scale)
                if merged is not None:
                    _merge(merged, part, piece)
                elif part.sums.shape == query.shape[:3]:
                    merged = Attended(part.out.to(part.sums.dtype), part.sums.clone(), part.seeds)
                else:  # queries without keys so far; each sees at least itself later
                    nothing = part.sums.new_zeros(query.shape)
                    merged = Attended(nothing, part.sums.new_full(query.shape[:3], -torch.inf), part.seeds)
                    _merge(merged, part, piece)
        assert merged is not None, "a rank's first block is its own"
        if sinks is not None:
            merged = sunk(merged, sinks)
        out = merged.out.to(query.dtype)
        # All by this word: what hangs on ctx itself stays there, also where the layer is computed again.
        ctx.save_for_backward(query, key, value, seen, documents, sinks, out, merged.sums, *merged.seeds)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen, documents, sinks, out, sums, *seeds = ctx.saved_tensors
        spec, ring, kernel = ctx.spec, ctx.ring, ctx.kernel
        starts = ring.starts(query, spec, documents)
        gradient = gradient.contiguous()  # a sum's gradient is an expanded number, which kernels refuse
        own = torch.stack([key, value])
        dq = torch.zeros_like(query, dtype=sums.dtype)
        home = _Home(ring, own, sums.dtype, straight=starts is not None)
        for step, block in ring.blocks(own, spec, starts):
            dblock: Tensor | None = None
            for piece in ring.pieces(step, query.shape[2], spec, starts):
                at = (piece.rows, slice(None), piece.queries)
                whole, (k, v) = Attended(out[at], sums[at], tuple(seeds)), block[:, piece.rows, :, piece.keys]
                bias = ring.bias(piece, spec, seen, step, query)
                more = kernel.gradients(gradient[at], query[at], k, v, whole, bias, piece.causal, spec.scale)
                dq[at] += more[0]
                if dblock is None:
                    dblock = home.block()  # behind a product, under which it has come
                dblock[0, piece.rows, :, piece.keys] += more[1]
                dblock[1, piece.rows, :, piece.keys] += more[2]
            home.leave(step, home.block() if dblock is None else dblock)
        dk, dv = home.sum().to(key.dtype)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:  # of this rank's queries
            dsinks = sinks_gradient(gradient, Attended(out, sums), sinks)
        return dq.to(query.dtype), dk, dv, None, None, dsinks, None, None


def _merge(merged: Attended, part: Attended, piece: Piece) -> None:
    """Merge another piece's output and l into those of earlier pieces."""
    out, sums = (x[piece.rows, :, piece.queries] for x in merged[:2])
    both = torch.logaddexp(sums, part.sums)
    out.mul_((sums - both).exp_().unsqueeze(-1))
    out.addcmul_(part.out.to(out.dtype), (part.sums - both).exp_().unsqueeze(-1))
    sums.copy_(both)


class RingAttention(CutContext):
    """Rank i holds chunks i and 2c-1-i of every sequence; keys and values go to rank i + 1."""

    def chunks(self, index: int) -> tuple[int, int]:
        """The numbers of a rank's chunks."""
        return index, 2 * self.size - 1 - index

    def runs(self, length: int, index: int | None = None) -> tuple[range, ...]:
        """This rank's tokens of a sequence, or those of the rank `index`: its two chunks."""
        chunk = length // (2 * self.size)
        numbers = self.chunks(self.index if index is None else index)
        return tuple(range(number * chunk, (number + 1) * chunk) for number in numbers)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        spec.only("causal", "window", "scale", "documents", "seen", "soft_cap", "sinks", by="a ring")
        spec = spec.within(query.shape[TOKENS] * self.size)
        documents = None if spec.documents is None or spec.documents.is_meta else spec.documents.cpu()
        scale = query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
        alone = replace(spec, scale=scale, seen=None, documents=None, sinks=None)
        attended: Tensor = _AroundRing.apply(query, key, value, spec.seen, documents, spec.sinks, alone, self)
        return attended

    def kernel_for(self, query: Tensor, key: Tensor, value: Tensor, masked: bool, cap: float | None) -> Kernel:
        """The kernel of every piece."""
        device_type, widens = self.mesh.device_type, self.heads.widens
        return kernel_for(query, key, value, masked, device_type, cap=cap, widens=widens)

    def starts(self, query: Tensor, spec: AttentionSpec, documents: Tensor | None) -> np.ndarray | None:
        """The place [B, T] at which each token's document begins; a row of a window without documents is one."""
        if documents is not None or spec.window is None:
            return None if documents is None else documents.numpy()
        return np.zeros((query.shape[0], query.shape[TOKENS] * self.size), dtype=np.int64)

    def pieces(self, step: int, count: int, spec: AttentionSpec, starts: np.ndarray | None) -> Iterator[Piece]:
        """The queries and the block's keys that see each other at a step, of `count` each."""
        rows, whole, chunk = slice(None), slice(0, count), count // 2
        source = (self.index - step) % self.size
        if starts is not None:
            yield from pieces_of(starts, chunk, self.chunks(self.index), self.chunks(source), spec.window)
        elif not spec.causal or step == 0:
            yield Piece(rows, whole, whole, spec.causal)
        elif source < self.index:
            yield Piece(rows, whole, slice(0, chunk), False)
        else:
            yield Piece(rows, slice(chunk, count), whole, False)

    def steps(self, starts: np.ndarray, window: int | None) -> list[int]:
        """The steps in which some rank's queries see keys of its block: all ranks say the same."""
        chunk = starts.shape[1] // (2 * self.size)
        # For each chunk the first chunk whose keys some row's queries in it see: the documents that a chunk begins with
        # reach furthest back, as far as the window of the chunk's first query.
        begins = starts[:, ::chunk].min(0)
        if window is not None:
            begins = np.maximum(begins, np.arange(0, starts.shape[1], chunk) - window + 1)
        far = (begins // chunk).tolist()
        ranks = range(self.size)
        needed = {0}
        for index in ranks:
            for source in ranks:
                chunks = [(a, b) for a in self.chunks(index) for b in self.chunks(source)]
                if any(far[a] <= b < a for a, b in chunks):
                    needed.add((index - source) % self.size)
        return sorted(needed)

    def blocks(
        self, own: Tensor, spec: AttentionSpec, starts: np.ndarray | None
    ) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
        """(step, block of keys and values) of every step; the next one comes while one is used."""
        steps = list(range(self.size)) if starts is None else self.steps(starts, spec.window)
        block = own
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            coming = None
            if after is not None:
                coming = self.start(block) if starts is None else self.start(own, after)
            yield step, block
            if coming is not None:
                block = coming.wait()

    def bias(
        self, piece: Piece, spec: AttentionSpec, seen: Tensor | None, step: int, like: Tensor
    ) -> Tensor | None:  # fmt: skip
        """The addend of a piece's scores, [B, 1, 1, s] for padding, [1, 1, t, s] for a window: half the least number
        where a key is not seen, so that a row that sees none of a block has a finite l, and no part of the output."""
        if piece.ahead is not None and spec.window is not None:
            queries, keys = (run.stop - run.start for run in (piece.queries, piece.keys))
            hidden = outside(spec.window, piece.ahead, queries, keys, like.device)[None, None]
        elif seen is not None:
            source = (self.index - step) % self.size
            hidden = ~seen[..., self.positions(0, seen.shape[-1] // self.size, seen.device, source)]
        else:
            return None
        return torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, torch.finfo(like.dtype).min / 2)

    def start(self, block: Tensor, hops: int = 1) -> Moving:
        """Begin to send a block `hops` ranks on, and to receive one from as many ranks before."""
        came = torch.empty_like(block)
        after, before = (self.index + hops) % self.size, (self.index - hops) % self.size
        return Moving(self.comm.exchange(block, after, came, before, wait=False), lambda: came)


@dataclass
class _Home:
    """The way of blocks' gradients to their owners. Behind a block: each rank adds its part, and the sum ends at the
    owner. Straight: each rank sends its addend there, and the owner sums in step order. `own`: the rank's own block,
    and `dtype` that of gradients."""

    ring: RingAttention
    own: Tensor
    dtype: torch.dtype
    straight: bool
    _total: Tensor | None = None
    _coming: Moving | None = None

    def block(self) -> Tensor:
        """Where a step's block has its gradients added: zeros, or behind a block what the ranks before added up."""
        if self.straight or self._coming is None:
            return torch.zeros_like(self.own, dtype=self.dtype)
        return self._coming.wait()

    def leave(self, step: int, dblock: Tensor) -> None:
        """Send the gradients of a step's block on."""
        if not self.straight:
            self._coming = self.ring.start(dblock)
        elif self._total is None:
            self._total = dblock  # of the rank's own block, which is the first
        else:
            coming = self.ring.start(dblock, -step)
            self.sum()  # one comes at a time, so that memory does not grow with the ranks
            self._coming = coming

    def sum(self) -> Tensor:
        """The gradients of this rank's own block, as far as they are on their way."""
        if self._coming is not None:
            came, self._coming = self._coming.wait(), None
            self._total = came if self._total is None else self._total.add_(came)
        assert self._total is not None, "a rank's first block is its own"
        return self._total
