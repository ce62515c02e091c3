"""A layer's products by runs of tokens and parts of widths (blocks.py), with equal bits in every layout.

| sum over                | in                     | order                                                         |
|-------------------------|------------------------|---------------------------------------------------------------|
| parts of the inputs     | forward                | a tree in float32; rounded, or a leaf of the ranks' tree      |
| parts of the outputs    | input gradient         | a tree in float32; a leaf of the ranks' tree, or rounded      |
| runs of tokens          | weight, bias gradients | none: each run is an addend of fixed point (fixed.py)         |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor

from meshwright.compute.bits.blocks import Blocks, apart, parts_of, sum_of_products
from meshwright.compute.parameters.shard import WriteGradient
from meshwright.compute.tensor.copies import ALL_COLUMNS, Columns
from meshwright.compute.tensor.products import PLAIN, Products, side_by_side, write_sum


@dataclass(frozen=True)
class Incoming:
    """The gradient dy of a layer's output, by runs and parts."""

    runs: list[list[Tensor]]
    """By run, the parts of the columns [rows, N/parts], in separate memory."""
    batch: int
    """B of dy."""


@dataclass(frozen=True)
class ExactProducts(Products):
    """Products with shapes that do not depend on the layout."""

    blocks: Blocks
    """The runs of tokens."""
    inputs: int = 1
    """Parts of x's width."""
    columns: tuple[Columns, ...] = (ALL_COLUMNS,)
    """The columns of W for each part of y's width; parts that share a key-value head share columns."""
    groups: int = 1
    """Equal groups of y's columns; each part has a share of every group."""
    products: Products = PLAIN
    """Multiplies one part and one run."""
    contracts: bool = False
    """True: ranks sum y (the second linear of a pair). False: ranks sum dx (the first linear)."""

    @property
    def between(self) -> ExactProducts:
        return replace(self, blocks=self.blocks.outer)

    @cached_property
    def copies(self) -> list[list[int]]:
        """Indices of the parts, grouped by copy: parts of one group use different columns.

        Each group gives a separate addend to the gradient, since columns may be shared by parts of different groups.
        """
        copies = dict.fromkeys(columns.copy for columns in self.columns)
        return [[index for index, columns in enumerate(self.columns) if columns.copy == copy] for copy in copies]

    def outputs_of(self, held: int) -> int:
        return sum(those.num_of(held) for those in self.columns)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        weights = [self._by_input(those.of(weight)) for those in self.columns]
        offsets = [None if bias is None else those.of(bias) for those in self.columns]
        runs = []
        for inputs in self.blocks.rows_by(x, self.inputs):
            ys = [self._y(inputs, *operands) for operands in zip(weights, offsets, strict=True)]
            runs.append(self.arranged(ys))
        return self.blocks.joined(runs, x.shape[0])

    def arranged(self, ys: Sequence[Tensor]) -> Tensor:
        """Join the parts of y's width. `ys`: [..., N/parts] each."""
        if self.groups > 1 and len(ys) > 1:  # each part has a share of every group
            return torch.stack([y.unflatten(-1, (self.groups, -1)) for y in ys], -2).flatten(-3)
        return side_by_side(ys)

    def _by_input(self, weight: Tensor) -> list[Tensor]:
        """Split a part's columns of the weight by parts of x's width, as kernels get them."""
        return parts_of(self.blocks.own(weight), self.inputs, 0)

    def _y(self, inputs: list[Tensor], weights: list[Tensor], bias: Tensor | None) -> Tensor:
        if self.contracts:
            total = self.blocks.total(
                self.products.multiply(x, weight) for x, weight in zip(inputs, weights, strict=True)
            )
            return total if bias is None else total.to(inputs[0].dtype).add_(bias)
        if len(inputs) == 1:
            return self.products.multiply(inputs[0], weights[0], bias)
        y = self._rounded(inputs, weights)
        return y if bias is None else y.add_(bias)

    def read(self, dy: Tensor) -> Incoming:
        count = len(self.columns)
        if count == 1 or self.groups == 1:
            return Incoming(self.blocks.rows_by(dy, count), dy.shape[0])
        runs = (run.unflatten(-1, (self.groups, count, -1)).unbind(-2) for run in self.blocks.cut(dy))
        return Incoming([[apart(block).flatten(0, -3).flatten(1) for block in run] for run in runs], dy.shape[0])

    def input_gradient(self, dy: Incoming, weight: Tensor) -> Tensor:
        weights = [self._by_input(those.of(weight)) for those in self.columns]
        by_input = [[block.t() for block in those] for those in zip(*weights, strict=True)]
        sums = []
        for run in dy.runs:
            if self.contracts:
                parts = [self._rounded(run, those) for those in by_input]
            else:
                parts = [self.blocks.total(map(self.products.multiply, run, those)) for those in by_input]
            sums.append(side_by_side(parts))
        return self.blocks.joined(sums, dy.batch)

    def weight_gradients(self, x: Callable[[], Tensor], dy: Incoming) -> Iterator[WriteGradient]:
        entered = cache(lambda: self.blocks.rows_by(x(), self.inputs))

        def write(run_index: int, run: list[Tensor], index: int, out: Tensor, beta: int) -> None:
            inputs = entered()[run_index]
            for rows, target in zip(inputs, out.chunk(len(inputs)), strict=True):
                self.products.write_product(rows.t(), run[index], target, beta)

        for run_index, run in enumerate(dy.runs):
            yield from self._by_copy(partial(write, run_index, run))

    def bias_gradients(self, dy: Incoming) -> Iterable[WriteGradient]:
        def write(run: list[Tensor], index: int, out: Tensor, beta: int) -> None:
            write_sum(run[index], out, beta)

        for run in dy.runs:
            yield from self._by_copy(partial(write, run))

    def _by_copy(self, write: Callable[[int, Tensor, int], None]) -> Iterator[WriteGradient]:
        """Yield functions that write the gradients of all parts of a group of `copies`.

        `write(index, out, beta)` writes the gradient of the columns of one part.
        """

        def write_group(those: Sequence[int], out: Tensor, beta: int) -> None:
            held = out.shape[-1]
            if not beta and sum(self.columns[index].num_of(held) for index in those) < held:
                out.zero_()
            for index in those:
                self.columns[index].write_used(partial(write, index), out, beta)

        return (partial(write_group, those) for those in self.copies)

    def _rounded(self, rows: list[Tensor], weights: list[Tensor]) -> Tensor:
        """Multiply [n, K] by [K, N] by parts of K; the sum is rounded once to the dtype of the rows."""
        if len(rows) == 1:
            return self.products.multiply(rows[0], weights[0])
        return sum_of_products(self.products, rows, weights).to(rows[0].dtype)
