"""Grid: named axes over ranks. Arithmetic only, so a laptop can plan a cluster with it.

Axes are listed outermost first; ranks number the grid in row-major order, so ranks that differ in the last
axis only are neighbours and share a node first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

PIPE, ENDS = "pipe", "ends"
"""ENDS stands for the first and the last rank of the pipe axis, where a group is asked for: a tied embedding has a copy
on both. The ranks between are alone in theirs."""

REPLICATE, DATA, EXPERT = "replicate", "data", "expert"
DATA_AXES = (REPLICATE, DATA, EXPERT)
"""The axes that split the global batch's rows: ranks that differ on one of them train on other samples. Slices of
weights and gradients are cut over DATA, and repeated over REPLICATE, which only hybrid sharding (HSDP) has. Ranks that
differ on EXPERT, which is there where it is asked for, hold different experts and meet in every layer."""

REPLICA_AXES = (REPLICATE, DATA)
"""The axes whose ranks compute a layer without each other."""


@dataclass(frozen=True)
class Grid:
    """A box of ranks: `axes` holds (name, size) pairs, outermost first. Sizes of 1 are ordinary."""

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = self.names
        assert len(set(names)) == len(names), f"axis named twice: {names}"
        assert all(size >= 1 for _, size in self.axes), f"axis of no ranks: {self.axes}"

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def axis_sets(self) -> tuple[str, ...]:
        """Every set of axes that a group may span: `data`, `row`, `data+row`, ...; single axes first.

        With stages also `data+ends` and others of the kind: a tied table's gradient goes over the pipe axis's ends.
        """
        names = (*self.names, ENDS) if PIPE in self.names and self.size(PIPE) > 1 else self.names
        chosen = (some for count in range(1, len(names) + 1) for some in combinations(names, count))
        return tuple("+".join(some) for some in chosen if not {PIPE, ENDS} <= set(some))

    @property
    def world_size(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size(self, *names: str) -> int:
        """How many ranks the named axes span together (1 for no axis)."""
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in names)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The rank's index on every axis."""
        assert 0 <= rank < self.world_size, f"rank {rank} outside of {self}"
        indices = {}
        for name, size in reversed(self.axes):
            rank, indices[name] = divmod(rank, size)
        return {name: indices[name] for name in self.names}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The rank at the given index of every axis."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinates[name]
        return rank

    def index(self, rank: int, *names: str) -> int:
        """The rank's position in its group over the named axes, in grid order."""
        return self.group(rank, *names).index(rank)

    def group(self, rank: int, *names: str) -> tuple[int, ...]:
        """The ranks that agree with `rank` on every axis but the named ones, in grid order. ENDS may be named."""
        assert 0 <= rank < self.world_size, f"rank {rank} outside of {self}"
        ranks, stride = [0], 1
        for name, size in reversed(self.axes):
            rank, index = divmod(rank, size)
            ends = (0, size - 1) if name == PIPE and ENDS in names and size > 1 else ()
            choices: Sequence[int] = range(size) if name in names else ends if index in ends else (index,)
            ranks = [choice * stride + inner for choice in choices for inner in ranks]
            stride *= size
        return tuple(ranks)

    def groups(self, *names: str) -> list[tuple[int, ...]]:
        """All groups over the named axes: every rank is in exactly one."""
        return sorted({self.group(rank, *names) for rank in range(self.world_size)})

    def ordered(self, names: Iterable[str]) -> tuple[str, ...]:
        """The given axis names in grid order, each once; ENDS comes last."""
        chosen = set(names)
        known = (*self.names, ENDS)
        assert chosen <= set(known), f"unknown axes {chosen - set(known)} in {self}"
        return tuple(name for name in known if name in chosen)
