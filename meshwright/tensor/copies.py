"""Grouped queries with more tensor ranks p than key-value heads K: c = p / K ranks copy a head and split its queries.

One linear makes the queries, keys and values of K groups, [H, K (G + 2) E]: G queries, a key and a value each. The c
ranks of a group hold all of the group's columns, [H, (G + 2) E], and multiply by some:

| of a group's columns | i-th of c ranks multiplies by |
|----------------------|-------------------------------|
| G queries            | [i G/c, (i + 1) G/c)          |
| key, value           | both, as the other c - 1 do   |

Each rank's gradient is zero for the other ranks' queries, and for key and value covers its own queries only. The
gradients are summed over the copies once a step.

Alternative (Megatron-LM): cut the columns into p equal runs and gather the products, c - 1 of c parts of
[B, T, (G + 2) E] in each layer and microbatch, forward and backward. Holding only its own queries would save a rank
(G - G/c) H E elements, and make the parameter two boxes in a checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.bits.blocks import Blocks
from meshwright.parameters.shard import WriteGradient


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

    def shared_by(self, ranks: int, rank: int, parts: int = 1, part: int = 0) -> SharedColumns:
        """The columns of part `part` (of `parts`) of rank `rank` (of `ranks`), among the columns that the rank holds.
        ranks * parts is a multiple c of `count`."""
        copies, width, index = ranks * parts // self.count, self.width, rank * parts + part
        own, first = self.queries // copies * width, self.queries * width
        held = max(self.count // ranks, 1)
        corner = (index // copies - rank * parts // copies) * (first + 2 * width)
        start = corner + index % copies * own
        runs = ((start, start + own), (corner + first, corner + first + 2 * width))
        return SharedColumns(runs, held * (first + 2 * width), max(ranks // self.count, 1), index % copies)


def part_columns(groups: int, width: int, parts: int) -> tuple[Columns, ...]:
    """The columns of each of `parts` equal parts of a rank's columns, which are `groups` groups of `width`."""
    if parts == 1:
        return (ALL_COLUMNS,)
    own = width // parts
    return tuple(
        SharedColumns(
            tuple((group * width + part * own, group * width + (part + 1) * own) for group in range(groups)),
            groups * width,
        )
        for part in range(parts)
    )


def shared_heads(heads: HeadGroups | None, blocks: Blocks) -> HeadGroups | None:
    """`heads` if several parts (of all ranks) share a key-value head, else None."""
    return heads if heads is not None and heads.count < blocks.all_parts else None


def columns_of_parts(
    outputs: tuple[int, ...], shared: HeadGroups | None, ranks: int, rank: int, parts: int
) -> tuple[Columns, ...]:
    """The columns of each of a rank's parts of a linear with outputs (N,) or (groups, N/groups). `shared`: as
    `shared_heads` returns."""
    if shared is not None:
        return tuple(shared.shared_by(ranks, rank, parts, part) for part in range(parts))
    return part_columns(1 if len(outputs) == 1 else outputs[0], outputs[-1] // ranks, parts)


class Columns:
    """The columns of the rank's weight and bias that a linear uses; here all of them."""

    copies = 1
    copy = 0
    """Index among the `copies` parts that share columns."""

    def of(self, x: Tensor) -> Tensor:
        """The used columns of x [..., N]."""
        return x

    def num_of(self, held: int) -> int:
        """Number of used columns among `held`."""
        return held

    def like_held(self, x: Tensor) -> Tensor:
        """An uninitialised tensor as wide as the held columns, given x as wide as the used ones."""
        return x

    def write(self, write: WriteGradient) -> WriteGradient:
        """Turns a function that writes the used columns' gradient into one that writes the held columns'."""
        return write


ALL_COLUMNS = Columns()


@dataclass(frozen=True)
class SharedColumns(Columns):
    """`runs` (start, stop) of the `held` columns, of which `copies` ranks have copies; `copy`: index among them."""

    runs: tuple[tuple[int, int], ...]
    held: int
    copies: int = 1
    copy: int = 0

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
