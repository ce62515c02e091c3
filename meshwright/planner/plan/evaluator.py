"""Evaluation of a search's layouts: estimates of memory and seconds, and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from meshwright.compute.tensor.section import TensorSection, Whole
from meshwright.config import Config
from meshwright.config.layout import ContextParallel, Layout
from meshwright.config.section import divisors, with_field
from meshwright.planner.plan.cells import Cell, Family, Judge, strategy_of
from meshwright.planner.plan.logits import with_smaller_chunks
from meshwright.planner.plan.memory import Memory, fits, lacks_host, verdict
from meshwright.planner.plan.space import (
    Refused,
    SearchJob,
    Tail,
    ordered,
    own_tail,
    ranks_of_layer,
    savings,
)

if TYPE_CHECKING:
    from meshwright.planner.plan.estimate import Estimates
    from meshwright.planner.plan.predict import Prediction

Keep = Callable[[Layout], bool]

MAX_EXCESS_SHARE = 0.5
"""A layout that needs at most (1 + this share) of a device's memory is reported as nearly fitting."""

NEARLY = 16
"""The number of layouts without a recording that are judged at a search's end for nearly fitting."""


class Queued(NamedTuple):
    """A layout with a fitting estimate: estimated seconds and bytes, and whether the estimate is tight."""

    seconds: float
    memory: int
    tight: bool
    config: Config

    @property
    def turn(self) -> tuple[float, bool]:
        """Sort key of predictions: estimated seconds, then fixed orders of tasks, which take a third of the time to
        simulate."""
        return self.seconds, not self.config.layout.pipeline.rule.fixed


@dataclass(frozen=True)
class RunnerUp:
    """The best layout of a strategy that did not win: the fastest that fits, with a prediction; if none fits, the
    layout that lacks the least memory. `memory`: of the fullest rank, without activations if `whole` is false."""

    strategy: str
    config: Config
    memory: Memory
    whole: bool
    prediction: Prediction | None = None

    @property
    def excess(self) -> tuple[bool, int]:
        """Sort key of layouts that do not fit: whole memory first, since weights alone do not give the lack."""
        return not self.whole, self.memory.total


@dataclass
class SearchState:
    """A search's layouts before predictions.

    `legal`: the number of layouts evaluated (Counts). `kinds`: kinds of tensor sections among these. `queue`: layouts
    to predict. `slow`: strategies with layouts above the cutoff. `least`: a lower bound of the step's seconds by cut
    of a layer. `closest`: by strategy, the layout that lacks the least memory. `nearly_fits`: (estimated seconds,
    layout, memory) of the fastest that nearly fits.
    """

    legal: int = 0
    too_full: int = 0
    unfit: int = 0
    kinds: set[str] = field(default_factory=set)
    refused: Refused = field(default_factory=dict)
    queue: list[Queued] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)
    least: dict[Hashable, float] = field(default_factory=dict)
    closest: dict[str, RunnerUp] = field(default_factory=dict)
    nearly_fits: tuple[float, Config, Memory] | None = None
    unrecorded: list[tuple[float, Cell, Tail]] = field(default_factory=list)
    """Layouts that may nearly fit, each with a lower bound of seconds, without a recording of the cut layer."""

    def include(self, later: SearchState) -> None:
        """Add the state of later families, except for the queue."""
        self.legal += later.legal
        self.too_full += later.too_full
        self.unfit += later.unfit
        self.kinds |= later.kinds
        self.refused = later.refused | self.refused
        self.slow |= later.slow
        for cut, seconds in later.least.items():
            self.least[cut] = min(seconds, self.least.get(cut, seconds))
        for runner_up in later.closest.values():
            self.include_runner_up(runner_up)
        both = filter(None, (self.nearly_fits, later.nearly_fits))
        self.nearly_fits = min(both, key=lambda pair: pair[0], default=None)
        self.unrecorded += later.unrecorded

    @property
    def fastest_nearly(self) -> float:
        """Seconds of `nearly_fits`."""
        return self.nearly_fits[0] if self.nearly_fits else math.inf

    def count(self, config: Config, *, slow: bool = False, times: int = 1) -> None:
        """Count layouts of a family. `slow`: each is one layout, or a whole group, above the cutoff."""
        if not times:
            return
        self.legal += times
        self.kinds.add(config.layout.tensor.kind)
        if slow:
            self.slow.add(strategy_of(config))

    def note_least(self, family: Config, least: float) -> None:
        """Keep the lowest bound of seconds for the cut of the layer."""
        layer = family.layout.layer
        self.least[layer] = min(least, self.least.get(layer, least))

    def include_runner_up(self, runner_up: RunnerUp) -> None:
        """Keep the layout that lacks the least memory; of two equal ones, the earlier."""
        known = self.closest.get(runner_up.strategy, runner_up)
        self.closest[runner_up.strategy] = min(known, runner_up, key=lambda candidate: candidate.excess)


@dataclass
class Evaluator:
    """Evaluator of the layouts of a job for which `keep` is true."""

    job: SearchJob
    models: Estimates
    keep: Keep

    def __post_init__(self) -> None:
        self.judge = Judge(self.job, self.models)

    def evaluate_family(self, family: Config, found: SearchState, cutoff: float = math.inf) -> None:
        """Estimate a family's layouts into `found`. A layout is dropped at the first bound that does not fit or is
        `cutoff` seconds or more."""
        if not self.keep(family.layout):
            return
        has_room: bool | None = None
        whole, memory_bytes = Family(self.judge, family), self.job.cluster.device.memory_bytes
        every, problems = self.judge.sizes(family)
        found.refused = problems | found.refused
        for bounds in every:
            cell = Cell(whole, bounds)
            if not bounds.is_recorded and self._needs_no_recording(cell, found, cutoff):
                continue
            least = bounds.least_of_own(cutoff)
            found.note_least(family, least)
            if least >= cutoff:
                found.count(family, slow=True)
                continue
            tails, problems = bounds.tails
            found.refused = problems | found.refused
            left, least = bounds.fast(cutoff)
            found.note_least(family, least)
            found.count(family, slow=True, times=len(tails) - len(left))
            for tail in left:
                if cell.waits(tail):
                    continue
                # Computed once, and only if a layout may be fast. Weights do not depend on the microbatch's size, so
                # the largest microbatch, with the narrowest gradients, is checked for all sizes.
                if has_room is None:
                    largest = with_field(family, "batch.micro", family.replica_batch)
                    widest = Cell(whole, self.judge.bounds(largest)), own_tail(largest)
                    has_room = widest[0].alone_bytes(widest[1]) <= memory_bytes or self._has_room(*widest, found)
                if not has_room:
                    return
                # Memory does not depend on the order of axes: one estimate serves all orders that follow.
                memory = self._room(cell, tail, found, cutoff)
                if memory is not None:
                    for config in ordered(tail.of(cell.config), self.job, found.refused):
                        self._estimate(config, memory, found, cutoff)

    def _estimate(self, config: Config, memory: Memory, found: SearchState, cutoff: float) -> None:
        """Queue a layout whose memory fits, if its estimated seconds are below `cutoff`."""
        seconds = self.models.estimated_seconds(config, cutoff)
        if seconds < cutoff:
            found.count(config)
            # Estimates are below predictions: the prediction of a tight estimate is tight or does not fit.
            tight = verdict(memory, self.job.cluster) == "tight"
            found.queue.append(Queued(seconds, memory.total, tight, config))
        else:
            found.count(config, slow=True)

    def evaluate_savings(self, config: Config, full: Collection[Config], found: SearchState, cutoff: float) -> None:
        """Estimate into `found` the layouts that save more memory than `config`. If such a layout does not fit, also
        estimate layouts with further savings. Layouts that wait (Cell.waits) for a layout outside of `full` are left
        out."""
        waiting, seen = [config], {config}
        while waiting:
            for saving in savings(waiting.pop(), self.job):
                whole = Family(self.judge, saving)
                cell, tail = Cell(whole, self.judge.bounds(saving)), own_tail(saving)
                if saving in seen or cell.waits(tail, full):
                    continue
                seen.add(saving)
                if not cell.fits(tail):
                    waiting.append(saving)
                if not self._may_be_fast(cell, tail.keeping(), found, cutoff):
                    continue
                memory = self._room(cell, tail, found, cutoff)
                if memory is not None:
                    self._estimate(saving, memory, found, cutoff)

    def least_full(self, config: Config) -> Config:
        """Return the layout of least estimated memory, among `config` and all layouts that save more memory."""
        every = [config]
        for candidate in every:  # the list grows during the loop
            every += [saving for saving in savings(candidate, self.job) if saving not in every]
        return min(every, key=lambda candidate: self.models.estimated_memory(candidate).total)

    def predict_or_memory(self, config: Config, cutoff: float = math.inf) -> Prediction | Memory | None:
        """Return the prediction if the layout fits, else the memory that exceeds the device's; None if the step takes
        `cutoff` seconds or more. A layout that does not fit or is tight gets smaller chunks of logits (logits.py)."""
        # Cheapest check first: the clock, then the memory of the first microbatches, then the replay of allocations.
        if cutoff < math.inf and self.models.planner.seconds(config, cutoff) >= cutoff:
            return None
        found, cluster = self.prediction_or_memory(config), self.job.cluster
        memory = found if isinstance(found, Memory) else found.fullest
        fullness = verdict(memory, cluster)
        for smaller in () if fullness == "fits" else with_smaller_chunks(config, memory, self.job):
            shrunk = self.prediction_or_memory(smaller)
            if not isinstance(shrunk, Memory) and verdict(shrunk.fullest, cluster) != fullness:
                return shrunk
        return found

    def prediction_or_memory(self, config: Config) -> Prediction | Memory:
        """Return the prediction if the layout fits, else the memory that exceeds the device's."""
        memory = self.models.planner.least_memory(config)
        if not fits(memory, self.job.cluster):
            return memory
        prediction = self.models.planner.predict(config)
        return next((memory for memory in prediction.memory if not fits(memory, self.job.cluster)), prediction)

    def _may_be_fast(self, cell: Cell, tail: Tail, found: SearchState, cutoff: float) -> bool:
        """Return True if the lower bounds of a layout's seconds, over all orders of its axes, are below `cutoff`."""
        least = cell.bounds.least(tail, cutoff)
        found.note_least(cell.family.config, least)
        fast = least < cutoff and cell.bounds.is_fast_phase(tail, cutoff)
        if not fast:
            found.count(cell.family.config, slow=True)
        return fast

    def _room(self, cell: Cell, tail: Tail, found: SearchState, cutoff: float) -> Memory | None:
        """Return the estimated memory of a layout that may be fast without recomputation. Return None if the memory
        does not fit or no order of axes can be below `cutoff`."""
        if tail.keeper is not None and (
            cell.recomputes_for_nothing(tail) or not self._may_be_fast(cell, tail, found, cutoff)
        ):
            return None
        if self._lacks_room(cell, tail, found):
            found.unfit += 1
            found.count(cell.family.config)
            return None
        # Weights are checked first: cheaper to count than activations, and often enough to rule out a family.
        if not self._has_room(cell, tail, found) or cell.gathers_for_nothing(tail):
            return None
        memory = cell.memory(tail)
        if fits(memory, self.job.cluster):
            return memory
        found.unfit += 1
        self._does_not_fit(cell, tail, memory, found, whole=True)
        self._note_nearly(cell, tail, found)
        return None

    def _note_nearly(self, cell: Cell, tail: Tail, found: SearchState) -> None:
        """Keep a layout that does not fit if the layout nearly fits and is the fastest such layout."""
        most, limit = (1 + MAX_EXCESS_SHARE) * self.job.cluster.device.memory_bytes, found.fastest_nearly
        # Bounds of seconds are compared first, since these need neither a config nor buckets.
        if cell.bounds.least(tail, limit) >= limit or cell.bounds.phase(tail) >= limit:
            return
        memory = cell.memory(tail)
        if memory.total <= most and not lacks_host(memory, self.job.cluster):
            config = tail.of(cell.config)
            seconds = self.models.estimated_seconds(config, limit)
            if seconds < limit:
                found.nearly_fits = seconds, config, memory

    def find_nearly(self, found: SearchState, cutoff: float) -> None:
        """Find the fastest layout that nearly fits among the NEARLY layouts of the lowest bounds without a recording of
        the cut layer. Layouts of `cutoff` seconds or more are left out."""
        for bound, cell, tail in sorted(found.unrecorded, key=lambda each: each[0])[:NEARLY]:
            if bound >= min(cutoff, found.fastest_nearly):
                break
            self._note_nearly(cell, tail, found)

    def _needs_no_recording(self, cell: Cell, found: SearchState, cutoff: float) -> bool:
        """Return True, and count the cell, if bounds without a recording of the cut layer rule all layouts out: without
        recomputation by memory, with recomputation by seconds."""
        promising = cell.bounds.promising(cutoff)
        sizes = [(tail, cell.least_bytes(tail, recorded=False)) for tail in promising]
        left = [tail for tail, size in sizes if not self._is_too_full(cell, size, found)]
        if not all(cell.is_slow_with_sums(tail, cutoff) for tail in left):
            return False
        most = (1 + MAX_EXCESS_SHARE) * self.job.cluster.device.memory_bytes
        found.unrecorded += [
            (cell.bounds.seconds(tail, "cuts"), cell, tail) for tail, size in sizes if size <= most and tail not in left
        ]
        slow = len(left) > 0 or len(promising) < len(cell.bounds.tails[0])
        found.unfit += not slow
        found.count(cell.family.config, slow=slow)
        return True

    def _is_too_full(self, cell: Cell, size: float, found: SearchState) -> bool:
        """Return True if a lower bound of the bytes does not fit, and another layout of the strategy lacks less."""
        if size <= self.job.cluster.device.memory_bytes:
            return False
        known = found.closest.get(cell.family.strategy)
        return known is not None and known.whole and size >= known.memory.total

    def _lacks_room(self, cell: Cell, tail: Tail, found: SearchState) -> bool:
        """Return True if a lower bound of the memory does not fit, and this memory cannot change the answer: another
        layout of the strategy lacks less, and this layout does not nearly fit or a faster one does."""
        size = cell.least_bytes(tail)
        if not self._is_too_full(cell, size, found):
            return False
        nearly = size <= (1 + MAX_EXCESS_SHARE) * self.job.cluster.device.memory_bytes
        return not (nearly and cell.bounds.seconds(tail) < found.fastest_nearly)

    def _has_room(self, cell: Cell, tail: Tail, found: SearchState) -> bool:
        """Return True if weights, gradients and states alone fit; count the layout if not."""
        least, known = cell.alone_bytes(tail), found.closest.get(cell.family.strategy)
        # Without room by the bound, buckets are planned only if the layout may be the one that lacks the least memory.
        if least > self.job.cluster.device.memory_bytes and known is not None and known.excess <= (True, least):
            found.too_full += 1
            found.count(cell.family.config)
            return False
        weights, _ = cell.without_activations(tail)
        if fits(weights, self.job.cluster):
            return True
        found.too_full += 1
        self._does_not_fit(cell, tail, weights, found, whole=False)
        return False

    def _does_not_fit(self, cell: Cell, tail: Tail, memory: Memory, found: SearchState, *, whole: bool) -> None:
        """Count a layout that does not fit, and keep the layout of each strategy that lacks the least memory."""
        found.count(cell.family.config)
        strategy = cell.family.strategy
        known = found.closest.get(strategy)
        if known is None or (not whole, memory.total) < known.excess:
            found.closest[strategy] = RunnerUp(strategy, tail.of(cell.config), memory, whole)


WHOLE = (False, False, 0, 1)
"""The round (round_of) of whole layers on one stage."""


def round_of(layout: Layout) -> tuple[bool, bool, int, int]:
    """Return the sort key of a search's rounds: layers on a node's ranks before layers on more, one stage before
    several, then the number of cuts (tensor, context), then the ranks that share a layer. The cuts of `cuts_within`
    belong to earlier rounds."""
    # Layers on few ranks give the fastest layouts, so that later rounds begin with a low cutoff.
    cuts, ranks = bool(layout.tensor.axes) + bool(layout.context.axes), ranks_of_layer(layout)
    across = layout.ranks_per_node != "auto" and ranks > layout.ranks_per_node
    return across, layout.pipeline.size > 1, cuts, ranks


def cuts_within(layout: Layout) -> tuple[Hashable, ...]:
    """Return keys (expert, context, tensor) of the cuts that a layer's cut contains: tensor alone, context alone, both
    over fewer ranks. The search assumes that a cut is no faster together with others than alone."""
    return cuts_of(*layout.layer)


@cache
def cuts_of(expert: int, context: ContextParallel, tensor: TensorSection) -> tuple[Hashable, ...]:
    """Return `cuts_within` of a layer; thousands of layouts have the same layer."""
    uncut, whole = ContextParallel(), Whole()
    contexts = [context.model_copy(update={"size": size}) if size > 1 else uncut for size in divisors(context.size)]
    sizes = {name: size for name, size in tensor if isinstance(size, int) and not isinstance(size, bool)}
    tensors = [
        tensor.model_copy(update=dict(zip(sizes, smaller, strict=True)))
        for smaller in product(*map(divisors, sizes.values()))
    ]
    every = product(contexts, (whole, *tensors))
    return tuple((expert, *inside) for inside in every if inside not in ((context, tensor), (uncut, whole)))
