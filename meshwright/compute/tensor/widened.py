"""Half-precision products as float32 products of the same numbers, on CPUs without fast half-precision products.

A CPU with AVX-512-BF16 or AMX multiplies bf16 faster than float32; other CPUs take 20 to 120 times as long
(github.com/pytorch/pytorch/issues/146508). On these CPUs operands are cast to float32, multiplied and rounded once,
like a bf16 product with float32 accumulation. Weights, activations and gradients are still stored in half precision.
Attention's backward kernel is in context/widened.py; the forward kernel reads halves as fast as float32.

| `precision.products` | a product reads  | adds up in | gives   |
|----------------------|------------------|------------|---------|
| stored               | halves           | float32    | a half  |
| float32              | widened halves   | float32    | a half  |
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.tensor.linear import autocast_device, autocast_dtype
from meshwright.compute.tensor.products import Products
from meshwright.ranks.machine import SLOW_SHARE

SIDE, TRIES = 128, 5
"""The side of the products that are timed, and how many are: 4 Mflop each, 6 ms at the slowest rate that was seen."""

HALVES = (torch.bfloat16, torch.float16)


class Rates(NamedTuple):
    """Flop a second of one thread's product of matrices, in float32 and in a half."""

    float32: float
    half: float

    @property
    def slow(self) -> bool:
        return self.half < SLOW_SHARE * self.float32


@cache
def product_rates(half: str) -> Rates:
    """This CPU's rates in float32 and in bf16 or fp16, the best of some tries: other processes may be at work. Timed
    once a process."""
    threads, rates = torch.get_num_threads(), []
    torch.set_num_threads(1)
    for dtype in (torch.float32, {"bf16": torch.bfloat16, "fp16": torch.float16}[half]):
        a, b = torch.ones(2, SIDE, SIDE, dtype=dtype).unbind()
        seconds = []
        for _ in range(TRIES + 1):  # the first one chooses the kernel
            began = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - began)
        rates.append(2 * SIDE**3 / min(seconds[1:]))
    torch.set_num_threads(threads)
    return Rates(*rates)


def half_of(x: Tensor) -> torch.dtype | None:
    """Return the half-precision dtype of products of x, also under autocast; None for other dtypes."""
    dtype = autocast_dtype(x) or x.dtype
    return dtype if dtype in HALVES else None


class WidenedProducts(Products):
    """Products of halves as float32 products of the same numbers, rounded once."""

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        if (half := half_of(a)) is None:
            return super().multiply(a, b, bias, out)
        with torch.autocast(autocast_device(a.device), enabled=False):
            wide = None if bias is None else bias.to(half).float()
            product = super().multiply(a.to(half).float(), b.to(half).float(), wide)
            return product.to(half) if out is None else out.copy_(product)

    def write_product(self, a: Tensor, b: Tensor, out: Tensor, beta: int) -> None:
        if not beta and out.dtype == a.dtype:
            self.multiply(a, b, out=out)
        elif out.dtype == a.dtype and a.dtype in HALVES:
            wide = out.float()
            super().write_product(a.float(), b.float(), wide, beta)
            out.copy_(wide)
        else:
            super().write_product(a, b, out, beta)

    def convolve(self, x: Tensor, kernels: Tensor, stride: int, padding: int, groups: int) -> Tensor:
        if (half := half_of(x)) is None:
            return super().convolve(x, kernels, stride, padding, groups)
        y: Tensor = _Convolve.apply(x.to(half), kernels.to(half), (stride, padding, groups))
        return y


class _Convolve(torch.autograd.Function):
    """A convolution of halves in float32, which keeps the halves alone for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Tensor, shape: tuple[int, int, int]) -> Tensor:
        ctx.save_for_backward(x, kernels)
        ctx.shape = shape
        stride, padding, groups = shape
        with torch.autocast(autocast_device(x.device), enabled=False):
            return F.conv2d(x.float(), kernels.float(), None, stride, padding, 1, groups).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, kernels = ctx.saved_tensors
        stride, padding, groups = ctx.shape
        dx, dkernels, _ = torch.ops.aten.convolution_backward(
            dy.float(), x.float(), kernels.float(), None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], groups,
            [*ctx.needs_input_grad[:2], False],
        )  # fmt: skip
        dx, dkernels = (None if each is None else each.to(x.dtype) for each in (dx, dkernels))
        return dx, dkernels, None


WIDENED = WidenedProducts()
