"""Regions of branches: the split in a model's graph, the operators that can run in parallel, and the join.

Parallel operators: the search goes from each join back to the split, the nearest operator on all paths to the join
(the join's dominator). The operators between split and join are divided into connected pieces: the branches. Branches
that join before the region's join have a split of their own: a region within the region. A sum of sums is one join. A
residual edge has no operator and is no branch.

Branches inside of operators: heads of attention, groups of a convolution, columns between two linears. The search goes
back from the second linear. Between the two only operators are allowed that keep branches separate, and no other
operator may read a result of the first linears. If attention or a grouped convolution is in between, heads or groups
are the branches; else each column of the width in between is a branch (a feed-forward's hidden layer).

| region inside of operators | enter | leave  | a branch                                                     |
|----------------------------|-------|--------|--------------------------------------------------------------|
| between linears            | slice | concat | 1/A of all operators between the linears                     |
| with the linears           | split | sum    | and its columns of the first linears, its rows of the second |
| columns                    | split | sum    | a column of the first linears, a row of the second           |

(SUPER, IPDPS 2021, section IV: two ways to cut multi-head attention; slices of the hidden layer.)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from meshwright.tools.branches.graph import BATCH, OperatorGraph, OperatorKind, meeting

RegionForm = Literal["split/join", "heads", "groups", "columns"]
"""split/join: parallel operators. Parts of operators: heads of attention, groups of a grouped convolution, columns of
the width between two linears."""


@dataclass(frozen=True)
class Region:
    """A set of branches between a split and a join."""

    form: RegionForm
    where: str
    """The path of the region's module."""
    enter: str
    """split: every branch reads the whole value. slice: each branch reads a part. inputs: the split is the batch."""
    leave: str
    """sum, concat, or the name of the joining operator."""
    flops: tuple[float, ...]
    """Flops of each branch."""
    names: tuple[str, ...]
    """split/join: a name for each branch. Other forms have equal branches and one name."""
    linears: tuple[str, ...] = ()
    """The paths of the pair of linears around the region, if there is a pair."""
    cuts_linears: bool = False
    """Whether the pair's linears belong to the branches."""

    @property
    def total_flops(self) -> float:
        return sum(self.flops)


SUMS = frozenset({"add", "add_"})
_NAMES = dict.fromkeys(SUMS, "sum") | {"cat": "concat", "stack": "concat", "scaled_dot_product_attention": "attention"}
"""The shown names of joining operators; other operators are shown under torch's name."""
SLICES = frozenset({"select", "slice", "narrow", "getitem", "chunk", "split", "split_with_sizes", "unbind"})


@dataclass(frozen=True)
class SplitJoins:
    """Regions with at least two branches. `lone`: the number of residual joins, of a value with the output of a single
    branch; nothing can run in parallel to that branch."""

    regions: tuple[Region, ...]
    lone: int


def find_split_joins(graph: OperatorGraph) -> SplitJoins:
    """Find all regions of a graph with at least two computing branches, and count the lone joins."""
    regions: list[Region] = []
    lone, absorbed = 0, set[int]()
    # From the end: the last sum of a chain is visited first and absorbs the others.
    for index in reversed(range(1, len(graph.operators))):
        if index in absorbed or len(set(graph.operators[index].inputs)) < 2:
            continue
        split = graph.dominators[index]
        joins = _summed(graph, index, split)
        absorbed |= joins
        given = {read for join in joins for read in graph.operators[join].inputs} - joins
        computing = 0
        for start, pieces in _splits(graph, split, given):
            branches = [piece for piece in pieces if graph.flops_of(piece) > 0]  # mere views and masks are no branch
            if len(branches) > 1:
                regions.append(_split_join(graph, start, index, branches))
                computing += 1
        lone += not computing and split in given
    return SplitJoins(tuple(reversed(regions)), lone)


def _summed(graph: OperatorGraph, index: int, split: int) -> set[int]:
    """Return this sum with all sums of the same split that no operator outside of the chain reads. Another join is
    returned as it is."""
    if graph.operators[index].name not in SUMS:
        return {index}
    joins, waiting = {index}, list(graph.operators[index].inputs)
    while waiting:
        read = waiting.pop()
        operator = graph.operators[read]
        is_sum = operator.name in SUMS and len(set(operator.inputs)) > 1
        if is_sum and graph.dominators[read] == split and len(graph.readers[read]) == 1:
            joins.add(read)
            waiting += operator.inputs
    return joins


def _splits(graph: OperatorGraph, split: int, given: set[int]) -> Iterator[tuple[int, list[set[int]]]]:
    """Yield (split, pieces between split and join) for the join's inputs; then the same inside the pieces."""
    pieces = _pieces(graph, split, given)
    yield split, pieces
    for piece in pieces:
        ends = given & piece
        # Branches that join only in the region's join have no split of their own.
        if len(ends) > 1 and (inner := meeting(ends, graph.dominators)) != split:
            yield from _splits(graph, inner, ends)


def _pieces(graph: OperatorGraph, split: int, given: Iterable[int]) -> list[set[int]]:
    """Return the operators after the split, up to and including the given ones, as connected pieces."""
    between: set[int] = set()
    waiting = [index for index in given if index != split]
    while waiting:
        index = waiting.pop()
        if index not in between:
            between.add(index)
            waiting += [read for read in graph.operators[index].inputs if read != split]
    piece_of: dict[int, set[int]] = {}
    for index in sorted(between):
        piece_of[index] = {index}
        for read in graph.operators[index].inputs:
            if read not in between:
                continue
            small, large = sorted((piece_of[index], piece_of[read]), key=len)
            if small is not large:  # the smaller is merged into the larger: an operator moves at most log2(n) times
                large |= small
                piece_of.update(dict.fromkeys(small, large))
    return sorted({id(piece): piece for piece in piece_of.values()}.values(), key=min)


def _split_join(graph: OperatorGraph, split: int, join: int, branches: list[set[int]]) -> Region:
    """Build the region of these branches. A branch is named by the first and the last module that computes."""
    joined = graph.operators[join]
    leave = _NAMES.get(joined.name, joined.name)
    enter = "inputs"
    if split != BATCH:
        # If every branch begins with a slice of the split's result, a rank needs only the slices of its branches.
        firsts = (index for piece in branches for index in piece if split in graph.operators[index].inputs)
        enter = "slice" if all(graph.operators[first].name in SLICES for first in firsts) else "split"
    names = []
    for piece in branches:
        computing = [graph.operators[index] for index in sorted(piece) if graph.operators[index].flops]
        paths = list(dict.fromkeys(operator.path for operator in computing if operator.path))
        if len(paths) > 1:
            names.append(f"{paths[0]} ... {paths[-1]}")
        else:  # one module, or the model's own code: operators' names say more
            operators = dict.fromkeys(operator.name for operator in computing)
            names.append(": ".join([*paths, ", ".join(operators)]))
    return Region("split/join", joined.path, enter, leave, tuple(map(graph.flops_of, branches)), tuple(names))


CORES: dict[OperatorKind, RegionForm] = {OperatorKind.HEADS: "heads", OperatorKind.GROUPS: "groups"}
ONE: dict[RegionForm, str] = {"heads": "head", "groups": "group", "columns": "column"}


@dataclass(frozen=True)
class _LinearPair:
    """Numbers of the first linears, of the operators in between, and of the second linear."""

    firsts: frozenset[int]
    between: frozenset[int]
    second: int


def find_operator_parts(graph: OperatorGraph) -> tuple[Region, ...]:
    """Find all regions with parts of operators as branches: each core by itself, and with the linears around."""
    pairs = [pair for index in range(len(graph.operators)) for pair in _pairs(graph, index)]
    within = {index for pair in pairs for index in pair.between}
    regions = [region for pair in pairs for region in _regions_of(graph, pair)]
    for index, operator in enumerate(graph.operators):
        if operator.kind in CORES and index not in within and operator.width > 1:
            form = CORES[operator.kind]
            flops = (operator.flops / operator.width,) * operator.width
            regions.append(Region(form, operator.path, "slice", "concat", flops, (ONE[form],)))
    return tuple(regions)


def _pairs(graph: OperatorGraph, second: int) -> Iterator[_LinearPair]:
    """Yield the pair with this operator as second linear, if there is one."""
    operator = graph.operators[second]
    if operator.kind is not OperatorKind.LINEAR:
        return
    firsts, between, waiting = set[int](), set[int](), list(operator.inputs)
    while waiting:
        index = waiting.pop()
        operator_kind = graph.operators[index].kind
        # An operator that mixes channels belongs to no single branch, nor does the batch: there is no pair.
        if index == BATCH or operator_kind is OperatorKind.OTHER:
            return
        if operator_kind is OperatorKind.LINEAR:
            firsts.add(index)
        elif index not in between:
            between.add(index)
            waiting += graph.operators[index].inputs
    inside = between | {second}
    # A value with a reader outside must be whole: the operators cannot be cut into branches.
    if all(inside.issuperset(graph.readers[index]) for index in firsts | between):
        yield _LinearPair(frozenset(firsts), frozenset(between), second)


def _regions_of(graph: OperatorGraph, pair: _LinearPair) -> Iterator[Region]:
    operators = graph.operators
    cores = {CORES[operators[index].kind] for index in pair.between if operators[index].kind in CORES}
    # Groups of a norm and attention's heads stay whole: the number of branches divides all of these numbers.
    count = math.gcd(operators[pair.second].width, *(operators[index].width for index in pair.between))
    if count < 2:
        return
    linears = tuple(operators[index].path for index in (*sorted(pair.firsts), pair.second))
    form: RegionForm = min(cores, default="columns")
    between = graph.flops_of(pair.between)
    if cores:
        core = next(index for index in sorted(pair.between) if operators[index].kind in CORES)
        yield Region(form, operators[core].path, "slice", "concat", (between / count,) * count, (ONE[form],), linears)
    whole = ((between + graph.flops_of({*pair.firsts, pair.second})) / count,) * count
    # The innermost module that contains all linears; if that is the model, the first and the last linear.
    paths = [path.split(".") for path in linears]
    common = 0
    while all(len(path) > common and path[common] == paths[0][common] for path in paths):
        common += 1
    where = ".".join(paths[0][:common]) or f"{linears[0]} ... {linears[-1]}"
    yield Region(form, where, "split", "sum", whole, (ONE[form],), linears, cuts_linears=True)
