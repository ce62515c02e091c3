"""Attention with a soft cap or sinks, which F.scaled_dot_product_attention does not support.

| spec                                            | computed by                             | holds               |
|-------------------------------------------------|-----------------------------------------|---------------------|
| sinks                                           | the device's fused kernel (`kernel_of`) | no scores           |
| soft cap, also with sinks                       | `Capped`: products over tiles of scores | tiles of scores     |
| dropout, or a bias with a gradient, with either | torch's operators, step by step         | [B, A, T, S] scores |

Documents and windows call this function for blocks of tokens (documents.py), on a GPU too: a soft cap and sinks are not
arguments of the kernel that takes all documents at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshwright.compute.context.by_kernel import ByKernel
from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.context.widened import HALVES, kernel_for


def attend_shaped(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, spec: AttentionSpec, widens: bool
) -> Tensor:  # fmt: skip
    """Attend with a soft cap or sinks.

    Args:
        query: [B, A, T, E].
        key: [B, A/G, S, E].
        value: [B, A/G, S, E].
        mask: F.scaled_dot_product_attention's; None: no mask.
        causal: each query sees itself and the keys before; T = S.
        spec: gives scale, dropout, soft cap and sinks; other fields are not read.
        widens: a CPU's kernel gets halves as float32 (widened.py).

    Returns:
        The output [B, A, T, E].
    """
    device = "cpu" if query.is_meta else query.device.type
    casts = torch.is_autocast_enabled(device) and query.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if casts else query.dtype
    query, key, value = (x.to(dtype) for x in (query, key, value))
    bias = None if mask is None else addend(mask, dtype)
    scale = query.shape[-1] ** -0.5 if spec.scale is None else spec.scale
    with torch.autocast(device, enabled=False):
        if spec.dropout or (bias is not None and bias.requires_grad):
            return attend_in_steps(query, key, value, bias, causal, scale, spec, widens)
        kernel = kernel_for(query, key, value, bias is not None, device, cap=spec.soft_cap, widens=widens)
        attended: Tensor = ByKernel.apply(query, key, value, bias, spec.sinks, causal, scale, kernel)
        return attended


def addend(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask as an addend [B or 1, A or 1, T or 1, S]: half of the least number for hidden keys.

    Half, so that a row without visible keys has finite sums.
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min / 2)
    return mask[(None,) * (4 - mask.dim())].to(dtype)


def attend_in_steps(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, causal: bool, scale: float, spec: AttentionSpec,
    widens: bool,
) -> Tensor:  # fmt: skip
    """Attend by torch's operators, with gradients by autograd: for dropout of weights, or a bias with a gradient."""
    dtype = query.dtype
    if widens and dtype in HALVES:
        query, key, value = (x.float() for x in (query, key, value))
    if (groups := query.shape[1] // key.shape[1]) > 1:
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.mT).to(torch.promote_types(dtype, torch.float32)) * scale
    if spec.soft_cap is not None:
        scores = torch.tanh(scores / spec.soft_cap) * spec.soft_cap
    if bias is not None:
        scores = scores + bias
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    sums = scores.logsumexp(-1, keepdim=True)
    if spec.sinks is not None:
        sums = torch.logaddexp(sums, spec.sinks.to(sums.dtype)[:, None, None])
    weights = torch.dropout((scores - sums).exp(), spec.dropout, True)
    return (weights.to(value.dtype) @ value).to(dtype)
