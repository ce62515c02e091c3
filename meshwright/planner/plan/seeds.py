"""Seeds of a search: a few pipelines that are predicted early, so that later layouts meet a low cutoff.

A layout's score is a lower bound of seconds, times 1 + (p - 1) / (n c): the idle share of p stages with c chunks and n
microbatches (Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

A score is first computed from whole layers, in equal shares of a layer's ranks, and again from recordings of the
layer's cuts once no other score is lower.

Before all other layouts of a large model a search tries `first_guesses`, so that a user soon has a layout that fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush
from itertools import chain, count, islice

from meshwright.compute.tensor.section import Megatron, Whole
from meshwright.config import Config
from meshwright.config.layout import ContextParallel
from meshwright.config.section import with_field
from meshwright.planner.plan.cells import Cell, Family, Judge
from meshwright.planner.plan.memory import verdict
from meshwright.planner.plan.space import (
    OFFLOAD,
    SAVINGS,
    Tail,
    families,
    is_fixed,
    ordered,
    ranks_of_layer,
    ranks_per_node,
)

SEEDS = 2
"""The most seeds with equal numbers of stages and of ranks that share a layer."""

MOST_SEEDS = 12
"""The most seeds."""

SEED_SHARE = 0.9
"""The most of a device's memory that a seed takes by the lower bound."""

SMALLEST = 2
"""The number of sizes of microbatch that are scored, from the smallest: larger ones have fewer microbatches."""

GUESS_SHARE = 0.7
"""The most of a device's memory that a guess takes by the lower bound: most guesses then fit."""

GUESSES = 3
"""The most layouts that are predicted by rule of thumb, until one fits."""

NODES = 2
"""The most nodes whose ranks share a seed's layer."""


@dataclass(frozen=True)
class _Scored:
    """A layout of a pipeline."""

    cell: Cell
    tail: Tail

    def seconds(self, *, recorded: bool) -> float:
        """Return the layout's score, from recordings of the layer's cuts if `recorded`."""
        config, pipeline = self.cell.bounds.config, self.tail.pipeline
        has_two_cuts = bool(config.layout.context.axes and config.layout.tensor.axes)
        least = self.cell.bounds.seconds(self.tail, ("cuts" if has_two_cuts else "layers") if recorded else "whole")
        return least * (1 + (pipeline.size - 1) / (config.num_microbatches * pipeline.chunks))


def first_guesses(judge: Judge) -> Iterator[Config]:
    """Yield layouts by Megatron's rule of thumb: each layer cut over a node's ranks, as few stages as the lower bounds
    of memory allow, replicas on the rest (Narayanan et al. 2021, arXiv 2104.04473, section 3). Layouts without
    recomputation are first. Fields that the user has fixed keep their values."""
    job, room = judge.job, GUESS_SHARE * judge.job.cluster.device.memory_bytes
    reach = ranks_per_node(job.cluster, job.devices)
    run, fixed = job.run, {*job.fixed}
    for field, value in {
        "layout.context": ContextParallel(),
        "layout.tensor": Megatron(kind="megatron", size=reach, sequence_parallel=True) if reach > 1 else Whole(),
        OFFLOAD: SAVINGS[OFFLOAD],
        "layout.data.sync": "zero1",
        "layout.data.shard": None,
        "layout.data.expert": 1,
    }.items():
        if not any(f"{name}.".startswith(f"{field}.") for name in fixed) and not is_fixed(field, fixed):
            run, fixed = with_field(run, field, value), {*fixed, field}
    cells = [
        Cell(Family(judge, family), bounds)
        for family in families(replace(job, run=run, fixed=frozenset(fixed)), {})
        for bounds in judge.sizes(family)[0][:1]
    ]
    cells.sort(key=lambda cell: cell.config.layout.pipeline.size)
    tails = [(cell, tail) for cell in cells for tail in cell.bounds.tails[0] if tail.pipeline.rule.fixed]
    for cell, tail in sorted(tails, key=lambda each: each[1].keeper is not None):
        if (
            tail.pipeline.chunks == 1
            and cell.least_bytes(tail, recorded=False) <= room
            and verdict(cell.memory(tail), job.cluster) == "fits"
        ):
            yield from islice(ordered(tail.of(cell.config), job, {}), 1)


def seeds_of(judge: Judge, every: Iterable[Config], cutoff: float) -> list[Config]:
    """Return families with a layout of a low score: pipelines without slices and offload, under a fixed order of tasks,
    whose memory may fit. Layouts with a score of `cutoff` seconds or more are left out."""
    turns, room = count(), SEED_SHARE * judge.job.cluster.device.memory_bytes
    waiting = [
        (scored.seconds(recorded=False), next(turns), False, scored)
        for scored in chain.from_iterable(_scored(judge, family) for family in every)
    ]
    heapify(waiting)
    found: dict[tuple[int, int], list[Config]] = {}
    while waiting and waiting[0][0] < cutoff and sum(map(len, found.values())) < MOST_SEEDS:
        _, turn, recorded, scored = heappop(waiting)
        family = scored.cell.family.config
        known = found.setdefault((family.layout.pipeline.size, ranks_of_layer(family.layout)), [])
        if len(known) == SEEDS or family in known:
            continue
        if recorded:
            known.append(family)
        elif scored.cell.least_bytes(scored.tail, recorded=False) <= room:
            heappush(waiting, (scored.seconds(recorded=True), turn, True, scored))
    return [*chain.from_iterable(found.values())]


def _scored(judge: Judge, family: Config) -> Iterator[_Scored]:
    """Yield the layouts of a family that may be seeds."""
    layout = family.layout
    is_plain = not layout.data.strategy.slices and family.memory.offload.to == SAVINGS[OFFLOAD]
    most = NODES * ranks_per_node(judge.job.cluster, judge.job.devices)
    if layout.pipeline.size == 1 or not is_plain or ranks_of_layer(layout) > most:
        return
    for bounds in judge.sizes(family)[0][:SMALLEST]:
        cell = Cell(Family(judge, family), bounds)
        yield from (_Scored(cell, tail) for tail in bounds.tails[0] if tail.pipeline.rule.fixed)
