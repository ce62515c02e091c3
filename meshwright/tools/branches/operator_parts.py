"""Branches inside of operators: heads of attention, groups of a convolution, columns between two linears.

Found from the second linear back: what it reads must come, through operators that branches pass by themselves, from
linears that are read nowhere else. Attention or a grouped convolution on the way makes branches of its heads or groups;
without, each column of the width between is one (a feed-forward's hidden layer).

| region                | enter | leave  | a branch                                                       |
|-----------------------|-------|--------|----------------------------------------------------------------|
| between linears       | slice | concat | 1/A of all that stands between them                            |
| with its linears      | split | sum    | and its columns of the first linears, its rows of the second   |
| columns               | split | sum    | a column of the first linears, a row of the second             |

(SUPER, IPDPS 2021, section IV: two ways to cut multi-head attention; slices of the hidden layer.)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.tools.branches.graph import BATCH, Graph, Kind
from meshwright.tools.branches.region import Form, Region

CORES: dict[Kind, Form] = {Kind.HEADS: "heads", Kind.GROUPS: "groups"}
ONE: dict[Form, str] = {"heads": "head", "groups": "group", "columns": "column"}


@dataclass(frozen=True)
class _Pair:
    """The first linears, what stands between, and the second linear."""

    firsts: frozenset[int]
    between: frozenset[int]
    second: int


def find_operator_parts(graph: Graph) -> tuple[Region, ...]:
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


def _pairs(graph: Graph, second: int) -> Iterator[_Pair]:
    """The pair that ends in a linear, if there is one."""
    operator = graph.operators[second]
    if operator.kind is not Kind.LINEAR:
        return
    firsts, between, waiting = set[int](), set[int](), list(operator.inputs)
    while waiting:
        number = waiting.pop()
        kind = graph.operators[number].kind
        if number == BATCH or kind is Kind.OTHER:
            return
        if kind is Kind.LINEAR:
            firsts.add(number)
        elif number not in between:
            between.add(number)
            waiting += graph.operators[number].inputs
    inside = between | {second}
    if all(inside.issuperset(graph.readers[number]) for number in firsts | between):
        yield _Pair(frozenset(firsts), frozenset(between), second)


def _regions_of(graph: Graph, pair: _Pair) -> Iterator[Region]:
    operators = graph.operators
    cores = {CORES[operators[number].kind] for number in pair.between if operators[number].kind in CORES}
    count = math.gcd(operators[pair.second].width, *(operators[number].width for number in pair.between))
    if count < 2:
        return
    linears = tuple(operators[number].path for number in (*sorted(pair.firsts), pair.second))
    form: Form = min(cores, default="columns")
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
