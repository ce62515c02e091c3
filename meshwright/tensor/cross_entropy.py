"""Head and cross entropy as one function that never holds whole logits.

The gradient of the logits, softmax - onehot, needs nothing from above but a factor, so it is computed in the forward
pass, chunk by chunk, while the chunk's logits [C, V] are in cache; only dh [B·T, H] and dW [V, H] are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORED = -100
CHUNK_BYTES = 2**21


def _chunk_rows(padded: int) -> int:
    """Rows whose float32 logits fill CHUNK_BYTES."""
    return max(16, CHUNK_BYTES // (4 * padded))


def _chunks(h: Tensor, weight: Tensor, labels: Tensor, vocabulary: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
    """(rows, logits in float32 or better, log of the softmax's denominator, counted) of each chunk."""
    rows = _chunk_rows(weight.shape[0])
    for start in range(0, h.shape[0], rows):
        chunk = slice(start, start + rows)
        logits = (h[chunk] @ weight.t()).to(torch.promote_types(h.dtype, torch.float32))  # [C, V]
        logits[:, vocabulary:] = -torch.inf
        yield chunk, logits, logits.logsumexp(1), labels[chunk] != IGNORED


def _losses(logits: Tensor, log_sum: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    target = logits.gather(1, labels.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(counted, log_sum - target, torch.zeros((), dtype=logits.dtype, device=logits.device))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, labels: Tensor, vocabulary: int, scale: float, needs: tuple[bool, bool]
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.promote_types(h.dtype, torch.float32), device=h.device)
        dh = torch.empty_like(h)
        dweight = torch.zeros_like(weight)
        for rows, logits, log_sum, counted in _chunks(h, weight, labels, vocabulary):
            total += _losses(logits, log_sum, labels[rows], counted).sum()
            if any(needs):
                gradient = logits.sub_(log_sum.unsqueeze(1)).exp_()  # the softmax, in the logits' memory
                targets = labels[rows].clamp(min=0).unsqueeze(1)
                gradient.scatter_add_(1, targets, gradient.new_full((), -1.0).expand_as(targets))
                gradient.mul_(counted.unsqueeze(1) * scale)
                gradient = gradient.to(h.dtype)
                torch.mm(gradient, weight, out=dh[rows])
                dweight.addmm_(gradient.t(), h[rows])
        ctx.save_for_backward(dh, dweight)
        return total * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        dh, dweight = ctx.saved_tensors
        if factor != 1:
            dh, dweight = dh * factor, dweight * factor
        return dh, dweight, None, None, None, None


def chunked_loss(h: Tensor, weight: Tensor, labels: Tensor, vocabulary: int, scale: float) -> Tensor:
    """`scale` times the sum of the counted tokens' cross entropy.

    h [B·T, H]; weight [padded V, H]; labels [B·T], -100 is not counted; rows of the weight from `vocabulary` on are
    padding. The scale goes into the gradients as they are made, so that half-precision ones do not underflow.
    """
    if torch.is_autocast_enabled(h.device.type):
        dtype = torch.get_autocast_dtype(h.device.type)
        h, weight = h.to(dtype), weight.to(dtype)
    with torch.autocast(h.device.type, enabled=False):
        needs = (h.requires_grad, weight.requires_grad) if torch.is_grad_enabled() else (False, False)
        loss: Tensor = _ChunkedLoss.apply(h, weight, labels, vocabulary, scale, needs)
    return loss


@torch.no_grad()
def chunked_token_losses(h: Tensor, weight: Tensor, labels: Tensor, vocabulary: int) -> Tensor:
    """The cross entropy of every token [B·T]; 0 where the label is -100."""
    parts = [
        _losses(logits, log_sum, labels[rows], counted)
        for rows, logits, log_sum, counted in _chunks(h, weight, labels, vocabulary)
    ]
    return torch.cat(parts)
