"""Ring attention (Liu et al., arXiv 2310.01889): blocks of keys and values go round, and what each says is merged.

Softmax over several blocks of keys needs of each its output and the log of its sum of exponentials, l (kernels.py):

    l = log(exp l1 + exp l2)        out = exp(l1 - l) out1 + exp(l2 - l) out2

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

Of documents all ranks know where they begin, so a step in which no rank has a document of another's block is left out,
and a block goes straight to who needs it, its gradients straight home: short documents meet their neighbours' chunks
in 2 steps, however many ranks cut the sequence, and one that fills the row sends as much as a ring, less a way home.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.context.context import AXIS, CutContext
from meshwright.context.documents import Piece, pieces_of, reaches
from meshwright.context.kernels import Attended, Kernel, kernel_of
from meshwright.ranks.collectives import Moving, here
from meshwright.ranks.mesh import Mesh


class _AroundRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float,
        ring: RingAttention,
    ) -> Tensor:  # fmt: skip
        own = torch.stack([key, value])
        ctx.causal, ctx.scale, ctx.ring = causal, scale, ring
        ctx.kernel = ring.kernel_for(query, key, value, ring.masks(mask))
        merged: Attended | None = None
        for step, block in ring.blocks(own, mask):
            for piece in ring.pieces(step, query.shape[2], causal, mask):
                q, (k, v) = query[piece.rows, :, piece.queries], block[:, piece.rows, :, piece.keys]
                part = ctx.kernel.attend(q, k, v, ring.bias(mask, step, query), piece.causal, scale)
                if merged is not None:
                    _merge(merged, part, piece)
                elif part.sums.shape == query.shape[:3]:
                    merged = Attended(part.out.to(part.sums.dtype), part.sums.clone(), part.seeds)
                else:  # queries without keys so far; each sees at least itself later
                    nothing = part.sums.new_zeros(query.shape)
                    merged = Attended(nothing, part.sums.new_full(query.shape[:3], -torch.inf), part.seeds)
                    _merge(merged, part, piece)
        assert merged is not None, "a rank's first block is its own"
        out = merged.out.to(query.dtype)
        # All by this word: what hangs on ctx itself stays there, also where the layer is computed again.
        ctx.save_for_backward(query, key, value, mask, out, merged.sums, *merged.seeds)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, sums, *seeds = ctx.saved_tensors
        ring, kernel = ctx.ring, ctx.kernel
        gradient = gradient.contiguous()  # a sum's gradient is an expanded number, which kernels refuse
        own = torch.stack([key, value])
        dq = torch.zeros_like(query, dtype=sums.dtype)
        way = _Straight if mask is not None and not ring.masks(mask) else _Behind
        home = way(ring, own, sums.dtype)
        for step, block in ring.blocks(own, mask):
            dblock: Tensor | None = None
            for piece in ring.pieces(step, query.shape[2], ctx.causal, mask):
                at = (piece.rows, slice(None), piece.queries)
                whole, (k, v) = Attended(out[at], sums[at], tuple(seeds)), block[:, piece.rows, :, piece.keys]
                bias = ring.bias(mask, step, query)
                more = kernel.gradients(gradient[at], query[at], k, v, whole, bias, piece.causal, ctx.scale)
                dq[at] += more[0]
                if dblock is None:
                    dblock = home.block(step)  # behind a product, under which it has come
                dblock[0, piece.rows, :, piece.keys] += more[1]
                dblock[1, piece.rows, :, piece.keys] += more[2]
            home.leave(step, home.block(step) if dblock is None else dblock)
        dk, dv = home.sum().to(key.dtype)
        return dq.to(query.dtype), dk, dv, None, None, None, None


def _merge(merged: Attended, part: Attended, piece: Piece) -> None:
    """Merge another piece's output and l into those of earlier pieces."""
    out, sums = (x[piece.rows, :, piece.queries] for x in merged[:2])
    both = torch.logaddexp(sums, part.sums)
    out.mul_((sums - both).exp_().unsqueeze(-1))
    out.addcmul_(part.out.to(out.dtype), (part.sums - both).exp_().unsqueeze(-1))
    sums.copy_(both)


class RingAttention(CutContext):
    """Rank i holds chunks i and 2c-1-i of every sequence; keys and values go to rank i + 1."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh)
        self.comm, self.device_type = mesh.comm(AXIS), mesh.device_type

    def runs(self, length: int) -> tuple[range, ...]:
        return self._runs(length, self.index)

    def _runs(self, length: int, index: int) -> tuple[range, ...]:
        chunk = length // (2 * self.size)
        return tuple(range(number * chunk, (number + 1) * chunk) for number in self._chunks(index))

    def _chunks(self, index: int) -> tuple[int, int]:
        """The numbers of a rank's chunks."""
        return index, 2 * self.size - 1 - index

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool,
        scale: float | None,
    ) -> Tensor:  # fmt: skip
        assert dropout == 0, "config refuses dropout inside of a ring"
        documents = mask is not None and mask.dtype == torch.int64
        assert mask is None or documents or not causal, "a mask of padding, where all tokens are seen, or of documents"
        if mask is not None and documents:
            mask, causal = None if mask.is_meta else mask.cpu(), True
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        attended: Tensor = _AroundRing.apply(query, key, value, mask, causal, scale, self)
        return attended

    def kernel_for(self, query: Tensor, key: Tensor, value: Tensor, masked: bool) -> Kernel:
        """The kernel of every piece."""
        return kernel_of(query, key, value, masked, self.device_type)

    @staticmethod
    def masks(mask: Tensor | None) -> bool:
        """Whether scores have an addend: not for documents, which pieces keep apart."""
        return mask is not None and mask.dtype != torch.int64

    def pieces(self, step: int, count: int, causal: bool, mask: Tensor | None) -> Iterator[Piece]:
        """The queries and the block's keys that see each other at a step, of `count` each."""
        rows, whole, chunk = slice(None), slice(0, count), count // 2
        source = (self.index - step) % self.size
        if causal and mask is not None:
            yield from pieces_of(mask, chunk, self._chunks(self.index), self._chunks(source))
        elif not causal or step == 0:
            yield Piece(rows, whole, whole, causal)
        elif source < self.index:
            yield Piece(rows, whole, slice(0, chunk), False)
        else:
            yield Piece(rows, slice(chunk, count), whole, False)

    def steps(self, starts: Tensor) -> list[int]:
        """The steps in which some rank's queries see keys of its block: all ranks say the same."""
        far = reaches(starts, starts.shape[1] // (2 * self.size))
        ranks = range(self.size)
        needed = {0}
        for index in ranks:
            for source in ranks:
                chunks = [(a, b) for a in self._chunks(index) for b in self._chunks(source)]
                if any(far[a] <= b < a for a, b in chunks):
                    needed.add((index - source) % self.size)
        return sorted(needed)

    def blocks(self, own: Tensor, mask: Tensor | None) -> Iterator[tuple[int, Tensor]]:
        """(step, block of keys and values) of every step; the next one comes while one is used."""
        straight = mask is not None and not self.masks(mask)
        steps = self.steps(mask) if mask is not None and straight else list(range(self.size))
        block = own
        for step, after in zip(steps, [*steps[1:], None], strict=True):
            coming = None
            if after is not None:
                coming = self.start(own, after) if straight else self.start(block)
            yield step, block
            if coming is not None:
                block = coming.wait()

    def bias(self, mask: Tensor | None, step: int, like: Tensor) -> Tensor | None:
        """The addend of a step's scores, [B, 1, 1, s] for padding: half the least number where a key is not seen, so
        that a row that sees none of a block has a finite l, and no part of the output."""
        if mask is None or not self.masks(mask):
            return None
        seen = mask[..., self.places(mask.shape[-1], (self.index - step) % self.size, mask.device)]
        return torch.zeros_like(seen, dtype=like.dtype).masked_fill_(~seen, torch.finfo(like.dtype).min / 2)

    def places(self, length: int, index: int, device: torch.device) -> Tensor:
        """The places of a rank's tokens in their sequence."""
        return torch.cat([torch.arange(run.start, run.stop, device=device) for run in self._runs(length, index)])

    def start(self, block: Tensor, hops: int = 1) -> Moving:
        """Begin to send a block `hops` ranks on, and to receive one from as many ranks before."""
        came = torch.empty_like(block)
        after, before = (self.index + hops) % self.size, (self.index - hops) % self.size
        return Moving(self.comm.exchange(block, after, came, before, wait=False), lambda: came)


class _Behind:
    """A block's gradients travel behind it: each rank adds its part, and the sum ends at the block's owner."""

    def __init__(self, ring: RingAttention, like: Tensor, dtype: torch.dtype) -> None:
        self._ring, self._coming = ring, here(torch.zeros_like(like, dtype=dtype))

    def block(self, step: int) -> Tensor:
        """The gradients of a step's block that the ranks before have added up."""
        return self._coming.wait()

    def leave(self, step: int, dblock: Tensor) -> None:
        self._coming = self._ring.start(dblock)

    def sum(self) -> Tensor:
        return self._coming.wait()


class _Straight:
    """Each rank sends its addend to the block's owner, who sums in step order."""

    def __init__(self, ring: RingAttention, like: Tensor, dtype: torch.dtype) -> None:
        self._ring, self._like, self._dtype = ring, like, dtype
        self._total: Tensor | None = None
        self._coming: Moving | None = None

    def block(self, step: int) -> Tensor:
        return torch.zeros_like(self._like, dtype=self._dtype)

    def leave(self, step: int, dblock: Tensor) -> None:
        if self._total is None:
            self._total = dblock  # of the rank's own block, which is the first
            return
        coming = self._ring.start(dblock, -step)
        self._take()
        self._coming = coming

    def _take(self) -> None:
        """Add what is coming; one at a time, so that memory does not grow with the ranks."""
        if self._coming is not None and self._total is not None:
            self._total += self._coming.wait()
        self._coming = None

    def sum(self) -> Tensor:
        self._take()
        assert self._total is not None, "a rank's first block is its own"
        return self._total
