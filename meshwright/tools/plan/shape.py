"""How the groups over some axes lie on a cluster's levels: what crosses which links, and how many others do.

A unit of level 0 is a device; one of level l + 1 is what level l joins. Ranks fill units in order (topology.py). Two
ranks meet at the innermost level whose next unit holds both, and send over that level's links alone.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import dropwhile

from meshwright.errors import ConfigError
from meshwright.ranks.grid import ENDS, PIPE, Grid
from meshwright.tools.plan.cluster import Level


@dataclass(frozen=True)
class Span:
    """A group at a level where ranks of it meet.

    `units`: how many of the level's units the group has in one unit of the next. `members`: ranks of it in one unit.
    `peers`: how many ranks a rank meets there. `hops`: steps of a ring through the group that go over these links.
    (The most of each, where units hold different numbers of its ranks.) `bandwidth`: bytes a second out of a unit that
    are left to the group while the other groups over the same axes send too.
    """

    units: int
    members: int
    peers: int
    hops: int
    latency: float
    bandwidth: float
    ring: bool


@dataclass(frozen=True)
class Shape:
    """A group of `size` ranks by its spans, innermost first. `close`: its ranks are neighbours: consecutive, or all in
    one unit that the innermost level joins."""

    size: int
    spans: tuple[Span, ...]
    close: bool


@dataclass(frozen=True)
class Tiers:
    """A cluster's levels, with ranks counted into their units."""

    levels: tuple[Level, ...]

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Devices in a unit of each level."""
        sizes = [1]
        for level in self.levels[:-1]:
            assert level.joins is not None, level
            sizes.append(sizes[-1] * level.joins)
        return tuple(sizes)

    def check(self, num_ranks: int) -> None:
        """Raises ConfigError where the cluster has fewer devices."""
        joins = self.levels[-1].joins
        if joins is not None and num_ranks > joins * self.sizes[-1]:
            rule = "has more ranks than the cluster has devices"
            raise ConfigError.of("layout", f"{num_ranks} ranks", rule, f"<= {joins * self.sizes[-1]}")

    def unit(self, rank: int, level: int) -> int:
        """The number of the level's unit that holds the rank. After the last level there is one that holds all."""
        return rank // self.sizes[level] if level < len(self.sizes) else 0

    def meeting(self, rank: int, other: int) -> int:
        """The level over whose links one rank reaches another."""
        return next(n for n in range(len(self.levels)) if self.unit(rank, n + 1) == self.unit(other, n + 1))

    def shapes(self, grid: Grid, axes: Sequence[str]) -> list[Shape]:
        """The different shapes that the groups over these axes have: one, where numbers of ranks and of devices in a
        unit divide each other."""
        offsets = grid.group(0, *axes)
        if len(offsets) == 1:
            return [Shape(1, (), close=True)]
        if ENDS not in axes and self._even(grid):
            groups = [_Group(self, offsets)]
            sharing = [size // groups[0].members(n) for n, size in enumerate(self.sizes)]
            return [groups[0].shape(lambda level, unit: sharing[level])]
        kept = {*axes, PIPE} if ENDS in axes else set(axes)
        firsts = grid.group(0, *(name for name in grid.names if name not in kept))
        # What lies between multiples of both a block of whole groups and the outermost unit repeats.
        inward = dropwhile(lambda axis: axis[0] not in kept, grid.axes)
        window = math.lcm(math.prod(size for _, size in inward), self.sizes[-1])
        firsts = tuple(first for first in firsts if first < window)
        groups = [_Group(self, [first + offset for offset in offsets]) for first in firsts]
        crossing = Counter((level, unit) for group in groups for level, unit in group.crossed)
        return list(dict.fromkeys(group.shape(lambda level, unit: crossing[level, unit]) for group in groups))

    def step(self, grid: Grid, sender: int, receiver: int) -> Shape:
        """Two ranks as a group, while every rank in the sender's unit sends as far along the pipe as it does."""
        number = self.meeting(sender, receiver)
        level, size = self.levels[number], self.sizes[number]
        far = grid.coordinates(receiver)[PIPE] - grid.coordinates(sender)[PIPE]
        first = sender // size * size
        unit = range(first, min(first + size, grid.world_size))
        senders = [rank for rank in unit if 0 <= grid.coordinates(rank)[PIPE] + far < grid.size(PIPE)]
        crossing = sum(self.meeting(rank, rank + receiver - sender) == number for rank in senders)
        span = Span(2, 1, 1, 2, level.latency, level.share(crossing, 2, 1), level.kind == "ring")
        return Shape(2, (span,), close=number == 0 or abs(receiver - sender) == 1)

    def _even(self, grid: Grid) -> bool:
        """Whether units and the grid's inner axes divide each other all the way, so that all groups lie alike."""
        for size in self.sizes:
            left = min(size, grid.world_size)
            for _, axis in reversed(grid.axes):
                left, rest = (left // axis, left % axis) if left > axis else (1, axis % left)
                if rest:
                    return False
        return True


class _Group:
    """A group's ranks, counted into units: `held[l]` of level l, and last in the one that holds all."""

    def __init__(self, tiers: Tiers, ranks: Sequence[int]) -> None:
        self._tiers, self._ranks = tiers, ranks
        self.held = [Counter(tiers.unit(rank, level) for rank in ranks) for level in range(len(tiers.levels) + 1)]
        # By level: for each unit of the next, the units of this one in it.
        self._inner: list[dict[int, list[int]]] = []
        for level, size in enumerate(tiers.sizes):
            inner = defaultdict(list)
            for unit in self.held[level]:
                inner[tiers.unit(unit * size, level + 1)].append(unit)
            self._inner.append(inner)

    def members(self, level: int) -> int:
        """Ranks in a unit, at most."""
        return max(self.held[level].values())

    @property
    def crossed(self) -> Iterator[tuple[int, int]]:
        """The units out of which it sends, by level."""
        for level, inner in enumerate(self._inner):
            yield from ((level, unit) for units in inner.values() if len(units) > 1 for unit in units)

    def shape(self, sharing: Callable[[int, int], int]) -> Shape:
        """`sharing`: how many groups send out of a unit of a level."""
        rings = [len(held) if len(held) > 1 else 0 for held in self.held]  # steps of a ring out of units of each level
        crossed: defaultdict[int, list[int]] = defaultdict(list)
        for number, unit in self.crossed:
            crossed[number].append(unit)
        spans = tuple(
            Span(
                units=(num_units := max(map(len, self._inner[number].values()))),
                members=self.members(number),
                peers=self.members(number + 1) - min(self.held[number][unit] for unit in units),
                hops=rings[number] - rings[number + 1],
                latency=level.latency,
                bandwidth=level.share(max(sharing(number, unit) for unit in units), num_units, self.members(number)),
                ring=level.kind == "ring",
            )
            for number, level in enumerate(self._tiers.levels)
            if (units := crossed[number])
        )
        consecutive = self._ranks[-1] - self._ranks[0] == len(self._ranks) - 1
        return Shape(len(self._ranks), spans, close=consecutive or len(self._inner[0]) == 1)
