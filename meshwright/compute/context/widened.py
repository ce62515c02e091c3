"""Attention in half precision on CPUs with slow half-precision products: backward in float32 (precision.products).

The forward kernel reads halves as fast as float32, the backward kernel does not. Operands of the backward kernel are
widened, and gradients are rounded once; halves alone are kept in between.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from meshwright.compute.context.by_kernel import ByKernel
from meshwright.compute.context.kernels import Attended, Capped, CpuKernel, Kernel, kernel_of

HALVES = (torch.bfloat16, torch.float16)


class WidenedKernel(CpuKernel):
    """The CPU's kernel, with float32 operands in the backward pass."""

    def gradients(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, whole: Attended, bias: Tensor | None,
        causal: bool, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        half = query.dtype
        if half not in HALVES:
            return super().gradients(gradient, query, key, value, whole, bias, causal, scale)
        wide = None if bias is None else bias.float()
        whole = whole._replace(out=whole.out.float())
        gradient, query, key, value = (x.float() for x in (gradient, query, key, value))
        dq, dk, dv = super().gradients(gradient, query, key, value, whole, wide, causal, scale)
        return dq.to(half), dk.to(half), dv.to(half)


WIDENED = WidenedKernel()


def kernel_for(
    query: Tensor, key: Tensor, value: Tensor, masked: bool, device_type: str, *, cap: float | None, widens: bool
) -> Kernel:  # fmt: skip
    """The kernel on that device type for tensors like these: with a soft cap, and of halves widened, if asked."""
    if cap is not None:
        return Capped(cap, widens)
    kernel = kernel_of(query, key, value, masked, device_type)
    return WIDENED if widens and isinstance(kernel, CpuKernel) else kernel


def attend_widened(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, dropout: float = 0.0, causal: bool = False,
    *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Compute F.scaled_dot_product_attention; of halves with float32 operands in the backward pass.

    Without a fused kernel (dropout, a mask with a gradient, values of another width) all of it is in float32.
    """
    if has_torch_function((query,)):  # a plan's device may have no fused attention (on_device.py)
        planned: Tensor = handle_torch_function(
            attend_widened, (query,), query, key, value, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa
        )
        return planned
    device = "cpu" if query.is_meta else query.device.type
    half = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype
    if half not in HALVES:
        return F.scaled_dot_product_attention(
            query, key, value, mask, dropout, causal, scale=scale, enable_gqa=enable_gqa
        )  # fmt: skip
    q, k, v = (x.to(half) for x in (query, key, value))
    floating = mask is not None and mask.is_floating_point()
    fused = dropout == 0 and not (mask is not None and mask.requires_grad) and q.shape[-1] == v.shape[-1]
    with torch.autocast(device, enabled=False):
        if not fused:
            wide = mask.float() if mask is not None and floating else mask
            attended = F.scaled_dot_product_attention(
                q.float(), k.float(), v.float(), wide, dropout, causal, scale=scale, enable_gqa=enable_gqa
            )
            return attended.to(half)
        bias = mask
        if mask is not None:
            added = mask if floating else torch.where(mask, 0.0, -torch.inf)
            bias = added.to(half).expand(*added.shape[:-2], q.shape[2], added.shape[-1])
            bias = bias[(None,) * (4 - bias.dim())]  # masks of windows are [T, S]
        factor = q.shape[-1] ** -0.5 if scale is None else scale
        out: Tensor = ByKernel.apply(q, k, v, bias, None, causal, factor, WIDENED)
    return out
