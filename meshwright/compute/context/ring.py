"""Ring attention (Liu et al., arXiv 2310.01889): ranks pass blocks of keys and values on and merge partial outputs.

Each block of keys gives a partial output and l, the log of the sum of exponentials (kernels.py). Two are merged by:

    l = log(exp l1 + exp l2)        out = exp(l1 - l) out1 + exp(l2 - l) out2

Sinks are added once, after all blocks are merged (by_kernel.py). A rank computes the sinks' gradient for its queries.

Zigzag: a sequence has 2c chunks, and rank i holds chunks i and 2c-1-i. All ranks then have equal work under a causal
mask. At step s rank i has the block of rank j = (i - s) mod c:

| block    | causal: queries    | keys               | not causal | separate documents                       |
|----------|--------------------|--------------------|------------|------------------------------------------|
| j = i    | both chunks        | both, the diagonal | all of all | each document's; the one in both chunks  |
| j < i    | both chunks        | the first          | all of all | documents that began in an earlier chunk,|
| j > i    | the second         | both               | all of all | one for two chunks at most, or nothing   |

Sends to the next rank, with n = B·A·(T/c)·E numbers: forward c - 1 blocks [2, n] of keys and values. Backward the same
blocks, and c times a block's gradients [2, n] in float32 or wider. Each rank adds to the gradients and passes them on;
the sum ends at the block's owner. The next block and the previous block's gradients are received during a product.

A window limits pieces to the visible keys. A step without pieces is skipped.

All ranks know the first token of each document. A step is skipped if no rank needs another rank's block in that step.
A block is sent directly to the rank that needs it, and its gradients directly to the owner. Short documents need only
the neighbours' chunks: 2 steps for any number of ranks. A document that fills the row sends the bytes of a ring, except
for the last send to the owner.
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
        """Compute the attention of this rank's queries. `spec` has a scale and no tensors."""
        local, starts = torch.stack([key, value]), ring.starts(query, spec, documents)
        ctx.spec, ctx.ring, scale = spec, ring, spec.scale
        masked = seen is not None or spec.window is not None
        ctx.kernel = ring.kernel_for(query, key, value, masked, spec.soft_cap)
        merged: Attended | None = None
        for step, block in ring.blocks(local, spec, starts):
            for piece in ring.pieces(step, query.shape[2], spec, starts):
                q, (k, v) = query[piece.rows, :, piece.queries], block[:, piece.rows, :, piece.keys]
                attended = ctx.kernel.attend(q, k, v, ring.bias(piece, spec, seen, step, query), piece.causal, scale)
                if merged is not None:
                    _merge(merged, attended, piece)
                elif attended.sums.shape == query.shape[:3]:
                    merged = Attended(attended.out.to(attended.sums.dtype), attended.sums.clone(), attended.seeds)
                else:  # some queries have no keys yet; each attends to at least its own token later
                    nothing = attended.sums.new_zeros(query.shape)
                    merged = Attended(nothing, attended.sums.new_full(query.shape[:3], -torch.inf), attended.seeds)
                    _merge(merged, attended, piece)
        assert merged is not None, "a rank's first block is its own"
        if sinks is not None:
            merged = sunk(merged, sinks)
        out = merged.out.to(query.dtype)
        # Save all tensors this way: attributes of ctx would stay allocated even if the layer is recomputed.
        ctx.save_for_backward(query, key, value, seen, documents, sinks, out, merged.sums, *merged.seeds)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, seen, documents, sinks, out, sums, *seeds = ctx.saved_tensors
        spec, ring, kernel = ctx.spec, ctx.ring, ctx.kernel
        starts = ring.starts(query, spec, documents)
        gradient = gradient.contiguous()  # a sum's gradient is an expanded scalar, which kernels reject
        local = torch.stack([key, value])
        dq = torch.zeros_like(query, dtype=sums.dtype)
        home = _Home(ring, local, sums.dtype, straight=starts is not None)
        for step, block in ring.blocks(local, spec, starts):
            dblock: Tensor | None = None
            for piece in ring.pieces(step, query.shape[2], spec, starts):
                at = (piece.rows, slice(None), piece.queries)
                whole, (k, v) = Attended(out[at], sums[at], tuple(seeds)), block[:, piece.rows, :, piece.keys]
                bias = ring.bias(piece, spec, seen, step, query)
                more = kernel.gradients(gradient[at], query[at], k, v, whole, bias, piece.causal, spec.scale)
                dq[at] += more[0]
                if dblock is None:
                    dblock = home.block()  # after a product, which overlaps the receive
                dblock[0, piece.rows, :, piece.keys] += more[1]
                dblock[1, piece.rows, :, piece.keys] += more[2]
            home.leave(step, home.block() if dblock is None else dblock)
        dk, dv = home.sum().to(key.dtype)
        dsinks = None
        if sinks is not None and ctx.needs_input_grad[5]:  # of this rank's queries
            dsinks = sinks_gradient(gradient, Attended(out, sums), sinks)
        return dq.to(query.dtype), dk, dv, None, None, dsinks, None, None


def _merge(merged: Attended, attended: Attended, piece: Piece) -> None:
    """Merge another piece's output and l into the merged output and l of earlier pieces."""
    out, sums = (x[piece.rows, :, piece.queries] for x in merged[:2])
    both = torch.logaddexp(sums, attended.sums)
    out.mul_((sums - both).exp_().unsqueeze(-1))
    out.addcmul_(attended.out.to(out.dtype), (attended.sums - both).exp_().unsqueeze(-1))
    sums.copy_(both)


class RingAttention(CutContext):
    """Context with chunks i and 2c-1-i of every sequence on rank i; rank i sends keys and values to rank i + 1."""

    def chunks(self, index: int) -> tuple[int, int]:
        """Return the indices of a rank's two chunks."""
        return index, 2 * self.size - 1 - index

    def runs(self, length: int, index: int | None = None) -> tuple[range, ...]:
        """Return the tokens of the two chunks of rank `index` (default: this rank) in a sequence of `length`."""
        chunk = length // (2 * self.size)
        numbers = self.chunks(self.index if index is None else index)
        return tuple(range(chunk_index * chunk, (chunk_index + 1) * chunk) for chunk_index in numbers)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        spec.only("causal", "window", "scale", "documents", "seen", "soft_cap", "sinks", by="a ring")
        spec = spec.within(query.shape[TOKENS] * self.size)
        documents = None if spec.documents is None or spec.documents.is_meta else spec.documents.cpu()
        scale = query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
        alone = replace(spec, scale=scale, seen=None, documents=None, sinks=None)
        attended: Tensor = _AroundRing.apply(query, key, value, spec.seen, documents, spec.sinks, alone, self)
        return attended

    def kernel_for(self, query: Tensor, key: Tensor, value: Tensor, masked: bool, cap: float | None) -> Kernel:
        """Choose the kernel for all pieces."""
        device_type, widens = self.mesh.device_type, self.heads.widens
        return kernel_for(query, key, value, masked, device_type, cap=cap, widens=widens)

    def starts(self, query: Tensor, spec: AttentionSpec, documents: Tensor | None) -> np.ndarray | None:
        """Return the index [B, T] of the first token of each token's document; None without documents and window.

        With a window and no documents, each row counts as one document.
        """
        if documents is not None or spec.window is None:
            return None if documents is None else documents.numpy()
        return np.zeros((query.shape[0], query.shape[TOKENS] * self.size), dtype=np.int64)

    def pieces(self, step: int, count: int, spec: AttentionSpec, starts: np.ndarray | None) -> Iterator[Piece]:
        """Yield the pieces of a step: queries and block keys that may attend, out of `count` of each."""
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
        """Return the steps with queries, on any rank, that attend to the received block; equal on all ranks."""
        chunk = starts.shape[1] // (2 * self.size)
        # Find the first chunk with keys for each chunk's queries, in any row. The document at the chunk's first token
        # reaches furthest back, limited by the window of the chunk's first query.
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
        self, local: Tensor, spec: AttentionSpec, starts: np.ndarray | None
    ) -> Iterator[tuple[int, Tensor]]:  # fmt: skip
        """Yield (step, block of keys and values) for each step; the next block is received while one is used."""
        steps = list(range(self.size)) if starts is None else self.steps(starts, spec.window)
        block = local
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            coming = None
            if after is not None:
                coming = self.start(block) if starts is None else self.start(local, after)
            yield step, block
            if coming is not None:
                block = coming.wait()

    def bias(
        self, piece: Piece, spec: AttentionSpec, seen: Tensor | None, step: int, like: Tensor
    ) -> Tensor | None:  # fmt: skip
        """Return the bias of a piece's scores, [B, 1, 1, s] for padding or [1, 1, t, s] for a window; None without.

        Masked keys get half of the dtype's least number. A row with no visible key in a block then has a finite l and
        adds nothing to the output.
        """
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
        """Start to send a block to rank i + `hops` and to receive one from rank i - `hops`."""
        came = torch.empty_like(block)
        after, before = (self.index + hops) % self.size, (self.index - hops) % self.size
        return Moving(self.comm.exchange(block, after, came, before, wait=False), lambda: came)


@dataclass
class _Home:
    """Sends of blocks' gradients to the blocks' owners.

    Around the ring: each rank adds its part and passes the sum on, until the owner receives the whole. `straight`: each
    rank sends its part directly to the owner, which sums in step order. `local`: this rank's block. `dtype`: the dtype
    of gradients.
    """

    ring: RingAttention
    local: Tensor
    dtype: torch.dtype
    straight: bool
    _total: Tensor | None = None
    _coming: Moving | None = None

    def block(self) -> Tensor:
        """Return the tensor for a step's gradients: zeros, or around the ring the sum received from other ranks."""
        if self.straight or self._coming is None:
            return torch.zeros_like(self.local, dtype=self.dtype)
        return self._coming.wait()

    def leave(self, step: int, dblock: Tensor) -> None:
        """Start to send the gradients of a step's block."""
        if not self.straight:
            self._coming = self.ring.start(dblock)
        elif self._total is None:
            self._total = dblock  # the first step is the rank's own block
        else:
            coming = self.ring.start(dblock, -step)
            self.sum()  # one receive at a time, so that memory does not grow with the number of ranks
            self._coming = coming

    def sum(self) -> Tensor:
        """Wait for the pending receive and return the sum so far of the gradients of this rank's block."""
        if self._coming is not None:
            came, self._coming = self._coming.wait(), None
            self._total = came if self._total is None else self._total.add_(came)
        assert self._total is not None, "a rank's first block is its own"
        return self._total
