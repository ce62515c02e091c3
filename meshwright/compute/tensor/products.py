"""The products of a layer y = x W + b: the only place of matrix multiplications.

| product          | reads     | gives                                                        |
|------------------|-----------|--------------------------------------------------------------|
| forward          | x, W, b   | y = x W + b                                                  |
| input gradient   | dy, W     | dx = dy Wᵀ                                                   |
| weight gradients | x, dy     | addends of dW = xᵀ dy, written into the bucket               |
| bias gradients   | dy        | addends of db, the sum of dy over the rows                   |

All four use `multiply` and `write_product`; 2-D layers, heads and experts call these two for panels, chunks and rows.
A kit passes products to each layer (arithmetic.py). `Products` multiplies all rows and columns of a rank in one call,
in the dtype of the operands. A subclass overrides the four to change the precision of layers, or the two to change the
precision everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.parameters.shard import ShardedModule, WriteGradient

ADDS_WIDE = torch.__version__ >= "2.13"
"""Whether torch can add a half-precision product to a float32 tensor; earlier versions cannot."""


class Products:
    """Products in one call over all rows and columns that a rank holds."""

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Multiply a [n, K] by b [K, N].

        Args:
            bias: [N], added to each row.
            out: memory [n, N] of the result; never with a bias.
        """
        if bias is not None:
            return torch.addmm(bias, a, b)
        return torch.mm(a, b) if out is None else torch.mm(a, b, out=out)

    def write_product(self, a: Tensor, b: Tensor, out: Tensor, beta: int) -> None:
        """Write a b + beta · out to `out`. With a and b bound, this is a `WriteGradient`.

        If the factors are narrower than `out`, a GPU's kernel adds the product without rounding. A CPU has no such
        kernel, and rounds the product first.
        """
        if out.dtype == a.dtype:
            torch.addmm(out, a, b, beta=beta, out=out)
        elif out.device.type == "cuda" and ADDS_WIDE:
            torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
        else:
            write_part(self.multiply(a, b), out, beta)

    def convolve(self, x: Tensor, kernels: Tensor, stride: int, padding: int, groups: int) -> Tensor:
        """Convolve images with kernels.

        Args:
            x: [B, C, S, S].
            kernels: [D, C/groups, K, K].

        Returns [B, D, s, s].
        """
        return F.conv2d(x, kernels, None, stride, padding, 1, groups)

    @property
    def between(self) -> Products:
        """The products for a gradient that is sharded as between pairs."""
        return self

    def changed(self, change: ChangeProducts) -> Products:
        """Return these products with change(products) in place of the products of the used columns."""
        return change(self)

    def outputs_of(self, held: int) -> int:
        """Return the width N of y, of a weight with this number of held columns."""
        return held

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute y = x W + b.

        Args:
            x: [B, ..., I].
            weight: [I, N].
            bias: [N].

        Returns [B, ..., N], in any shape of these elements.
        """
        return self.multiply(x.flatten(0, -2), weight, bias)

    def read(self, dy: Tensor) -> Any:
        """Return dy [B, ..., N] in the form that the products of a backward pass share."""
        return dy.flatten(0, -2)

    def input_gradient(self, dy: Any, weight: Tensor) -> Tensor:
        """Compute dx = dy Wᵀ.

        Args:
            dy: the result of `read`.
            weight: [I, N].

        Returns [B, ..., I], in any shape of these elements.
        """
        return self.multiply(dy, weight.t())

    def weight_gradients(self, x: Callable[[], Tensor], dy: Any) -> Iterable[WriteGradient]:
        """Yield functions that each write an addend of dW [I, N]. `x`: returns x [B, ..., I] when a gradient is due."""

        def write(out: Tensor, beta: int) -> None:
            self.write_product(x().flatten(0, -2).t(), dy, out, beta)

        return (write,)

    def bias_gradients(self, dy: Any) -> Iterable[WriteGradient]:
        """Yield functions that each write an addend of db [N]."""
        return (partial(write_sum, dy),)


PLAIN = Products()

ChangeProducts = Callable[[Products], Products]
"""Returns other products in place of some."""


class LinearLayer(ShardedModule):
    """A layer y = x W + b with a weight [I, ..., N]. The products may be changed after construction."""

    weight: nn.Parameter
    products: Products

    def change_products(self, change: ChangeProducts) -> None:
        """Multiply by change(products of the used columns) from now on."""
        self.products = self.products.changed(change)


def add_gradients(layer: ShardedModule, name: str, like: Tensor, addends: Iterable[WriteGradient]) -> Tensor | None:
    """Add the addends to the gradient of a layer's parameter. Returns the sum for autograd; None if in a bucket."""
    total: Tensor | None = None
    for write in addends:
        total = added(total, layer.add_gradient(name, like, write))
    return total


def added(total: Tensor | None, more: Tensor | None) -> Tensor | None:
    """Add two addends of a gradient for autograd. None: the layer has added the gradient to a bucket."""
    return more if total is None or more is None else total + more


def write_part(addend: Tensor, out: Tensor, beta: int) -> None:
    """Write part + beta · out to `out`, which may be wider: sums of rounded parts, not rounded sums."""
    if beta:
        out.add_(addend)
    else:
        out.copy_(addend)


def write_sum(rows: Tensor, out: Tensor, beta: int) -> None:
    """Write the sum of rows [n, N] + beta · out to `out`, which may be wider."""
    if beta or out.dtype != rows.dtype:
        write_part(rows.sum(0), out, beta)
    else:
        torch.sum(rows, 0, out=out)


def side_by_side(parts: Sequence[Tensor]) -> Tensor:
    """Join the parts of a tensor along the last dim."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), -1)
