"""Head and cross entropy as one function that never holds whole logits.

The gradient of the logits, softmax - onehot, needs nothing from above but a factor, so it is computed in the forward
pass, chunk by chunk; only dh [B·T, H] and dW [V, H] are kept. A chunk's products are large enough for the matmul to be
efficient; its element-wise work goes by slices that stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100

CHUNK_BYTES = {"cpu": 8 * 2**20, "cuda": 256 * 2**20, "meta": 8 * 2**20}
"""A chunk's float32 logits [C, V]. 256 rows at V = 8192: fewer make slower products, more gain nothing."""

SLICE_BYTES = {"cpu": 2**19, "cuda": 256 * 2**20, "meta": 2**19}
"""The part of a chunk that is worked on element by element at a time: a CPU core's cache, all of it on a GPU."""


def _ranges(start: int, stop: int, row_elements: int, most_bytes: int) -> Iterator[slice]:
    """start..stop in runs of rows whose float32 elements fill `most_bytes`."""
    rows = max(1, most_bytes // (4 * row_elements))
    for first in range(start, stop, rows):
        yield slice(first, min(first + rows, stop))


def _wide(h: Tensor) -> torch.dtype:
    """Logits are at least float32."""
    return torch.promote_types(h.dtype, torch.float32)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, labels: Tensor, vocabulary: int, scale: float, differentiates: bool
    ) -> Tensor:
        table = weight[:vocabulary]  # without the padding
        counted = (labels != IGNORED).unsqueeze(1)
        targets = labels.clamp(min=0).unsqueeze(1)
        factors = counted.to(_wide(h)) * scale  # a bool times a number would be float32
        losses = h.new_empty(h.shape[0], 1, dtype=_wide(h))
        dh, dweight = (torch.empty_like(h), torch.empty_like(weight)) if differentiates else (h, weight)
        device = h.device.type
        for chunk in _ranges(0, h.shape[0], vocabulary, CHUNK_BYTES[device]):
            logits = (h[chunk] @ table.t()).to(_wide(h))  # [C, V]
            for rows in _ranges(chunk.start, chunk.stop, vocabulary, SLICE_BYTES[device]):
                part = logits[rows.start - chunk.start : rows.stop - chunk.start]
                losses[rows] = _to_gradients(part, targets[rows], factors[rows])
            if differentiates:
                gradients = logits.to(h.dtype)
                torch.mm(gradients, table, out=dh[chunk])
                dweight[:vocabulary].addmm_(gradients.t(), h[chunk], beta=0 if chunk.start == 0 else 1)
        if differentiates:
            dweight[vocabulary:] = 0
        ctx.save_for_backward(dh, dweight)
        return torch.where(counted, losses, 0).sum(dtype=torch.promote_types(h.dtype, torch.float32)) * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        dh, dweight = ctx.saved_tensors
        return dh.mul_(factor), dweight.mul_(factor), None, None, None, None


def _to_gradients(logits: Tensor, targets: Tensor, factors: Tensor) -> Tensor:
    """The losses [C, 1] of logits [C, V], which become their gradients, (softmax - onehot) · factor, in place."""
    picked = logits.gather(1, targets)
    top = logits.amax(1, keepdim=True)
    sums = logits.sub_(top).exp_().sum(1, keepdim=True)
    losses = sums.log().add_(top).sub_(picked)
    logits.scatter_add_(1, targets, -sums)
    logits.mul_(factors / sums)
    return losses


def chunked_loss(h: Tensor, weight: Tensor, labels: Tensor, vocabulary: int, scale: float) -> Tensor:
    """`scale` times the sum of the counted tokens' cross entropy.

    h [B·T, H]; weight [padded V, H]; labels [B·T], -100 is not counted; rows of the weight from `vocabulary` on are
    padding. The scale goes into the gradients as they are made, so that half-precision ones do not underflow.
    """
    if torch.is_autocast_enabled(h.device.type):
        dtype = torch.get_autocast_dtype(h.device.type)
        h, weight = h.to(dtype), weight.to(dtype)
    with torch.autocast(h.device.type, enabled=False):
        differentiates = torch.is_grad_enabled() and (h.requires_grad or weight.requires_grad)
        loss: Tensor = _ChunkedLoss.apply(h, weight, labels, vocabulary, scale, differentiates)
    return loss


@torch.no_grad()
def chunked_token_losses(h: Tensor, weight: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    """The cross entropy of every token [B·T], at least float32; 0 where the label is -100."""
    losses = h.new_zeros(h.shape[0], dtype=_wide(h))
    for rows in _ranges(0, h.shape[0], vocabulary, CHUNK_BYTES[h.device.type]):
        logits = (h[rows] @ weight[:vocabulary].t()).to(_wide(h))
        targets = labels[rows].clamp(min=0).unsqueeze(1)
        picked = logits.gather(1, targets).squeeze(1)
        losses[rows] = torch.where(labels[rows] != IGNORED, logits.logsumexp(1) - picked, 0)
    return losses
