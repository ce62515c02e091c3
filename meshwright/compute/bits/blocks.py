"""Blocks: the operands of one shape that kernels get where equal bits are asked of every cut of widths and sequences.

A run names how many parts its inner widths, heads and tables fall into (`bits.tensor`), and how many runs of tokens its
sequences (`bits.sequence`). Every product is of one run's tokens and one part's columns or rows, on one device as well;
ranks hold whole parts and whole runs, so that a kernel's shape says nothing about the layout.

| sum over | of                                               | how                                              |
|----------|--------------------------------------------------|--------------------------------------------------|
| parts    | a contract's output, an expand's dx, a head's dh | a balanced tree over the part's index, float32   |
| runs     | gradients of weights                             | each run's, rounded, as an integer (fixed.py)    |

Trees: ranks/trees.py. Ranks hold aligned subtrees, add up their own, and the ranks' sums go on as leaves of the tree
that is left. Blocks lie in memory of their own that begins at a cache line: some libraries choose a kernel by that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.compute.tensor.products import Products
from meshwright.ranks.trees import tree_sum

LINE_BYTES = 64
"""A cache line, and the widest vectors."""


@dataclass(frozen=True)
class Blocks:
    """This rank's parts and runs, as counts and the number of the first among the run's.

    `parts`: of inner widths; `all_parts`: of all ranks. `runs`: of the tokens inside of pairs; `outer_runs`: of those
    between pairs, fewer where sequence parallelism cuts them again. `head_parts`: of attention's heads, where a
    sequence is whole; a part of the inner width may fall into several for Ulysses. `grains`: whose rows are inside of
    pairs at a time, several where ranks hold other samples between them. `hidden`: parts of the width between pairs, of
    which this rank has `own_hidden` there.
    """

    parts: int = 1
    first_part: int = 0
    all_parts: int = 1
    runs: int = 1
    first_run: int = 0
    outer_runs: int = 1
    first_outer_run: int = 0
    head_parts: int = 1
    first_head_part: int = 0
    grains: int = 1
    hidden: int = 1
    own_hidden: int = 1
    first_hidden: int = 0
    exact: bool = False
    """Whether sums over parts are trees in float32; usually a rank has one part, and its product's dtype is added."""

    def cut(self, x: Tensor) -> list[Tensor]:
        """The runs of each grain of x [B, T, ...] inside of a pair. One token of each sequence, which a head reads, is
        one run."""
        if not self.exact:
            return [x]
        return [run for grain in x.chunk(self.grains) for run in grain.chunk(self.runs if x.shape[1] > 1 else 1, 1)]

    def rows(self, x: Tensor) -> list[Tensor]:
        """The runs of each grain of x [B, T, ..., N], each as [rows, N] in memory of its own."""
        return [(apart(run) if self.exact else run).flatten(0, -2) for run in self.cut(x)]

    def joined(self, runs: list[Tensor], batch: int) -> Tensor:
        """[B, T, ...] of the rows of its grains' runs."""
        if len(runs) == 1:
            return runs[0].unflatten(0, (batch, -1))
        every = len(runs) // self.grains
        parts = [run.unflatten(0, (batch // self.grains, -1)) for run in runs]
        grains = [torch.cat(parts[start : start + every], 1) for start in range(0, len(parts), every)]
        return grains[0] if self.grains == 1 else torch.cat(grains)

    @property
    def outer(self) -> Blocks:
        """The blocks of a rank between pairs: its own samples, and the tokens that are left to it."""
        return replace(self, runs=self.outer_runs, first_run=self.first_outer_run, grains=1)

    @property
    def uncut(self) -> Blocks:
        """The blocks between pairs of a layer that every rank holds whole: all parts are its own."""
        return replace(self.outer, parts=self.all_parts, first_part=0)

    @property
    def between(self) -> Blocks:
        """The blocks between pairs of a layer whose hidden width falls into `hidden` parts, some of them the rank's."""
        own, first, count = self.own_hidden, self.first_hidden, self.hidden
        return replace(self.outer, parts=own, first_part=first, all_parts=count)

    def own(self, weight: Tensor) -> Tensor:
        """A part of a weight as kernels get it."""
        return apart(weight) if self.exact else weight

    def total(self, products: Iterator[Tensor]) -> Tensor:
        """The sum of one run's products over this rank's parts; in float32 where it goes on as a leaf of a tree."""
        return tree_sum(product.float() for product in products) if self.exact else next(products)


WHOLE = Blocks()
"""The usual operands: all that a rank holds."""


def apart(x: Tensor) -> Tensor:
    """x in memory of its own shape that begins at a cache line; x itself where it lies so."""
    if x.is_contiguous() and x.data_ptr() % LINE_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def parts_of(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """Equal parts of x along a dim, as kernels get them."""
    return [x] if count == 1 else [apart(part) for part in x.chunk(count, dim)]


def sum_of_products(products: Products, rows: Iterable[Tensor], owns: Iterable[Tensor]) -> Tensor:
    """The sum of the products of parts, [n, k] and [k, m], in float32 and in the order of a tree."""
    return tree_sum(products.multiply(part, own).float() for part, own in zip(rows, owns, strict=True))


Draw = Callable[[int], list[int]]
"""draw(grains): a number for the next masks of each of so many grains (bits/grains.py)."""
