"""SwiGLU (Shazeer, arXiv 2002.05202): silu(gate) · up of a linear's two groups, in one pass that saves only the input.

    silu(g) = g σ(g)        dgate = dy · up · silu'(gate),  dup = dy · silu(gate)

The clamped form (gpt-oss, arXiv 2508.10925) has a slope a and a limit c, published as 1.702 and 7:

    g σ(a g) (u + 1)        g = min(gate, c),  u = up between -c and c

On a CPU the work goes by runs of rows that stay in a core's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.tensor.gelu import SLICE_ELEMENTS, gelu


class _Swiglu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        y = torch.empty(x.shape[0], x.shape[2], dtype=x.dtype, device=x.device)
        for gate_up, value in _slices(x, y):
            torch.mul(F.silu(gate_up[:, 0]), gate_up[:, 1], out=value)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor]:
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x)
        for gate_up, slope, gradient in _slices(x, dx, dy):
            gate, up = gate_up.unbind(1)
            slope[:, 0] = torch.ops.aten.silu_backward(gradient * up, gate)
            torch.mul(gradient, F.silu(gate), out=slope[:, 1])
        return (dx,)


class _Clamped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float, limit: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope, ctx.limit = slope, limit
        y = torch.empty(x.shape[0], x.shape[2], dtype=x.dtype, device=x.device)
        for gate_up, value in _slices(x, y):
            gate = gate_up[:, 0].clamp(max=limit)
            torch.mul(gate * torch.sigmoid(gate * slope), gate_up[:, 1].clamp(-limit, limit) + 1, out=value)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        slope, limit = ctx.slope, ctx.limit
        dx = torch.empty_like(x)
        for gate_up, out, gradient in _slices(x, dx, dy):
            gate, up = gate_up[:, 0].clamp(max=limit), gate_up[:, 1].clamp(-limit, limit)
            share = torch.sigmoid(gate * slope)
            of_gate = gradient * (up + 1) * (share + slope * gate * share * (1 - share))
            torch.mul(of_gate, gate_up[:, 0] <= limit, out=out[:, 0])
            torch.mul(gradient * gate * share, gate_up[:, 1].abs() <= limit, out=out[:, 1])
        return dx, None, None


def _slices(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Runs of the same rows of each."""
    rows = tensors[0].shape[0]
    if tensors[0].device.type == "cpu":
        rows = max(1, SLICE_ELEMENTS // max(1, tensors[0][0].numel())) if rows else 1
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


def squared_relu(x: Tensor) -> Tensor:
    """The squares of an element's positive numbers (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()


def swiglu(x: Tensor) -> Tensor:
    """[..., 2, N], gates and ups -> [..., N]."""
    if torch.compiler.is_compiling():  # the compiler fuses these operations into one pass, forward and backward
        gate, up = x.unbind(-2)
        return F.silu(gate) * up
    y: Tensor = _Swiglu.apply(x.flatten(0, -3))
    return y.view(*x.shape[:-2], x.shape[-1])


def clamped_swiglu(x: Tensor, slope: float, limit: float) -> Tensor:
    """Multiply gates, bounded above, and ups, bounded on both sides, plus 1: [..., 2, N] -> [..., N].

    Args:
        x: Gates and ups.
        slope: Factor of the gate inside of the sigmoid.
        limit: The bound.
    """
    y: Tensor = _Clamped.apply(x.flatten(0, -3), slope, limit)
    return y.view(*x.shape[:-2], x.shape[-1])


def geglu(x: Tensor) -> Tensor:
    """Multiply GELU of gates, in GPT-2's form, by ups (Shazeer, arXiv 2002.05202): [..., 2, N] -> [..., N]."""
    gate, up = x.unbind(-2)
    return gelu(gate) * up


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": swiglu, "geglu": geglu, "gelu": gelu, "relu2": squared_relu,
}  # fmt: skip
"""Functions between the two linears of a feed-forward, by model.activation."""
