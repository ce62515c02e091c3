"""Products in FP8 of the linears of a chain's layers, with scales by row and by column (`precision.products: fp8`).

| product          | reads                              | adds up in | gives                    |
|------------------|------------------------------------|------------|--------------------------|
| forward          | x by row, W by column, in e4m3     | float32    | the run's half, with b   |
| input gradient   | dy by row, Wᵀ by column, in e4m3   | float32    | the run's half           |
| weight gradients | x, dy in the run's half            | float32    | as other products        |
| bias gradients   | dy in the run's half               | float32    | as other products        |

A scale is the greatest magnitude of a row or column / 448, the greatest number of e4m3; in float32, without a history
of earlier steps. The dim that a product sums over has no scales, so W is cast for each of the two products, in each
microbatch: no copy is kept, which an optimizer or a gather would make stale. dy is in e4m3: with a scale for each row
the range of e5m2 is not needed, and numbers of e5m2 have half the precision.

If an axis cuts a linear, each rank's scales are of the rank's own operands. The sum over ranks, or over panels of a 2-D
product, is of products in the run's half. So a layout changes the rounding, not the formula.

Spared, with the run's other products: embeddings, patches, the head and all that is outside of layers; the first and
the last layer of the chain; routers, experts, convolutions; linears with a width on a rank that is no multiple of 16,
which FP8's tensor cores do not take. Attention's scores are no products of weights.

In the graph of a layer (graphs.py) casts are operations like others: the compiler fuses each into the kernel that makes
the operand. Such a cast reads numbers that are not yet rounded to a half.

A GPU of compute capability 8.9 or later multiplies by torch's `_scaled_mm`. A CPU casts to e4m3 by the same formula,
multiplies the numbers in float32 and scales the sums, as the GPU's kernel does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.shard import WriteGradient
from meshwright.compute.tensor.linear import autocast_device
from meshwright.compute.tensor.products import LinearLayer, Products, write_part

E4M3 = torch.float8_e4m3fn
LARGEST = 448.0
"""The greatest number of e4m3."""
LEAST = 2.0**-110
"""The least magnitude that a scale is made for: the inverse of a smaller scale would be no float32."""
CAPABILITY = (8, 9)
"""The least compute capability of a GPU with products of e4m3."""
MULTIPLE = 16
"""The widths that the tensor cores take are multiples of this one."""


def rounded(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Round a matrix to e4m3.

    Args:
        x: [n, m].
        dim: the dim that a product sums over; elements of the result are contiguous along it.

    Returns:
        (numbers [n, m], scales [n, 1] or [1, m]): x is about numbers · scales.
    """
    greatest = torch.linalg.vector_norm(x, math.inf, dim, keepdim=True)  # a number of x, so exact
    scales = greatest.float().clamp(min=LEAST) / LARGEST
    along = (lambda matrix: matrix) if dim else torch.t
    if torch.compiler.is_compiling():  # a compiler fuses the product and the cast, and writes no memory of ours
        scaled = along(x * scales.reciprocal())
        return along(scaled.to(E4M3, memory_format=torch.contiguous_format)), scales
    numbers = along(x.new_empty(x.shape if dim else x.shape[::-1], dtype=E4M3))
    torch.mul(x, scales.reciprocal(), out=numbers)  # rounded once, as it is written
    return numbers, scales


@dataclass(frozen=True)
class Fp8Products(Products):
    """Products for y and dx with factors rounded to e4m3."""

    others: Products
    """The products for gradients of weights and biases."""
    emulates: bool
    """Whether numbers of e4m3 are multiplied in float32."""

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        with torch.autocast(autocast_device(a.device), enabled=False):
            (left, rows), (right, columns) = rounded(a, 1), rounded(b, 0)
            if not self.emulates:
                return torch._scaled_mm(
                    left, right, scale_a=rows, scale_b=columns, bias=bias, out_dtype=a.dtype, out=out
                )  # fmt: skip
            # Not in place: selective recomputation keeps the product as it is here.
            wide = torch.promote_types(a.dtype, torch.float32)
            product = super().multiply(left.to(wide), right.to(wide)) * rows * columns
            product = product if bias is None else product + bias
            if product.dtype != a.dtype:  # graphs._Linear has why not always
                product = product.to(a.dtype)
        return product if out is None else out.copy_(product)

    def write_product(self, a: Tensor, b: Tensor, out: Tensor, beta: int) -> None:
        write_part(self.multiply(a, b), out, beta)

    def weight_gradients(self, x: Callable[[], Tensor], dy: Any) -> Iterable[WriteGradient]:
        return self.others.weight_gradients(x, dy)

    def bias_gradients(self, dy: Any) -> Iterable[WriteGradient]:
        return self.others.bias_gradients(dy)


@dataclass
class Narrowed:
    """The linears of a model or a part of one."""

    count: int = 0
    """Linears in FP8."""
    spared: dict[str, tuple[int, int]] = field(default_factory=dict)
    """(inputs, outputs) on this rank of linears that are not in FP8, by name in a layer: no multiples of 16."""


def inner_layers(num_layers: int) -> range:
    """Return the layers with linears in FP8: all but the first and the last."""
    return range(1, num_layers - 1)


def narrow(blocks: nn.ModuleDict, num_layers: int, device_type: str) -> Narrowed:
    """Let the linears of a chain's layers multiply in FP8.

    Args:
        blocks: the layers, by number in the chain.
        num_layers: number of layers of the chain.
        device_type: the device of the layers.
    """
    found, change = Narrowed(), partial(Fp8Products, emulates=device_type == "cpu")
    for layer in inner_layers(num_layers):
        if str(layer) not in blocks:
            continue
        for name, linear in blocks[str(layer)].named_modules():
            if not isinstance(linear, LinearLayer):
                continue
            inputs, *held = linear.weight.shape
            outputs = linear.products.outputs_of(math.prod(held))
            if inputs % MULTIPLE or outputs % MULTIPLE:
                found.spared[name] = inputs, outputs
            else:
                linear.change_products(change)
                found.count += 1
    return found
