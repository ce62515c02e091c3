"""Blocks: operands of one fixed shape for kernels, so that cuts of widths and sequences do not change any bits.

The config sets the number of parts of inner widths, heads and tables (`bits.tensor`) and the number of runs of tokens
of a sequence (`bits.sequence`). Every product multiplies the tokens of one run by the columns or rows of one part, on
one device too. Ranks hold whole parts and whole runs, so kernel shapes do not depend on the layout.

| sum over | operands                                         | how                                                  |
|----------|--------------------------------------------------|------------------------------------------------------|
| parts    | a contract's output, an expand's dx, a head's dh | balanced tree over the index of the part, `widened`  |
| runs     | gradients of weights                             | each run's gradient rounded to an integer (fixed.py) |

Trees: ranks/trees.py. Each rank holds an aligned subtree and sums it; the sums of the ranks are the leaves of the
remaining tree. Each block has separate memory that begins at a cache line, since some libraries choose kernels by
alignment.
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
    """This rank's parts and runs of each dimension: counts, and the index of the first among all ranks' (`first_*`)."""

    parts: int = 1
    """This rank's parts of inner widths."""
    first_part: int = 0
    all_parts: int = 1
    """Parts of inner widths on all ranks."""
    runs: int = 1
    """This rank's runs of tokens inside of pairs."""
    first_run: int = 0
    outer_runs: int = 1
    """This rank's runs of tokens between pairs; fewer than `runs` if sequence parallelism cuts them again."""
    first_outer_run: int = 0
    head_parts: int = 1
    """This rank's parts of attention's heads, for whole sequences. Ulysses may split a part of the inner width."""
    first_head_part: int = 0
    query_runs: int = 1
    """Runs of queries that attention computes one at a time on this rank."""
    grains: int = 1
    """Grains inside of pairs at a time; several if ranks hold different samples between pairs."""
    hidden: int = 1
    """Parts of the width between pairs, on all ranks."""
    own_hidden: int = 1
    """Parts of the width between pairs on this rank."""
    first_hidden: int = 0
    exact: bool = False
    """True: sums over parts are widened, in trees. False: a rank has one part, and ranks add in the product's dtype."""

    def cut(self, x: Tensor) -> list[Tensor]:
        """Return the runs of each grain of x [B, T, ...] inside of a pair. If T = 1 (a head of one token per sequence),
        each grain is one run."""
        if not self.exact or self.grains * self.runs == 1:
            return [x]
        return [run for grain in x.chunk(self.grains) for run in grain.chunk(self.runs if x.shape[1] > 1 else 1, 1)]

    def rows(self, x: Tensor) -> list[Tensor]:
        """Return the runs of each grain of x [B, T, ..., N], each as [rows, N] in separate memory."""
        return [(apart(run) if self.exact else run).flatten(0, -2) for run in self.cut(x)]

    def rows_by(self, x: Tensor, count: int) -> list[list[Tensor]]:
        """Return the runs of each grain of x [B, T, ..., N], each as `count` equal parts [rows, N/count]."""
        if count == 1:
            return [[rows] for rows in self.rows(x)]
        return [[apart(block).flatten(0, -2) for block in run.chunk(count, -1)] for run in self.cut(x)]

    def joined(self, runs: list[Tensor], batch: int) -> Tensor:
        """Join runs [rows, ...], grain by grain, into [B, T, ...]."""
        if len(runs) == 1:
            return runs[0].unflatten(0, (batch, -1))
        every = len(runs) // self.grains
        parts = [run.unflatten(0, (batch // self.grains, -1)) for run in runs]
        grains = parts  # a concatenation of one tensor would copy it
        if every > 1:
            grains = [torch.cat(parts[start : start + every], 1) for start in range(0, len(parts), every)]
        return grains[0] if self.grains == 1 else torch.cat(grains)

    @property
    def outer(self) -> Blocks:
        """The blocks between pairs: this rank's samples, and this rank's tokens."""
        return replace(self, runs=self.outer_runs, first_run=self.first_outer_run, grains=1)

    @property
    def uncut(self) -> Blocks:
        """The blocks between pairs of a layer that every rank holds whole: each rank has all parts."""
        return replace(self.outer, parts=self.all_parts, first_part=0)

    @property
    def between(self) -> Blocks:
        """The blocks between pairs of a layer with its hidden width in `hidden` parts, `own_hidden` on this rank."""
        parts, first, count = self.own_hidden, self.first_hidden, self.hidden
        return replace(self.outer, parts=parts, first_part=first, all_parts=count)

    def own(self, weight: Tensor) -> Tensor:
        """Return a part of a weight as kernels get it: in separate memory if `exact`."""
        return apart(weight) if self.exact else weight

    def total(self, products: Iterator[Tensor]) -> Tensor:
        """Sum one run's products over this rank's parts; if `exact`, by a tree of widened sums, for the ranks' tree."""
        return tree_sum(map(widened, products)) if self.exact else next(products)


WHOLE = Blocks()
"""The blocks of the usual mode: one block, with everything that a rank holds."""


def apart(x: Tensor) -> Tensor:
    """Return x, contiguous and aligned to a cache line; a copy unless x already is."""
    if x.is_contiguous() and x.data_ptr() % LINE_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def widened(x: Tensor) -> Tensor:
    """Return x in float32, or in float64 if x is: the dtype of sums."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def parts_of(x: Tensor, count: int, dim: int) -> list[Tensor]:
    """Split x into equal parts along `dim`, each in separate memory if there are several."""
    return [x] if count == 1 else [apart(chunk) for chunk in x.chunk(count, dim)]


def sum_of_products(products: Products, rows: Iterable[Tensor], weights: Iterable[Tensor]) -> Tensor:
    """Multiply each part [n, k] by its [k, m], and sum the products, widened, in the order of a tree."""
    return tree_sum(widened(products.multiply(inputs, weight)) for inputs, weight in zip(rows, weights, strict=True))


Draw = Callable[[int], list[int]]
"""draw(n): a seed for the next masks of each of n grains (bits/grains.py)."""
