"""The 2-D and 2.5-D kit by parts (bits/blocks.py), with results bit-equal to one device.

b = B/(depth·row): this rank's rows of the batch. Each rank computes its products alone, from operands gathered whole.
The only sums of floats over ranks are trees (dx, dh, scores). Gradients of weights are sent as one addend per row of
ranks.

| layer     | input         | multiplies by                 | forward sends          | backward sends              |
|-----------|---------------|-------------------------------|------------------------|-----------------------------|
| embedding | [b, T]        | [V/row, H/col]                | ids, output over row   | dy over row                 |
| norm      | [b, T, H/col] | -                             | parts' sums over col   | the same                    |
| linears   | [b, T, H/col] | [H, N/col], of [H/row, N/col] | x over col, W over row | x, dx over col; dW over row |
| patches   | [b, T, P]     | [P, H/col]                    | -                      | -                           |
| scores    | [b, T, H/col] | [H/col, n]                    | output over col        | -                           |
| head      | [b, T, H/col] | [V/col, H], of [V/row, H/col] | h over col, W over row | dh over col, dW over row    |

This is SUMMA with y stationary in the forward pass and dx in the backward pass (summa.py). Each rank computes dW
[H, N/col] from its rows of the batch and sends one panel to each rank of its column, which adds all panels as integers.
Blocks of the table are first exchanged with the transposed rank, and gradients of the table are sent back.

With `memory.summa: stream` a linear's W is sent in q panels, each multiplied before the next is needed: a panel's rows
have a subtree of the tree over parts. Each panel of dW is computed and sent alone. Activations enter whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compute.bits.arithmetic import ExactArithmetic
from meshwright.compute.bits.blocks import Blocks
from meshwright.compute.bits.head import PartHead
from meshwright.compute.bits.products import ExactProducts, Incoming
from meshwright.compute.parameters.shard import Initial, Shard, WriteGradient
from meshwright.compute.tensor.boundary import Boundary, WholeActivations
from meshwright.compute.tensor.copies import HeadGroups, part_columns
from meshwright.compute.tensor.gathered import Weights
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.kit import LinearRole
from meshwright.compute.tensor.pair import CutContract, CutExpand
from meshwright.compute.tensor.products import Products, add_gradients, added, write_part
from meshwright.compute.tensor.serial import KitBase, SerialLinear, grouped
from meshwright.compute.tensor.summa import W, X, Y
from meshwright.compute.tensor.tesseract import TesseractKit
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.trees import tree_sum


def dealt(mesh: Mesh, panels: Tensor) -> Tensor:
    """Exchange panels [q, ...] in this column of ranks: panel i is sent to rank i. Returns one panel of each rank."""
    panels = panels.contiguous()
    received = torch.empty_like(panels)
    mesh.comm("row").all_to_all(received, panels)
    return received


class GatheredLinear(CutExpand):
    """The layer x W + b. The weight [I/row, N/col] is gathered over row; the gradient is sent back to the owners.

    If weights stream, both are sent panel by panel, and no rank has [I, N/col]. Ranks of a panel's rows have a subtree
    of the tree over parts of x's width.
    """

    products: ExactProducts

    def __init__(
        self, mesh: Mesh, inputs: int, outputs: tuple[int, ...], initial: Initial, boundary: Boundary, weights: Weights,
        *, bias: bool, products: Products, copies: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            mesh, inputs, outputs, initial, boundary, bias=bias, products=products, copies=copies,
            rows={"row": Shard(0)},
        )  # fmt: skip
        self.weights = weights
        weights.blocks.append(self.weight)

    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        panels = self.weights.panels(self, Y, weight)
        if isinstance(panels, Tensor):
            return super().product(x, panels.flatten(0, 1), bias)
        products = self.products_of_panel(sums=True)
        total = tree_sum(map(products.forward, x.chunk(self.weights.summa.q, -1), panels)).to(x.dtype)
        return total if bias is None else total.add_(products.arranged([those.of(bias) for those in products.columns]))

    def input_gradient(self, dy: Incoming, weight: Tensor) -> Tensor:
        panels = self.weights.panels(self, Y, weight)
        if isinstance(panels, Tensor):
            return super().input_gradient(dy, panels.flatten(0, 1))
        products = self.products_of_panel()
        return torch.cat([products.input_gradient(dy, panel) for panel in panels], -1)

    def products_of_panel(self, *, sums: bool = False) -> ExactProducts:
        """Return the products of one panel of W's rows. `sums`: y is an addend of a tree."""
        return replace(self.products, inputs=self.products.inputs // self.weights.summa.q, contracts=sums)

    def add_weight_gradients(self, weight: Tensor, x: Callable[[], Tensor], dy: Incoming) -> Tensor | None:
        total = None
        if not self.weights.form.streams:
            for write in self.products.weight_gradients(x, dy):
                total = added(total, self._add_rows(weight, write))
            return total
        comm, products = self.mesh.comm("row"), self.products_of_panel()
        panels = cache(lambda: x().chunk(comm.size, -1))
        for turn in range(comm.size):
            to, source = (comm.index + turn) % comm.size, (comm.index - turn) % comm.size
            writes = products.weight_gradients(lambda to=to: panels()[to], dy)  # type: ignore[misc]
            exchanged = (partial(self.write_exchanged, write, to, source) for write in writes)
            total = added(total, add_gradients(self, "weight", weight, exchanged))
        return total

    def write_exchanged(self, write: WriteGradient, to: int, source: int, out: Tensor, beta: int) -> None:
        """Write the gradient of this rank's rows from the rank `source`, plus beta · out.

        Args:
            write: gives this rank's gradient of the rows of the rank `to`, which is sent.
            to: index of the receiving rank on the axis `row`.
            source: index of the sending rank.
            out: [I/q, N/col], as this rank's rows.
            beta: 0 or 1.
        """
        panel, comm = torch.empty_like(out), self.mesh.comm("row")
        write(panel, 0)
        received = panel if source == comm.index else torch.empty_like(panel)
        if received is not panel:
            comm.exchange(panel, to, received, source)
        write_part(received, out, beta)

    def _add_rows(self, weight: Tensor, write: WriteGradient) -> Tensor | None:
        """Add this rank's rows of every column rank's gradient of the whole weight."""
        q = self.mesh.size("row")

        @cache  # one collective for all q addends
        def addends(dtype: torch.dtype) -> Tensor:
            whole = weight.new_empty(q * weight.shape[0], *weight.shape[1:], dtype=dtype)
            write(whole, 0)
            return dealt(self.mesh, whole.unflatten(0, (q, -1)))

        def add(row: int, out: Tensor, beta: int) -> None:
            write_part(addends(out.dtype)[row], out, beta)

        return add_gradients(self, "weight", weight, (partial(add, row) for row in range(q)))


class GatheredHead(PartHead):
    """A head with classes sharded over col; the hidden width of each class is gathered over row."""

    def __init__(
        self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, boundary: Boundary, blocks: Blocks, weights: Weights
    ) -> None:
        super().__init__(
            mesh, shape, tied, boundary, blocks, weights.summa.products, {"row": Shard(0), "col": Shard(1)}
        )
        self.weights = weights
        weights.blocks.append(self.block)

    def own_classes(self, block: Tensor) -> Tensor:
        # A head's table does not stream in any mode.
        streams = self.weights.form.streams
        panels = self.weights.summa.gather(W, X, block) if streams else self.weights.panels(self, X, block)
        assert isinstance(panels, Tensor), "panels [q, V/q, H/q]: this column's rows, hidden block by hidden block"
        return panels.transpose(0, 1).flatten(1)

    def give(self, like: Tensor, write: WriteGradient) -> Tensor | None:
        whole = torch.empty_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
        write(whole, 0)
        panels = whole.unflatten(1, (self.mesh.size("row"), -1)).transpose(0, 1)
        addends = self.weights.summa.transpose(dealt(self.mesh, panels))  # [q, V/q, H/q]
        total = None
        for addend in addends:
            total = added(total, super().give(addend, partial(write_part, addend)))
        return total


class ExactTesseract(TesseractKit):
    """A kit for [depth, row, col] that multiplies by parts."""

    arithmetic: ExactArithmetic

    def norm(self, width: int, epsilon: float, **options: Any) -> nn.Module:
        return KitBase.norm(self, width, epsilon, **options)

    def expand(
        self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
        heads: HeadGroups | None = None,
    ) -> nn.Module:  # fmt: skip
        outputs = grouped(inner, groups)
        products, copies = self.arithmetic.expand(outputs, heads, self.mesh.size("col"), self.mesh.index("col"))
        return GatheredLinear(
            self.mesh, hidden, outputs, initial, self.boundary, self.weights, bias=bias, products=products,
            copies=copies,
        )  # fmt: skip

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return self._between(inner, hidden, initial, bias=bias, parts=self.arithmetic.blocks.all_parts)

    def _between(self, inputs: int, outputs: int, initial: Initial, *, bias: bool, parts: int) -> GatheredLinear:
        """Make a linear with outputs held as activations between pairs. `parts`: parts of the input width."""
        blocks = self.arithmetic.blocks
        columns = part_columns(1, outputs // self.mesh.size("col"), blocks.own_hidden)
        return GatheredLinear(
            self.mesh, inputs, (outputs,), initial, self.boundary, self.weights, bias=bias,
            products=self.arithmetic.exact(blocks, inputs=parts, columns=columns),
        )  # fmt: skip

    def linear(self, role: LinearRole, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        blocks = self.arithmetic.blocks
        if role == "transform":
            return self._between(inputs, outputs, initial, bias=bias, parts=blocks.hidden)
        if role == "patches":  # every rank of a row has whole patches
            width = outputs // self.mesh.size("col")
            products = self.arithmetic.between(role, width)
            return SerialLinear(
                self.mesh, inputs, (outputs,), initial, {"col": Shard(1)}, bias=False, products=products
            )  # fmt: skip
        boundary = WholeActivations(self.mesh, "col", in_order=True)
        products = self.arithmetic.exact(blocks.between, inputs=blocks.own_hidden, contracts=True)
        return CutContract(self.mesh, inputs, outputs, initial, boundary, bias=None, products=products)

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        return GatheredHead(self.mesh, shape, tied, self.boundary, self.arithmetic.blocks, self.weights)
