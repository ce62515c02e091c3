"""All that `meshwright branches` says of a run: regions, like ones together, and what dealing them out could gain."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from meshwright.branches.bound import Bound, bound
from meshwright.branches.model import Branch, TracedModel, trace_model
from meshwright.branches.operator_parts import find_operator_parts
from meshwright.branches.region import Region
from meshwright.branches.split_join import find_split_joins
from meshwright.config import Config
from meshwright.errors import ConfigError

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
