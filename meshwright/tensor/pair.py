"""A pair of linears whose inner width is cut over an axis (Megatron-LM, arXiv 1909.08053, section 3).

p: the axis's size. A `Boundary` says how activations enter and leave the pair.

| layer    | input        | weight          | output            | forward sends | backward sends |
|----------|--------------|-----------------|-------------------|---------------|----------------|
| expand   | [B, T, H]    | [H, G, N/G/p]   | [B, T, G, N/G/p]  | enter         | leave (dx), enter (x, unless kept) |
| of heads that are shared (copies.py) | [H, (G + 2) E] | [B, T, (G/c + 2) E] | enter | the same |
| contract | [B, T, N/p]  | [N/p, H]        | [B, T, H]         | leave         | enter (dy)     |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.bits.blocks import WHOLE, Blocks, added, apart, parts_of, side_by_side, sum_of_products
from meshwright.parameters.shard import (
    UNPLACED,
    ZEROS,
    Initial,
    Placements,
    Shard,
    ShardedModule,
    ShardSpec,
    WriteGradient,
)
from meshwright.ranks.collectives import Moving, here
from meshwright.ranks.mesh import Mesh
from meshwright.tensor.boundary import Boundary
from meshwright.tensor.copies import ALL_COLUMNS, Columns, part_columns
from meshwright.tensor.linear import bias_gradient, cast, write_product


class _Expand(torch.autograd.Function):
    """y = x W + b with W cut by columns; x enters the pair."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: CutExpand, boundary: Boundary
    ) -> Tensor:
        whole = boundary.start_enter(x).wait()  # [B, T, H]
        ctx.save_for_backward(whole if boundary.keeps else x, weight)
        ctx.layer, ctx.boundary, ctx.biased = layer, boundary, bias is not None
        blocks, held = layer.blocks, layer.held(weight)
        parts = [(layer.by_input(those.of(held)), None if bias is None else those.of(bias)) for those in layer.columns]
        runs = [layer.products(rows, parts) for rows in blocks.rows(whole)]
        return blocks.joined(runs, whole.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        boundary: Boundary = ctx.boundary
        layer: CutExpand = ctx.layer
        blocks, held = layer.blocks, layer.held(weight)
        entering = here(x) if boundary.keeps else layer.gradients.start(lambda: boundary.start_enter(x))
        runs = [layer.by_part(rows) for rows in blocks.rows(dy)]  # x enters under dx's products
        leaving: Moving | None = None
        if ctx.needs_input_grad[0]:  # patches of pictures need no gradient
            sums = layer.input_gradients(runs, held)
            leaving = boundary.start_leave(blocks.joined(sums, dy.shape[0]))  # under dW's product
        dweight = dbias = None
        entered = cache(lambda: [parts_of(rows, layer.inputs, -1) for rows in blocks.rows(entering.wait())])
        for number, run in enumerate(runs):
            for those in layer.copies:
                write = partial(layer.write_columns, entered, number, run, those)
                dweight = added(dweight, layer.add_weight_gradient(weight, write))
                if ctx.biased:
                    columns = [layer.columns[part] for part in those]
                    dbias = added(dbias, bias_gradient([run[part] for part in those], layer, columns))
        return None if leaving is None else leaving.wait().to(dy.dtype), dweight, dbias, None, None


def _write_products(inputs: list[Tensor], dy: Tensor, out: Tensor, beta: int) -> None:
    """The gradient of a part's columns, by parts of the input's width."""
    for rows, own in zip(inputs, out.chunk(len(inputs)), strict=True):
        write_product(rows.t(), dy, own, beta)


def _product(rows: list[Tensor], owns: list[Tensor]) -> Tensor:
    """[n, K] times [K, N], of parts of K. Their sum is rounded once to the dtype of the rows."""
    return rows[0] @ owns[0] if len(rows) == 1 else sum_of_products(rows, owns).to(rows[0].dtype)


class _Contract(torch.autograd.Function):
    """y = sum over ranks of x W, + b, with W cut by rows; y leaves the pair."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: CutContract, boundary: Boundary
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.boundary, ctx.biased = layer, boundary, bias is not None
        blocks, sums = layer.blocks, []
        owns = [parts_of(own, blocks.hidden, -1) for own in parts_of(weight, blocks.parts, 0)]
        for rows in blocks.rows(x):
            inner = parts_of(rows, blocks.parts, -1)
            columns = [
                blocks.total(part @ own for part, own in zip(inner, those, strict=True))
                for those in zip(*owns, strict=True)
            ]
            sums.append(side_by_side(columns))
        # [B, T, H], one of the sum's terms
        y = boundary.start_leave(blocks.joined(sums, x.shape[0])).wait().to(x.dtype)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        layer: CutContract = ctx.layer
        blocks = layer.blocks
        dy = dy.contiguous()
        entering = ctx.boundary.start_enter(dy)  # under db's sum
        dweight = dbias = None
        columns = part_columns(1, dy.shape[-1], blocks.hidden)
        for rows in blocks.outer.rows(dy) if ctx.biased else ():
            dbias = added(dbias, bias_gradient(parts_of(rows, blocks.hidden, -1), layer, columns))
        whole = [parts_of(rows, blocks.hidden, -1) for rows in blocks.rows(entering.wait())]
        for rows, incoming in zip(blocks.rows(x), whole, strict=True):
            write = partial(layer.write_rows, rows, incoming, columns)
            dweight = added(dweight, layer.add_gradient("weight", weight, write))
        owns = [[own.t() for own in parts_of(part, blocks.hidden, -1)] for part in parts_of(weight, blocks.parts, 0)]
        runs = [side_by_side([_product(rows, own) for own in owns]) for rows in whole]
        return blocks.joined(runs, x.shape[0]).view(x.shape), dweight, dbias, None, None


class CutExpand(ShardedModule):
    """The first linear of a pair."""

    def __init__(
        self,
        mesh: Mesh,
        inputs: int,
        outputs: tuple[int, ...],
        initial: Initial,
        boundary: Boundary,
        *,
        bias: bool,
        columns: Sequence[Columns] = (ALL_COLUMNS,),
        groups: int = 1,
        blocks: Blocks = WHOLE,
        rows: Placements = UNPLACED,
        inputs_in: int | None = None,
    ) -> None:
        """`columns`: of each part; `groups`: runs of columns that a part has of each of so many equal groups.
        `rows`: of the weight, where an axis cuts these too. `inputs_in`: parts of the input's width; None: those of the
        hidden width."""
        super().__init__(mesh)
        self.boundary, self.columns, self.groups, self.blocks = boundary, columns, groups, blocks
        self.inputs = blocks.hidden if inputs_in is None else inputs_in
        kinds = dict.fromkeys(one.copy for one in columns)
        self.copies = [[part for part, one in enumerate(columns) if one.copy == kind] for kind in kinds]
        """The parts whose columns are different ones; those that share some have gradients that are added apart."""
        last, copies = len(outputs) - 1, columns[0].copies
        placements = {axis: Shard(shard.dim, copies) for axis, shard in boundary.inner(last + 1).items()}
        self.weight = self.declare("weight", ShardSpec((inputs, *outputs), {**rows, **placements}, initial))
        placements = {axis: Shard(shard.dim, copies) for axis, shard in boundary.inner(last).items()}
        spec = ShardSpec(outputs, placements, ZEROS, matrix=False)
        self.bias = self.declare("bias", spec) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.flatten()
        y: Tensor = _Expand.apply(*cast(x, self.weight.flatten(1), bias), self, self.boundary)
        return y.unflatten(-1, self.weight.shape[1:]) if self.weight.dim() > 2 else y

    def held(self, weight: Tensor) -> Tensor:
        """The weight [H, N/p] as products need it."""
        return weight

    def by_input(self, weight: Tensor) -> list[Tensor]:
        """A part's columns of the weight, split by parts of the input's width, as kernels get them."""
        return parts_of(self.blocks.own(weight), self.inputs, 0)

    def products(self, rows: Tensor, parts: list[tuple[list[Tensor], Tensor | None]]) -> Tensor:
        """[rows, N] of this rank's parts [rows, N/parts], each of which has its run of every group."""
        if self.inputs == 1:
            ys = [rows @ own if offsets is None else torch.addmm(offsets, rows, own) for (own,), offsets in parts]
        else:
            inputs = parts_of(rows, self.inputs, -1)
            sums = [(_product(inputs, owns), offsets) for owns, offsets in parts]
            ys = [y if offsets is None else y.add_(offsets) for y, offsets in sums]
        if len(ys) == 1:
            return ys[0]
        return torch.stack([y.unflatten(-1, (self.groups, -1)) for y in ys], 2).flatten(1)

    def input_gradients(self, runs: list[list[Tensor]], held: Tensor) -> list[Tensor]:
        """This rank's part of dx [rows, H] of each run, from its parts of dy [rows, N/parts]."""
        owns = [self.by_input(columns.of(held)) for columns in self.columns]
        return [
            side_by_side([
                self.blocks.total(rows @ own.t() for rows, own in zip(run, those, strict=True))
                for those in zip(*owns, strict=True)
            ])
            for run in runs
        ]  # fmt: skip

    def write_columns(
        self, entered: Callable[[], list[list[Tensor]]], number: int, run: list[Tensor], those: Sequence[int],
        out: Tensor, beta: int,
    ) -> None:  # fmt: skip
        """The gradient of a weight's columns that `those` parts have. `entered`: each run's inputs, of which this run
        is the one of that number; `run`: its dy by part."""
        for part in those:
            write = partial(_write_products, entered()[number], run[part])
            self.columns[part].write(write)(out, beta if part == those[0] else 1)

    def add_weight_gradient(self, weight: Tensor, write: WriteGradient) -> Tensor | None:
        """Add up what `write` writes, the gradient of what products need of the weight."""
        return self.add_gradient("weight", weight, write)

    def by_part(self, rows: Tensor) -> list[Tensor]:
        """The parts of [rows, N], each in separate memory."""
        if len(self.columns) == 1:
            return [rows]
        parts = rows.unflatten(-1, (self.groups, len(self.columns), -1)).unbind(2)
        return [apart(part).flatten(1) for part in parts]


class CutContract(ShardedModule):
    """The second linear of a pair. Its bias is added once, to the sum, where it is held."""

    def __init__(
        self, mesh: Mesh, inputs: int, outputs: int, initial: Initial, boundary: Boundary, *, bias: ShardSpec | None,
        blocks: Blocks = WHOLE,
    ) -> None:  # fmt: skip
        super().__init__(mesh)
        self.boundary, self.blocks = boundary, blocks
        self.weight = self.declare("weight", ShardSpec((inputs, outputs), boundary.inner(0), initial))
        self.bias = self.declare("bias", bias) if bias is not None else None

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.boundary.holds else None
        y: Tensor = _Contract.apply(*cast(x, self.weight, bias), self, self.boundary)
        return y

    def write_rows(
        self, rows: Tensor, incoming: list[Tensor], columns: Sequence[Columns], out: Tensor, beta: int
    ) -> None:
        """A run's gradient of the weight by parts of its rows, from its input and the parts of its dy, whose columns
        these are."""
        for part, own in zip(parts_of(rows, self.blocks.parts, -1), out.chunk(self.blocks.parts), strict=True):
            for number, dy in enumerate(incoming):
                product = partial(write_product, part.t(), dy)
                columns[number].write(product)(own, beta if number == 0 else 1)
