"""Grid: named axes over ranks. Arithmetic only, so that a laptop can plan a cluster.

Axes are listed outermost first. Ranks number the grid in row-major order: ranks that differ only on the last axis are
neighbours and share a node first. An axis may be split into parts that alternate with other axes: with row 4 x col 4
nested as row 2, col 2, row 2, col 2, each four neighbours are a block of 2 x 2.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass

PIPE, ENDS = "pipe", "ends"
"""In a group's axes, ENDS means the first and last rank of the pipe axis, which both hold a copy of a tied embedding.
Ranks between them form groups of one."""

HEAD_COPIES = "copies"
"""In a group's axes, HEAD_COPIES means the ranks that hold the same key-value heads: neighbours on the axis that cuts
heads, if the axis has more ranks than the model has key-value heads (tensor/copies.py)."""

REPLICATE, DATA, EXPERT = "replicate", "data", "expert"
DATA_AXES = (REPLICATE, DATA, EXPERT)
"""The axes that split the global batch's rows: ranks that differ on one of them train on other samples. Slices of
weights and gradients are cut over DATA, and repeated over REPLICATE, which only hybrid sharding (HSDP) has. Ranks that
differ on EXPERT (only there with layout.data.expert) hold different experts and exchange rows in every layer."""

REPLICA_AXES = (REPLICATE, DATA)
"""The axes whose ranks compute layers independently of each other."""


@dataclass(frozen=True)
class Grid:
    """A box of ranks: `axes` holds (name, size) pairs, outermost first. Sizes of 1 are ordinary.

    `copies`: (axis, c): c neighbours on the axis hold the same key-value heads. `nesting`: like `axes`, but an axis
    split into parts is listed once per part; the parts' sizes multiply to the axis's size.
    """

    axes: tuple[tuple[str, int], ...]
    copies: tuple[str, int] | None = None
    nesting: tuple[tuple[str, int], ...] = ()
    names: tuple[str, ...] = field(init=False, repr=False, compare=False)
    world_size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        names = tuple(name for name, _ in self.axes)
        assert len(set(names)) == len(names), f"axis named twice: {names}"
        assert all(size >= 1 for _, size in self.axes), f"axis of no ranks: {self.axes}"
        # Set in spite of `frozen`. A default nesting is filled in, so that equal grids compare equal.
        size = math.prod(size for _, size in self.axes)
        self.__dict__.update(names=names, world_size=size, nesting=self.nesting or self.axes)
        assert {name: len(steps) for name, steps in self._steps.items()} == dict(self.axes), f"{self} leaves ranks out"

    @property
    def axis_sets(self) -> tuple[str, ...]:
        """Every set of axes that a group may span: `data`, `row`, `data+row`, ...; single axes first.

        With stages also sets such as `data+ends`, for a tied table's gradient: the first and last stage hold copies.
        """
        names = (*self.names, *self.stand_ins)
        chosen = (some for count in range(1, len(names) + 1) for some in combinations(names, count))
        of = {ENDS: PIPE} | ({HEAD_COPIES: self.copies[0]} if self.copies else {})
        # An axis together with its stand-in would be a group within a group.
        return tuple("+".join(some) for some in chosen if all(of.get(name) not in some for name in some))

    @property
    def stand_ins(self) -> tuple[str, ...]:
        """HEAD_COPIES and ENDS, if this grid has such groups: names of groups that are parts of an axis."""
        ends = (ENDS,) if dict(self.axes).get(PIPE, 1) > 1 else ()
        return (*((HEAD_COPIES,) if self.copies else ()), *ends)

    def size(self, *names: str) -> int:
        """Count the ranks that the named axes span together (1 for no axis)."""
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the rank's index on every axis."""
        assert 0 <= rank < self.world_size, f"rank {rank} outside of {self}"
        indices, inner = dict.fromkeys(self.names, 0), dict.fromkeys(self.names, 1)
        for name, size in reversed(self.nesting):
            # From the innermost part outwards; the parts of a split axis are the digits of the axis's index.
            rank, index = divmod(rank, size)
            indices[name] += index * inner[name]
            inner[name] *= size
        return indices

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at the given index of every axis."""
        return sum(self._steps[name][coordinates[name]] for name in self.names)

    @cached_property
    def _steps(self) -> dict[str, list[int]]:
        """By axis and index: the offset of that rank from the axis's first rank."""
        steps: dict[str, list[int]] = {}
        stride = 1
        for name, size in reversed(self.nesting):
            steps[name] = [index * stride + inner for index in range(size) for inner in steps.get(name, [0])]
            stride *= size
        return steps

    def index(self, rank: int, *names: str) -> int:
        """Return the rank's position in the rank's group over the named axes."""
        return self.group(rank, *names).index(rank)

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """List the ranks that agree with `rank` on every axis except the named ones, ascending.

        ENDS and HEAD_COPIES may be named.
        """
        here, ranks = self.coordinates(rank), [0]
        for name, size in self.axes:
            index, steps = here[name], self._steps[name]
            choices: Sequence[int] = (index,)  # only this rank's index, unless the axis or its stand-in is named
            if name in names:
                choices = range(size)
            elif name == PIPE and ENDS in names and index in (0, size - 1) and size > 1:
                choices = 0, size - 1
            elif self.copies and name == self.copies[0] and HEAD_COPIES in names:
                first = index - index % self.copies[1]
                choices = range(first, first + self.copies[1])
            ranks = [outer + steps[choice] for outer in ranks for choice in choices]
        # Ranks of split axes are not in ascending order; sorted, so that members of a group agree on one order.
        return tuple(sorted(ranks))

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """List all groups over the named axes. Every rank is in exactly one."""
        return sorted({self.group(rank, *names) for rank in range(self.world_size)})

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """Sort the given axis names in grid order, each once, HEAD_COPIES and ENDS last."""
        chosen = set(names)
        known = (*self.names, *((HEAD_COPIES,) if self.copies else ()), ENDS)
        assert chosen <= set(known), f"unknown axes {chosen - set(known)} in {self}"
        return tuple(name for name in known if name in chosen)
