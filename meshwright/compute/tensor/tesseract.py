"""The 2-D and 2.5-D kit (Optimus, arXiv 2104.05343; Tesseract, ICPP 2022): blocks of everything on [depth, row, col].

b = B/(depth·row): this rank's rows of the batch.

| layer     | input         | weight           | output        | forward sends                        | backward  |
|-----------|---------------|------------------|---------------|--------------------------------------|-----------|
| embedding | [b, T]        | [V/row, H/col]   | [b, T, H/col] | ids, output over row                 | the same  |
| norm      | [b, T, H/col] | [H/col], [H/col] | [b, T, H/col] | all-reduce over col of [b, T, 2]     | the same  |
| linears   | [b, T, H/col] | [H/row, N/col]   | [b, T, N/col] | two of the three operands (summa.py) | four      |
| patches   | [b, T, P]     | [P, H/col]       | [b, T, H/col] | -                                    | -         |
| scores    | [b, T, H/col] | [H/col, n]       | [b, T, n]     | all-reduce over col                  | -         |
| head      | [b, T, H/col] | [V/row, H/col]   | loss          | h over col, weight over row (*)      | the same  |

(*) The weight is transposed first (summa.py), and [C, 3] is sent over col for each chunk of C tokens
(cross_entropy.py). The logits [b·T, V/col], the largest of the product's three matrices, are stationary.

These axes split the tokens, so the data-parallel strategy sums the gradient of a weight over depth, and of a vector
over depth and row.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.compute.parameters.role import BIAS, NORM
from meshwright.compute.parameters.shard import (
    ONES,
    ZEROS,
    Initial,
    Placements,
    Shard,
    ShardedModule,
    ShardSpec,
)
from meshwright.compute.tensor.arithmetic import AT_ONCE, Arithmetic
from meshwright.compute.tensor.boundary import HIDDEN, Boundary, CutActivations
from meshwright.compute.tensor.copies import ALL_COLUMNS, ColumnProducts, Columns, HeadGroups, columns_of
from meshwright.compute.tensor.gathered import Weights
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.kit import LinearRole, NormKind, Where
from meshwright.compute.tensor.linear import cast
from meshwright.compute.tensor.norms import CutRmsNorm, SplitLayerNorm
from meshwright.compute.tensor.products import ChangeProducts, LinearLayer, Products, add_gradients, write_part
from meshwright.compute.tensor.serial import Embedding, KitBase, SerialLinear, grouped
from meshwright.compute.tensor.summa import Panels, Sizes, Stationary, Summa, W, X, Y, best_stationary
from meshwright.ranks.collectives import all_gather, all_reduce, cross, here, reduce_scatter
from meshwright.ranks.mesh import Mesh


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: TesseractLinear) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.layer, ctx.bias = layer, bias
        stays = layer.choice(x.shape[0]).forward
        operands = layer.operands(stays, {X: x, W: layer.columns.of(weight)})
        y = layer.of_activations.multiply(Y, stays, operands, None).wait()
        return y if bias is None else y.add_(layer.columns.of(bias))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        layer: TesseractLinear = ctx.layer
        dy = dy.contiguous()
        choice, summa = layer.choice(dy.shape[0]), layer.weights.summa
        for_dx = layer.operands(choice.dx, {Y: dy, W: layer.columns.of(weight)})
        dx = layer.of_activations.multiply(X, choice.dx, for_dx, None)  # sent during dW's product
        held = {Y: for_dx[Y]} if choice.dw == choice.dx and not summa.streams else {}

        def write(out: Tensor, beta: int) -> None:
            for_dw = layer.operands(choice.dw, {X: x, Y: dy}) if not held else layer.operands(choice.dw, {X: x}) | held
            there = not beta and out.dtype == dy.dtype
            product = summa.multiply(W, choice.dw, for_dw, out if there else None).wait()
            if not there:
                write_part(product, out, beta)

        dweight = layer.add_gradient("weight", weight, layer.columns.write(write))
        dbias = None
        if ctx.bias is not None:
            dbias = add_gradients(layer, "bias", ctx.bias, layer.products.bias_gradients(dy))
        return dx.wait(), dweight, dbias, None


class TesseractLinear(LinearLayer):
    """The linear x W + b. The stationary matrix of each product is chosen by the sizes."""

    def __init__(
        self,
        mesh: Mesh,
        inputs: int,
        outputs: tuple[int, ...],
        initial: Initial,
        weights: Weights,
        *,
        bias: bool = True,
        columns: Columns = ALL_COLUMNS,
    ) -> None:
        super().__init__(mesh)
        self.weights, self.columns, self.of_activations = weights, columns, weights.summa
        self.products = ColumnProducts(columns, weights.summa.products)
        last, copies = len(outputs) - 1, columns.copies
        placements = {"row": Shard(0), "col": Shard(last + 1, copies)}
        self.weight = self.declare("weight", ShardSpec((inputs, *outputs), placements, initial))
        spec = ShardSpec(outputs, {"col": Shard(last, copies)}, ZEROS, BIAS)
        self.bias = self.declare("bias", spec) if bias else None
        weights.blocks.append(self.weight)

    def change_products(self, change: ChangeProducts) -> None:
        super().change_products(change)
        summa = self.weights.summa  # still used for weight gradients
        self.of_activations = Summa(self.mesh, streams=summa.streams, products=change(summa.products))

    def sizes(self, rows: int) -> Sizes:
        """Return the sizes of the product with `rows` rows of x, from the weight's shape.

        Only the shape is read: under zero3 the weight's memory may be freed in the backward pass, if autograd keeps a
        cast copy.
        """
        outputs = self.columns.num_of(self.weight.shape[1:].numel())
        return Sizes(rows, self.weight.shape[0], outputs, self.mesh.size("row"))

    def choice(self, rows: int) -> Stationary:
        return best_stationary(self.sizes(rows), self.weights.form)

    def operands(self, stays: str, blocks: dict[str, Tensor]) -> dict[str, Panels | Tensor]:
        """Return the block of the stationary operand, and the panels of the others."""
        return {
            who: block if who == stays
            else self.weights.panels(self, stays, block) if who == W
            else self.weights.summa.panels(who, stays, block)
            for who, block in blocks.items()
        }  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        offsets = None if self.bias is None else self.bias.flatten()
        y: Tensor = _Linear.apply(*cast(x.flatten(0, -2), self.weight.flatten(1), offsets), self)
        return y.view(*x.shape[:-1], *self.weight.shape[1:-1], -1)


class TesseractNorm(ShardedModule):
    """Layer norm over a hidden dim that is sharded over col, in float32 or better.

    Sent over col, forward and backward: [b, T, 2].
    """

    def __init__(self, mesh: Mesh, hidden: int, epsilon: float, *, bias: bool) -> None:
        super().__init__(mesh)
        self.hidden, self.epsilon = hidden, epsilon
        spec = ShardSpec((hidden,), {"col": Shard(0)}, ONES, NORM)
        self.weight = self.declare("weight", spec)
        self.bias = self.declare("bias", replace(spec, initial=ZEROS)) if bias else None

    def forward(self, h: Tensor) -> Tensor:
        bias = torch.zeros_like(self.weight) if self.bias is None else self.bias
        y: Tensor = SplitLayerNorm.apply(h, self.weight, bias, self.hidden, self.epsilon, self.mesh.comm("col"))
        return y


class TesseractHead(TableHead):
    """A head with classes sharded over col; logits [b·T, V/col] are not sent."""

    def __init__(
        self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, boundary: Boundary, products: Products
    ) -> None:  # fmt: skip
        super().__init__(mesh, shape, tied, {"row": Shard(0), "col": Shard(1)}, {"col": Shard(0)}, boundary, products)
        self.summa = Summa(mesh, streams=False)

    def own_classes(self, block: Tensor) -> Tensor:
        # Panels [q, V/q, H/q] are this column's rows, hidden block by hidden block: side by side [V/col, H].
        summa = self.summa
        return cross(
            block,
            lambda block: here(summa.gather(W, X, block).transpose(0, 1).flatten(1)),
            lambda dy: summa.scatter(W, X, dy.unflatten(1, (summa.q, -1)).transpose(0, 1).contiguous()),
        )


class TesseractKit(KitBase):
    """The kit of blocks on [depth, row, col]; depth 1 is 2-D."""

    hidden: ClassVar[Placements] = {"col": Shard(0)}

    def __init__(self, mesh: Mesh, policy: str, arithmetic: Arithmetic = AT_ONCE) -> None:
        """`policy`: gather, whole, stream or auto (gathered.py); if sums are in order, gather or whole."""
        super().__init__(mesh, CutActivations(mesh, "col", HIDDEN, in_order=arithmetic.in_order), arithmetic)
        self.split_axes = ("depth", "row", "col")
        self.weights = Weights(mesh, policy, self.kept, arithmetic.products)

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        # The ranks of the `row` axis look up their ids [B/depth, T] together; each keeps its rows of the sum.
        before, after = (partial(verb, mesh=self.mesh, axis="row", dim=0) for verb in (all_gather, reduce_scatter))
        placements = {"row": Shard(0), "col": Shard(1)}
        addends = self.arithmetic.lookup(shares=self.mesh.size("row"))
        return Embedding(
            self.mesh, num_rows, hidden, initial, placements, before=before, after=after, addends=addends
        )  # fmt: skip

    def norm(
        self, width: int, epsilon: float, *, kind: NormKind = "layer", groups: int = 1, bias: bool = True,
        inside: bool = False, over_heads: bool = False,
    ) -> nn.Module:  # fmt: skip
        if inside or kind == "group":  # a rank holds the whole width, or its heads'
            return super().norm(
                width, epsilon, kind=kind, groups=groups, bias=bias, inside=inside, over_heads=over_heads
            )  # fmt: skip
        if kind == "layer":
            return TesseractNorm(self.mesh, width, epsilon, bias=bias)
        return CutRmsNorm(self.mesh, width, epsilon, "col", kind)

    def expand(
        self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
        heads: HeadGroups | None = None,
    ) -> nn.Module:  # fmt: skip
        outputs = grouped(inner, groups)
        (columns,) = columns_of(outputs, heads, self.mesh.size("col"), self.mesh.index("col"))
        return TesseractLinear(self.mesh, hidden, outputs, initial, self.weights, bias=bias, columns=columns)

    def linear(self, role: LinearRole, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        if role == "transform":
            return self.contract(inputs, outputs, initial, bias=bias)
        if role == "patches":  # every rank of a row has whole patches
            return SerialLinear(
                self.mesh, inputs, (outputs,), initial, {"col": Shard(1)}, bias=False, products=self.arithmetic.products
            )  # fmt: skip
        # Scores are a few numbers per token, summed over the ranks' parts of H and whole on every rank of a row.
        after = partial(all_reduce, mesh=self.mesh, axis="col")
        return SerialLinear(
            self.mesh, inputs, (outputs,), initial, {"col": Shard(0)}, bias=False, after=after,
            products=self.arithmetic.products,
        )  # fmt: skip

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        return TesseractHead(self.mesh, shape, tied, self.boundary, self.arithmetic.products)

    def slice(self, x: Tensor, where: Where) -> Tensor:
        if where == "hidden":
            return self.boundary.part(x)
        return x.chunk(self.mesh.size("depth", "row"))[self.mesh.index("depth", "row")]
