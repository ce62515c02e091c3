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

from meshwright.bits.blocks import Blocks
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

    def shared_by(self, ranks: int, rank: int, parts: int = 1, part: int = 0) -> SharedColumns:
        """The columns, among those that the rank-th of `ranks` ranks holds, of its part-th of `parts` parts: all ranks'
        parts are c times as many as groups."""
        copies, width, index = ranks * parts // self.count, self.width, rank * parts + part
        own, first = self.queries // copies * width, self.queries * width
        held = max(self.count // ranks, 1)
        corner = (index // copies - rank * parts // copies) * (first + 2 * width)
        start = corner + index % copies * own
        runs = ((start, start + own), (corner + first, corner + first + 2 * width))
        return SharedColumns(runs, held * (first + 2 * width), max(ranks // self.count, 1), index % copies)


def part_columns(groups: int, width: int, parts: int) -> tuple[Columns, ...]:
    """The columns of each of `parts` parts of `groups` groups that are each `width` wide here."""
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
    """Key-value heads that are fewer than all ranks' parts, several of which share one; else none."""
    return heads if heads is not None and heads.count < blocks.all_parts else None


def columns_of_parts(
    outputs: tuple[int, ...], shared: HeadGroups | None, ranks: int, rank: int, parts: int
) -> tuple[Columns, ...]:
    """The columns of each of a rank's parts of a linear with outputs (N,) or (groups, N/groups). `shared`: key-value
    heads that are fewer than all ranks' parts."""
    if shared is not None:
        return tuple(shared.shared_by(ranks, rank, parts, part) for part in range(parts))
    return part_columns(1 if len(outputs) == 1 else outputs[0], outputs[-1] // ranks, parts)


class Columns:
    """The columns of its weight and its bias that a linear multiplies by and adds: all that this rank holds."""

    copies = 1
    copy = 0
    """Which of the parts that have columns in common it is of."""

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
    """Runs of the `held` columns, which `copies` ranks hold together; `copy`: which of those who have columns in common
    it is."""

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
