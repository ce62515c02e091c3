"""Grouped queries with more tensor ranks p than key-value heads K: c = p / K ranks copy a head and split its queries.

One linear makes the queries, keys and values of K groups, [H, K (G + 2) E]: G queries, a key and a value each. The c
ranks of a group hold all of the group's columns, [H, (G + 2) E], and multiply by some:

| of a group's columns | i-th of c ranks multiplies by |
|----------------------|-------------------------------|
| G queries            | [i G/c, (i + 1) G/c)          |
| key, value           | both, as the other c - 1 do   |

Each rank's gradient is zero for the other ranks' queries; for key and value the gradient covers this rank's queries.
The gradients are summed over the copies once a step.

Alternative (Megatron-LM): cut the columns into p equal runs and gather the products, c - 1 of c parts of
[B, T, (G + 2) E] in each layer and microbatch, forward and backward. A rank with only the used queries would save
(G - G/c) H E elements, and the parameter would be two boxes in a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.compute.parameters.shard import WriteGradient
from meshwright.compute.tensor.products import PLAIN, ChangeProducts, Products, write_part


@dataclass(frozen=True)
class HeadGroups:
    """`count` key-value heads of `width` elements, each read by `queries` queries."""

    count: int
    queries: int
    width: int

    @property
    def columns(self) -> int:
        """Columns of the linear that makes queries, keys and values."""
        return self.count * (self.queries + 2) * self.width

    def shared_by(self, ranks: int, rank: int, parts: int = 1, local_index: int = 0) -> Columns:
        """The columns of part `local_index` (of `parts`) of rank `rank` (of `ranks`), among the columns that the rank
        holds. ranks * parts is a multiple c of `count`."""
        copies, width, index = ranks * parts // self.count, self.width, rank * parts + local_index
        query_columns, first = self.queries // copies * width, self.queries * width
        held = max(self.count // ranks, 1)
        corner = (index // copies - rank * parts // copies) * (first + 2 * width)
        start = corner + index % copies * query_columns
        runs = ((start, start + query_columns), (corner + first, corner + first + 2 * width))
        return Columns(runs, held * (first + 2 * width), max(ranks // self.count, 1), index % copies)


def part_columns(groups: int, width: int, parts: int) -> tuple[Columns, ...]:
    """The columns of each of `parts` equal parts of a rank's columns, which are `groups` groups of `width`."""
    if parts == 1:
        return (ALL_COLUMNS,)
    size = width // parts
    return tuple(
        Columns(
            tuple((group * width + index * size, group * width + (index + 1) * size) for group in range(groups)),
            groups * width,
        )
        for index in range(parts)
    )


def columns_of(
    outputs: tuple[int, ...], heads: HeadGroups | None, ranks: int, rank: int, parts: int = 1, all_parts: int = 1
) -> tuple[Columns, ...]:  # fmt: skip
    """Return the columns of each of a rank's parts of a linear with outputs (N,) or (groups, N/groups).

    Args:
        outputs: the linear's outputs.
        heads: the heads, if the outputs are queries, keys and values; several ranks, or parts, may share a head.
        ranks: number of ranks.
        rank: this rank's index.
        parts: number of parts of this rank.
        all_parts: number of parts of all ranks.
    """
    if heads is not None and heads.count < max(ranks, all_parts):
        return tuple(heads.shared_by(ranks, rank, parts, index) for index in range(parts))
    return part_columns(1 if len(outputs) == 1 else outputs[0], outputs[-1] // ranks, parts)


@dataclass(frozen=True)
class Columns:
    """The columns of a rank's weight and bias that a linear uses."""

    runs: tuple[tuple[int, int], ...] = ()
    """(start, stop) of each run of used columns."""
    held: int | None = None
    """Number of columns on this rank; None: all columns are used."""
    copies: int = 1
    """Number of ranks with the same columns."""
    copy: int = 0
    """Index of this part among the parts that share a head."""

    def of(self, x: Tensor) -> Tensor:
        """The used columns of x [..., N]."""
        return x if self.held is None else torch.cat([x[..., start:stop] for start, stop in self.runs], -1)

    def num_of(self, held: int) -> int:
        """Number of used columns among `held`."""
        return held if self.held is None else sum(stop - start for start, stop in self.runs)

    def write(self, write: WriteGradient) -> WriteGradient:
        """Turns a function that writes the used columns' gradient into one that writes the held columns'."""
        if self.held is None:
            return write

        def write_held(out: Tensor, beta: int) -> None:
            if not beta:
                out.zero_()
            self.write_used(write, out, beta)

        return write_held

    def write_used(self, write: WriteGradient, out: Tensor, beta: int) -> None:
        """Write the used columns' gradient plus beta · out into these columns of `out`, all held columns."""
        if self.held is None:
            write(out, beta)
            return
        sizes = [stop - start for start, stop in self.runs]
        used = out.new_empty(*out.shape[:-1], sum(sizes))
        write(used, 0)
        for (start, stop), run in zip(self.runs, used.split(sizes, -1), strict=True):
            write_part(run, out[..., start:stop], beta)


ALL_COLUMNS = Columns()


@dataclass(frozen=True)
class ColumnProducts(Products):
    """Products with some of the columns that a rank holds."""

    columns: Columns
    products: Products = PLAIN
    """The products with all columns that are used."""

    def changed(self, change: ChangeProducts) -> Products:
        return replace(self, products=self.products.changed(change))

    def outputs_of(self, held: int) -> int:
        return self.columns.num_of(held)

    def read(self, dy: Tensor) -> Any:
        return self.products.read(dy)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return self.products.forward(x, self.columns.of(weight), None if bias is None else self.columns.of(bias))

    def input_gradient(self, dy: Any, weight: Tensor) -> Tensor:
        return self.products.input_gradient(dy, self.columns.of(weight))

    def weight_gradients(self, x: Callable[[], Tensor], dy: Any) -> Iterable[WriteGradient]:
        return map(self.columns.write, self.products.weight_gradients(x, dy))

    def bias_gradients(self, dy: Any) -> Iterable[WriteGradient]:
        return map(self.columns.write, self.products.bias_gradients(dy))
