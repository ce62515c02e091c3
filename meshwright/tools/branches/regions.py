"""Regions of branches: where a model's graph splits, what runs side by side, and how it joins again.

Operators side by side: every join of values, back to the split that all of them come from. A join's split is the
nearest operator that all ways to it go through (its dominator). What lies between falls into pieces that share nothing:
the branches. Branches that come together before the join have a split of their own, and make a region in the region.
Sums of sums are one join. What no way leads through but a plain edge is no branch (residuals).

Branches inside of operators: heads of attention, groups of a convolution, columns between two linears. They are found
from the second linear back: what it reads must come, through operators that branches pass by themselves, from linears
that are read nowhere else. Attention or a grouped convolution on the way makes branches of its heads or groups;
without, each column of the width between is one (a feed-forward's hidden layer).

| region inside of operators | enter | leave  | a branch                                                     |
|----------------------------|-------|--------|--------------------------------------------------------------|
| between linears            | slice | concat | 1/A of all that stands between them                          |
| with its linears           | split | sum    | and its columns of the first linears, its rows of the second |
| columns                    | split | sum    | a column of the first linears, a row of the second           |

(SUPER, IPDPS 2021, section IV: two ways to cut multi-head attention; slices of the hidden layer.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.tools.branches.graph import BATCH, OperatorGraph, OperatorKind

RegionForm = Literal["split/join", "heads", "groups", "columns"]
"""split/join: operators side by side. heads, groups, columns: parts of operators, of attention, of a grouped
convolution, of the width between two linears."""


@dataclass(frozen=True)
class Region:
    """`enter`: split (every branch reads all) or slice (each its part); `leave`: sum, concat, or the operator's name.

    `flops`: of each branch; `names`: what each is, in a split/join; else of one, since all are alike. `linears`: the
    paths of the pair round it, if there is one; `cuts_linears`: they belong to the branches.
    """

    form: RegionForm
    where: str
    enter: str
    leave: str
    flops: tuple[float, ...]
    names: tuple[str, ...]
    linears: tuple[str, ...] = ()
    cuts_linears: bool = False

    @property
    def total_flops(self) -> float:
        return sum(self.flops)


SUMS = frozenset({"add", "add_"})
_NAMES = dict.fromkeys(SUMS, "sum") | {"cat": "concat", "stack": "concat", "scaled_dot_product_attention": "attention"}
"""Names of joins that have names of their own."""
SLICES = frozenset({"select", "slice", "narrow", "getitem", "chunk", "split", "split_with_sizes", "unbind"})


@dataclass(frozen=True)
class SplitJoins:
    """`lone`: joins of a value with what one branch alone makes of it (residuals): nothing runs beside that."""

    regions: tuple[Region, ...]
    lone: int


def find_split_joins(graph: OperatorGraph) -> SplitJoins:
    """All regions of a graph in which two branches or more compute, and how many others there are."""
    regions: list[Region] = []
    lone, absorbed = 0, set[int]()
    for number in reversed(range(1, len(graph.operators))):
        if number in absorbed or len(set(graph.operators[number].inputs)) < 2:
            continue
        split = graph.dominators[number]
        joins = _summed(graph, number, split)
        absorbed |= joins
        given = {read for join in joins for read in graph.operators[join].inputs} - joins
        candidates = [_region(graph, start, number, pieces) for start, pieces in _splits(graph, split, given)]
        computing = [region for region in candidates if len(region.flops) > 1]
        regions += computing
        lone += not computing and split in given
    return SplitJoins(tuple(reversed(regions)), lone)


def _summed(graph: OperatorGraph, number: int, split: int) -> set[int]:
    """The sums that only go into this one, with the same split, and this one; of another join it alone."""
    if graph.operators[number].name not in SUMS:
        return {number}
    joins, waiting = {number}, list(graph.operators[number].inputs)
    while waiting:
        read = waiting.pop()
        operator = graph.operators[read]
        is_sum = operator.name in SUMS and len(set(operator.inputs)) > 1
        if is_sum and graph.dominators[read] == split and len(graph.readers[read]) == 1:
            joins.add(read)
            waiting += operator.inputs
    return joins


def _splits(graph: OperatorGraph, split: int, given: set[int]) -> Iterator[tuple[int, list[set[int]]]]:
    """(split, pieces between it and the join) of what the join is given; then those inside of pieces, likewise."""
    pieces = _pieces(graph, split, given)
    yield split, pieces
    for piece in pieces:
        ends = given & piece
        if len(ends) > 1 and (inner := graph.dominator_of(ends)) != split:
            yield from _splits(graph, inner, ends)


def _pieces(graph: OperatorGraph, split: int, given: Iterable[int]) -> list[set[int]]:
    """The operators between the split and those given, these too, in pieces that no edge connects."""
    between: set[int] = set()
    waiting = [number for number in given if number != split]
    while waiting:
        number = waiting.pop()
        if number not in between:
            between.add(number)
            waiting += [read for read in graph.operators[number].inputs if read != split]
    piece_of: dict[int, set[int]] = {}
    for number in sorted(between):
        piece_of[number] = {number}
        for read in graph.operators[number].inputs:
            if read in between:
                _merge(piece_of, number, read)
    return sorted({id(piece): piece for piece in piece_of.values()}.values(), key=min)


def _merge(piece_of: dict[int, set[int]], a: int, b: int) -> None:
    """Make one piece of two: the smaller goes into the larger."""
    small, large = sorted((piece_of[a], piece_of[b]), key=len)
    if small is not large:
        large |= small
        piece_of.update(dict.fromkeys(small, large))


def _region(graph: OperatorGraph, split: int, join: int, pieces: list[set[int]]) -> Region:
    """The region of the pieces that compute."""
    branches = [piece for piece in pieces if graph.flops_of(piece) > 0]
    joined = graph.operators[join]
    leave = _NAMES.get(joined.name, joined.name)
    flops = tuple(map(graph.flops_of, branches))
    names = tuple(_name(graph, piece) for piece in branches)
    return Region("split/join", joined.path, _enter(graph, split, branches), leave, flops, names)


def _enter(graph: OperatorGraph, split: int, branches: list[set[int]]) -> str:
    """slice where every branch begins with a part of the split's result."""
    if split == BATCH:
        return "inputs"
    firsts = (number for piece in branches for number in piece if split in graph.operators[number].inputs)
    return "slice" if all(graph.operators[first].name in SLICES for first in firsts) else "split"


def _name(graph: OperatorGraph, piece: set[int]) -> str:
    """A branch's name: from its first module that computes to its last."""
    computing = [graph.operators[number] for number in sorted(piece) if graph.operators[number].flops]
    paths = list(dict.fromkeys(operator.path for operator in computing if operator.path))
    if len(paths) > 1:
        return f"{paths[0]} ... {paths[-1]}"
    names = dict.fromkeys(operator.name for operator in computing)
    return ": ".join([*paths, ", ".join(names)])


CORES: dict[OperatorKind, RegionForm] = {OperatorKind.HEADS: "heads", OperatorKind.GROUPS: "groups"}
ONE: dict[RegionForm, str] = {"heads": "head", "groups": "group", "columns": "column"}


@dataclass(frozen=True)
class _LinearPair:
    """The first linears, what stands between, and the second linear."""

    firsts: frozenset[int]
    between: frozenset[int]
    second: int


def find_operator_parts(graph: OperatorGraph) -> tuple[Region, ...]:
    """All regions of a graph whose branches are parts of operators, each core by itself and with its linears."""
    pairs = [pair for number in range(len(graph.operators)) for pair in _pairs(graph, number)]
    within = {number for pair in pairs for number in pair.between}
    regions = [region for pair in pairs for region in _regions_of(graph, pair)]
    for number, operator in enumerate(graph.operators):
        if operator.kind in CORES and number not in within and operator.width > 1:
            form = CORES[operator.kind]
            flops = _alike(operator.flops, operator.width)
            regions.append(Region(form, operator.path, "slice", "concat", flops, (ONE[form],)))
    return tuple(regions)


def _pairs(graph: OperatorGraph, second: int) -> Iterator[_LinearPair]:
    """The pair that ends in a linear, if there is one."""
    operator = graph.operators[second]
    if operator.kind is not OperatorKind.LINEAR:
        return
    firsts, between, waiting = set[int](), set[int](), list(operator.inputs)
    while waiting:
        number = waiting.pop()
        kind = graph.operators[number].kind
        if number == BATCH or kind is OperatorKind.OTHER:
            return
        if kind is OperatorKind.LINEAR:
            firsts.add(number)
        elif number not in between:
            between.add(number)
            waiting += graph.operators[number].inputs
    inside = between | {second}
    if all(inside.issuperset(graph.readers[number]) for number in firsts | between):
        yield _LinearPair(frozenset(firsts), frozenset(between), second)


def _regions_of(graph: OperatorGraph, pair: _LinearPair) -> Iterator[Region]:
    operators = graph.operators
    cores = {CORES[operators[number].kind] for number in pair.between if operators[number].kind in CORES}
    count = math.gcd(operators[pair.second].width, *(operators[number].width for number in pair.between))
    if count < 2:
        return
    linears = tuple(operators[number].path for number in (*sorted(pair.firsts), pair.second))
    form: RegionForm = min(cores, default="columns")
    between = graph.flops_of(pair.between)
    if cores:
        core = next(number for number in sorted(pair.between) if operators[number].kind in CORES)
        yield Region(form, operators[core].path, "slice", "concat", _alike(between, count), (ONE[form],), linears)
    whole = _alike(between + graph.flops_of({*pair.firsts, pair.second}), count)
    yield Region(form, _common_path(linears), "split", "sum", whole, (ONE[form],), linears, cuts_linears=True)


def _alike(flops: int, count: int) -> tuple[float, ...]:
    return (flops / count,) * count


def _common_path(paths: tuple[str, ...]) -> str:
    """The innermost module that holds all of them; of the model itself, from the first to the last."""
    parts = [path.split(".") for path in paths]
    common = 0
    while all(len(path) > common and path[common] == parts[0][common] for path in parts):
        common += 1
    return ".".join(parts[0][:common]) or f"{paths[0]} ... {paths[-1]}"
