"""Attention of whole sequences by one kernel, and sinks, which every kernel has that returns l (kernels.py)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.context.kernels import Attended, Kernel


def sunk(whole: Attended, sinks: Tensor) -> Attended:
    """Add a sink [A] a head to the softmax of all of a query's keys.

    A sink s is a score without a value: l' = log(exp l + exp s), and out' = exp(l - l') out. From out' and l' a
    backward kernel computes the gradients of Q, K and V.
    """
    sums = torch.logaddexp(whole.sums, sinks.to(whole.sums.dtype)[:, None])
    shares = (whole.sums - sums).exp_().unsqueeze(-1)
    return whole._replace(out=(whole.out * shares).to(whole.out.dtype), sums=sums)


def sinks_gradient(gradient: Tensor, whole: Attended, sinks: Tensor) -> Tensor:
    """The gradient [A] of sinks: ds = - sum over B and t of exp(s - l') (d out' · out'). `whole`: of `sunk`."""
    sums = whole.sums
    inner = (gradient.to(sums.dtype) * whole.out).sum(-1)
    shares = (sinks.to(sums.dtype)[:, None] - sums).exp_()
    return (shares * inner).sum((0, 2)).neg_().to(sinks.dtype)


class ByKernel(torch.autograd.Function):
    """A kernel's attention of whole sequences, with sinks [A] or None."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, sinks: Tensor | None, causal: bool,
        scale: float, kernel: Kernel,
    ) -> Tensor:  # fmt: skip
        whole = kernel.attend(query, key, value, bias, causal, scale)
        if sinks is not None:
            whole = sunk(whole, sinks)
        ctx.save_for_backward(query, key, value, bias, sinks, *whole[:2], *whole.seeds)
        ctx.causal, ctx.scale, ctx.kernel = causal, scale, kernel
        return whole.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, bias, sinks, out, sums, *seeds = ctx.saved_tensors
        whole = Attended(out, sums, tuple(seeds))
        if 0 in gradient.stride():  # a sum's gradient is an expanded number, which kernels refuse
            gradient = gradient.contiguous()
        dq, dk, dv = ctx.kernel.gradients(gradient, query, key, value, whole, bias, ctx.causal, ctx.scale)
        dsinks = sinks_gradient(gradient, whole, sinks) if sinks is not None and ctx.needs_input_grad[4] else None
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), None, dsinks, None, None, None
