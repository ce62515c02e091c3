"""All that `meshwright branches` says of a run: regions, like ones together, and what dealing them out could gain.

How much faster g ranks could be than one, if sending took no time (Amdahl, 1967; SUPER, IPDPS 2021, section III).

C: work outside of the branches that are dealt; D_r: the most that a sub-grid gets of region r, dealt by cost
(subgraph/deal.py). Regions come one after another, so that each ends with its slowest sub-grid.

| layout                                                        | bound                         |
|---------------------------------------------------------------|-------------------------------|
| D&SP: the g ranks share the rows of common layers             | total / (C/g + sum of D_r)    |
| D&SP-cSub, pure sub-graph parallelism: one computes these     | total / (C + sum of D_r)      |
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.subgraph.branches import deal
from meshwright.tools.branches.model import Branch, TracedModel, trace_model
from meshwright.tools.branches.operator_parts import find_operator_parts
from meshwright.tools.branches.region import Region, find_split_joins

Dealt = tuple[Sequence[float], int]
"""The costs of a region's branches, and how often the region is there."""


@dataclass(frozen=True)
class Bound:
    """Against one rank. `all_ranks`: common layers on all (D&SP); `one`: on one sub-grid (D&SP-cSub)."""

    all_ranks: float
    one: float


def bound(total: float, regions: Sequence[Dealt], num_subgrids: int) -> Bound:
    """Of a model of `total` cost whose `regions`, which do not overlap, are dealt over sub-grids of one rank each."""
    common = total - sum(times * sum(costs) for costs, times in regions)
    slowest = sum(times * most_loaded(costs, num_subgrids) for costs, times in regions)
    return Bound(total / (common / num_subgrids + slowest), total / (common + slowest))


def most_loaded(costs: Sequence[float], num_subgrids: int) -> float:
    """What the sub-grid with the most to do has to do; with fewer branches than sub-grids some have nothing."""
    hands = deal(costs, min(num_subgrids, len(costs)))
    return max(sum(costs[branch] for branch in hand) for hand in hands)


_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True)
class Group:
    """Regions that differ in nothing but the numbers in their paths. `region`: the first; `places`: where all are.

    `cut_by`: the values of layout.tensor.branch that deal them out. `bounds`: by sub-grids, of these regions alone.
    """

    region: Region
    places: tuple[str, ...]
    cut_by: tuple[Branch, ...]
    bounds: dict[int, Bound]

    @property
    def total_flops(self) -> float:
        return len(self.places) * self.region.total_flops


@dataclass(frozen=True)
class Findings:
    """Of a microbatch of `rows` samples, forward. `longest_flops`: of the longest chain of operators.

    `lone`: joins of a value with what one branch alone makes of it. `layouts`: bounds by value of layout.tensor.branch
    and sub-grids; none for a value that would cut nothing.
    """

    rows: int
    total_flops: int
    longest_flops: int
    lone: int
    groups: tuple[Group, ...]
    layouts: dict[Branch, dict[int, Bound]]


def find_branches(config: Config, grids: Sequence[int]) -> Findings:
    """Trace the run's model and find its branches. `grids`: numbers of sub-grids to deal them over."""
    return findings_of(trace_model(config), grids)


def findings_of(model: TracedModel, grids: Sequence[int]) -> Findings:
    """What a traced model has."""
    joins = find_split_joins(model.graph)
    groups = _grouped(model, (*joins.regions, *find_operator_parts(model.graph)), grids)
    total = model.graph.total_flops
    layouts = {}
    for value in get_args(Branch):
        dealt = [(group.region.flops, len(group.places)) for group in groups if value in group.cut_by]
        if dealt:
            layouts[value] = {size: bound(total, dealt, size) for size in grids}
    return Findings(model.rows, total, model.graph.longest_flops, joins.lone, groups, layouts)


def parse_grids(text: str) -> tuple[int, ...]:
    """`2,4,8` -> (2, 4, 8). Raises ConfigError for what is no number of sub-grids."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isdecimal() and int(word) > 1):
            raise ConfigError.of("--grids", word, "is not a number of sub-grids", "2 or more, such as 2,4,8")
    return tuple(map(int, words))


def unnumbered(path: str) -> str:
    """`blocks.3.attention` -> `blocks.*.attention`."""
    return _NUMBER.sub("*", path)


def _grouped(model: TracedModel, regions: Sequence[Region], grids: Sequence[int]) -> tuple[Group, ...]:
    alike: dict[tuple[object, ...], list[Region]] = {}
    for region in regions:
        names = tuple(map(unnumbered, region.names))
        key = (region.form, unnumbered(region.where), region.enter, region.leave, region.flops, names)
        alike.setdefault((*key, model.cut_by(region)), []).append(region)
    total = model.graph.total_flops
    groups = []
    for same in alike.values():
        first, places = same[0], tuple(region.where for region in same)
        bounds = {size: bound(total, [(first.flops, len(places))], size) for size in grids}
        groups.append(Group(first, places, model.cut_by(first), bounds))
    return tuple(groups)
