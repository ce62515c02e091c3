"""A region of branches: where a model's graph splits, what runs side by side, and how it joins again.

Operators side by side: every join of values, back to the split that all of them come from.

A join's split is the nearest operator that all ways to it go through (its dominator). What lies between falls into
pieces that share nothing: the branches. Branches that come together before the join have a split of their own, and make
a region in the region. Sums of sums are one join. What no way leads through but a plain edge is no branch (residuals).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.tools.branches.graph import BATCH, Graph

Form = Literal["split/join", "heads", "groups", "columns"]
"""split/join: operators side by side. heads, groups, columns: parts of operators, of attention, of a grouped
convolution, of the width between two linears."""


@dataclass(frozen=True)
class Region:
    """`enter`: split (every branch reads all) or slice (each its part); `leave`: sum, concat, or the operator's name.

    `flops`: of each branch; `names`: what each is, in a split/join; else of one, since all are alike. `linears`: the
    paths of the pair round it, if there is one; `cuts_linears`: they belong to the branches.
    """

    form: Form
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
NAMES = dict.fromkeys(SUMS, "sum") | {"cat": "concat", "stack": "concat", "scaled_dot_product_attention": "attention"}
"""Of joins, where they have names of their own."""
SLICES = frozenset({"select", "slice", "narrow", "getitem", "chunk", "split", "split_with_sizes", "unbind"})


@dataclass(frozen=True)
class SplitJoins:
    """`lone`: joins of a value with what one branch alone makes of it (residuals): nothing runs beside that."""

    regions: tuple[Region, ...]
    lone: int


def find_split_joins(graph: Graph) -> SplitJoins:
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
        found = [_region(graph, start, number, pieces) for start, pieces in _splits(graph, split, given)]
        computing = [region for region in found if len(region.flops) > 1]
        regions += computing
        lone += not computing and split in given
    return SplitJoins(tuple(reversed(regions)), lone)


def _summed(graph: Graph, number: int, split: int) -> set[int]:
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


def _splits(graph: Graph, split: int, given: set[int]) -> Iterator[tuple[int, list[set[int]]]]:
    """(split, pieces between it and the join) of what the join is given; then those inside of pieces, likewise."""
    pieces = _pieces(graph, split, given)
    yield split, pieces
    for piece in pieces:
        ends = given & piece
        if len(ends) > 1 and (inner := graph.dominator_of(ends)) != split:
            yield from _splits(graph, inner, ends)


def _pieces(graph: Graph, split: int, given: Iterable[int]) -> list[set[int]]:
    """What lies between the split and the operators given, these too, in pieces that no edge connects."""
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


def _region(graph: Graph, split: int, join: int, pieces: list[set[int]]) -> Region:
    """Of the pieces that compute."""
    branches = [piece for piece in pieces if graph.flops_of(piece) > 0]
    joined = graph.operators[join]
    leave = NAMES.get(joined.name, joined.name)
    flops = tuple(map(graph.flops_of, branches))
    names = tuple(_name(graph, piece) for piece in branches)
    return Region("split/join", joined.path, _enter(graph, split, branches), leave, flops, names)


def _enter(graph: Graph, split: int, branches: list[set[int]]) -> str:
    """slice where every branch begins with a part of the split's result."""
    if split == BATCH:
        return "inputs"
    firsts = (number for piece in branches for number in piece if split in graph.operators[number].inputs)
    return "slice" if all(graph.operators[first].name in SLICES for first in firsts) else "split"


def _name(graph: Graph, piece: set[int]) -> str:
    """From its first module that computes to its last."""
    computing = [graph.operators[number] for number in sorted(piece) if graph.operators[number].flops]
    paths = list(dict.fromkeys(operator.path for operator in computing if operator.path))
    if len(paths) > 1:
        return f"{paths[0]} ... {paths[-1]}"
    names = dict.fromkeys(operator.name for operator in computing)
    return ": ".join([*paths, ", ".join(names)])
