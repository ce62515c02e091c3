"""More tensor ranks than key-value heads: a head lives on c = p / K neighbours, each of which has some of its queries.

A linear makes queries, keys and values of K groups, [H, K (G + 2) E]: each group has its G queries, its key, its value.
The ranks of a group hold all its columns, [H, (G + 2) E], and multiply by some:

| of a group's columns | i-th of c ranks multiplies by |
|----------------------|-------------------------------|
| G queries            | [i G/c, (i + 1) G/c)          |
| key, value           | both, as the others do        |

So each has a part of the group's gradient: zero for the queries of others, for key and value that of its own queries.
They are summed over the copies, once a step, as over any axis that feeds a parameter different inputs.

The other way (Megatron-LM's) cuts the columns into p runs, whatever is in them, and gathers what they make: c - 1 of c
parts of [B, T, (G + 2) E] in each layer and microbatch, forward and backward. To hold the group's own queries alone
would save (G - G/c) H E a rank, and make a parameter two boxes in a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.parameters.shard import WriteGradient


@dataclass(frozen=True)
class HeadGroups:
    """`count` key-value heads with `queries` queries each, all `width` wide."""

    count: int
    queries: int
    width: int

    @property
    def columns(self) -> int:
        """Columns of the linear that makes them."""
        return self.count * (self.queries + 2) * self.width

    def shared_by(self, ranks: int, index: int) -> SharedColumns:
        """The columns of the index-th of `ranks` ranks, which are c times as many as groups."""
        copies, width = ranks // self.count, self.width
        own, first = self.queries // copies * width, self.queries * width
        start = index % copies * own
        return SharedColumns(((start, start + own), (first, first + 2 * width)), first + 2 * width, copies)


class Columns:
    """The columns of its weight and its bias that a linear multiplies by and adds: all that this rank holds."""

    copies = 1

    def of(self, x: Tensor) -> Tensor:
        """Those columns of x [..., N]."""
        return x

    def num_of(self, held: int) -> int:
        """How many of the columns held they are."""
        return held

    def like_held(self, x: Tensor) -> Tensor:
        """A tensor as wide as what is held, of what is as wide as those columns; its values are no one's."""
        return x

    def write(self, write: WriteGradient) -> WriteGradient:
        """Write the gradient of what is held, where `write` writes that of those columns."""
        return write


ALL_COLUMNS = Columns()


@dataclass(frozen=True)
class SharedColumns(Columns):
    """Runs of the `held` columns, which `copies` ranks hold together."""

    runs: tuple[tuple[int, int], ...]
    held: int
    copies: int

    def of(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., start:stop] for start, stop in self.runs], -1)

    def num_of(self, held: int) -> int:
        return sum(stop - start for start, stop in self.runs)

    def like_held(self, x: Tensor) -> Tensor:
        return x.new_empty(*x.shape[:-1], self.held)

    def write(self, write: WriteGradient) -> WriteGradient:
        def write_held(out: Tensor, beta: int) -> None:
            own = out.new_empty(*out.shape[:-1], self.num_of(self.held))
            write(own, 0)
            if not beta:
                out.zero_()
            parts = own.split([stop - start for start, stop in self.runs], -1)
            for (start, stop), part in zip(self.runs, parts, strict=True):
                out[..., start:stop].add_(part)

        return write_held
