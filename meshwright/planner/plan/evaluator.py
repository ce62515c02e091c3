"""Evaluates a search's layouts: estimates of memory and seconds, and predictions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

from meshwright.compute.tensor.section import Whole
from meshwright.config import Config
from meshwright.config.layout import ContextParallel, Layout
from meshwright.config.registry import entries
from meshwright.config.section import divisors, field_of, with_field
from meshwright.planner.plan.buckets import streams
from meshwright.planner.plan.memory import Memory, fits, lacks_host, verdict
from meshwright.planner.plan.remembered import PARTS, remembered
from meshwright.planner.plan.site import transport_on
from meshwright.planner.plan.space import (
    CHUNKS,
    OFFLOAD,
    SAVINGS,
    Refused,
    SearchJob,
    is_fixed,
    layouts_of,
    orders_of,
    ranks_of_layer,
    savings,
)
from meshwright.ranks.transports import TransportName
from meshwright.strategies.memory.section import keeping_all

if TYPE_CHECKING:
    from meshwright.planner.plan.estimate import Estimates
    from meshwright.planner.plan.predict import Prediction

Keep = Callable[[Layout], bool]

MAX_EXCESS_SHARE = 0.5
"""A layout that needs at most (1 + this share) of a device's memory is reported as one that nearly fits."""


class Queued(NamedTuple):
    """A layout whose estimate fits: estimated seconds and bytes, and whether the estimate is tight."""

    seconds: float
    memory: int
    tight: bool
    config: Config


@dataclass(frozen=True)
class RunnerUp:
    """The best layout of a strategy that did not win: its fastest that fits, with a prediction; where none fits, the
    layout that lacks the least memory. `memory`: of its fullest rank, without activations where `whole` is false."""

    strategy: str
    config: Config
    memory: Memory
    whole: bool
    prediction: Prediction | None = None

    @property
    def excess(self) -> tuple[bool, int]:
        """Sort key of layouts that do not fit: whole memory first, since weights alone do not say what is missing."""
        return not self.whole, self.memory.total


@dataclass
class SearchState:
    """A search's layouts before predictions. `legal`: the number looked at (Counts); `kinds`: of their tensor
    sections; `queue`: layouts to predict; `slow`: strategies with layouts above the cutoff; `least`: a lower bound of
    the step's seconds by cut of a layer; `closest`: by strategy, the layout that lacks the least memory; `nearly_fits`:
    (estimated seconds, layout, memory) of the fastest that nearly fits."""

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

    def include(self, later: SearchState) -> None:
        """Add the state of later families, without their queue."""
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
        self.nearly_fits = min(both, key=lambda one: one[0], default=None)

    def count(self, config: Config, *, slow: bool = False) -> None:
        """Count one layout; `slow`: one, or a whole group of layouts, that is above the cutoff."""
        self.legal += 1
        self.kinds.add(config.layout.tensor.kind)
        if slow:
            self.slow.add(strategy_of(config))

    def include_runner_up(self, runner_up: RunnerUp) -> None:
        """Keep the layout that lacks least; the earlier one of two that lack as much."""
        known = self.closest.get(runner_up.strategy, runner_up)
        self.closest[runner_up.strategy] = min(known, runner_up, key=lambda one: one.excess)


@dataclass
class Evaluator:
    """Evaluates layouts of a job for which `keep` is true."""

    job: SearchJob
    models: Estimates
    keep: Keep

    def evaluate_family(self, family: Config, found: SearchState, cutoff: float = math.inf) -> None:
        """Estimate into `found` a family's layouts whose bounds fit; a bound of `cutoff` seconds or more ends a
        layout's estimate early."""
        if not self.keep(family.layout):
            return
        room: list[bool] = []
        memory: list[Memory] = []

        def enters(sized: Config) -> bool:
            if not self._may_be_fast(sized, found, cutoff):
                return False
            # Asked once, and only where a microbatch may be fast. Weights do not depend on the microbatch's size: the
            # largest, with the narrowest gradients, stands for all.
            if not room:
                room.append(self._has_room(with_field(family, "batch.micro", family.replica_batch), found))
            return room[0]

        def holds(config: Config) -> bool:
            # Memory does not depend on the order of axes: one estimate serves all orders that follow.
            memory[:] = self._room(config, found, cutoff)
            return bool(memory)

        for config in layouts_of(family, self.job, found.refused, enters, holds):
            self._estimate(config, memory[0], found, cutoff)

    def _estimate(self, config: Config, memory: Memory, found: SearchState, cutoff: float) -> None:
        """Queue a layout whose memory fits, if its estimated seconds are below `cutoff`."""
        seconds = self.models.estimated_seconds(config)
        if seconds < cutoff:
            found.count(config)
            # Estimates are below predictions: what is tight here is tight there, or does not fit.
            tight = verdict(memory, self.job.cluster) == "tight"
            found.queue.append(Queued(seconds, memory.total, tight, config))
        else:
            found.count(config, slow=True)

    def evaluate_savings(self, config: Config, full: Collection[Config], found: SearchState, cutoff: float) -> None:
        """Estimate into `found` the layouts that save more memory than `config`; where one of them does not fit, those
        that save even more. Layouts that wait (`_waits`) for a layout outside of `full` are left out."""
        waiting, seen = [config], {config}
        while waiting:
            for saving in savings(waiting.pop(), self.job):
                if saving in seen or self._waits(saving, full):
                    continue
                seen.add(saving)
                if not self.may_fit(saving):
                    waiting.append(saving)
                for memory in self._room(saving, found, cutoff, full):
                    self._estimate(saving, memory, found, cutoff)

    def least_full(self, config: Config) -> Config:
        """The layout of least estimated memory, among `config` and all layouts that save more memory."""
        every = [config]
        for one in every:  # grows under way
            every += [saving for saving in savings(one, self.job) if saving not in every]
        return min(every, key=lambda one: self.models.estimated_memory(one).total)

    def _waits(self, config: Config, full: Collection[Config] = ()) -> bool:
        """Whether the layout saves memory that the same layout without the saving may not need: it is at least as fast,
        and its estimate fits. `full`: layouts whose prediction does not fit or is tight."""
        # Under a limit by memory a layout that saves admits more microbatches, and may be faster.
        if config.layout.pipeline.limit_by_memory:
            return False
        for name in SAVINGS:
            if field_of(config, name) == SAVINGS[name] or is_fixed(name, self.job.fixed):
                continue
            # An offloaded optimizer that steps each bucket as it arrives may be faster than one on the device.
            if self.job.is_known(name, SAVINGS[name]) and not (name == OFFLOAD and streams(config)):
                keeper = with_field(config, name, SAVINGS[name])
                if keeper not in full and self.may_fit(keeper):
                    return True
        return False

    def may_fit(self, config: Config) -> bool:
        """Whether a layout's estimated memory fits."""
        some = fits(self.models.weights_memory(config), self.job.cluster)
        return some and fits(self.models.estimated_memory(config), self.job.cluster)

    def predict_or_memory(self, config: Config, cutoff: float = math.inf) -> Prediction | Memory | None:
        """The prediction if the layout fits, else the memory that does not; None where the step takes `cutoff` seconds
        or more."""
        memory = self.models.planner.least_memory(config)
        if not fits(memory, self.job.cluster):
            return memory
        # The replay of allocations takes longer than the clock, so the clock decides first.
        if cutoff < math.inf and self.models.planner.seconds(config) >= cutoff:
            return None
        prediction = self.models.planner.predict(config)
        return next((memory for memory in prediction.memory if not fits(memory, self.job.cluster)), prediction)

    def _may_be_fast(self, config: Config, found: SearchState, cutoff: float) -> bool:
        """Whether the lower bound of a layout's seconds, over all orders of its axes, is below `cutoff`."""
        chunks, transport = max(CHUNKS, config.layout.pipeline.chunks), transport_on(self.job.cluster, config)
        seconds = self._bound(config, chunks, transport)
        found.least[config.layout.layer] = min(seconds, found.least.get(config.layout.layer, seconds))
        if seconds < cutoff:
            return True
        found.count(config, slow=True)
        return False

    @remembered(
        *PARTS, "batch", "memory.recompute", "layout.data.size", "layout.data.shard", "layout.pipeline.size",
        "layout.ranks_per_node",
    )  # fmt: skip
    def _bound(self, config: Config, chunks: int, transport: TransportName) -> float:
        """The lower bound of a layout's seconds, over all orders of its axes."""
        config = with_field(with_field(config, "layout.pipeline.chunks", chunks), "layout.transport", transport)
        # Orders of axes differ in the ranks that share a node.
        return min(self.models.least_seconds(one) for one in orders_of(config, self.job))

    def _room(
        self, config: Config, found: SearchState, cutoff: float, full: Collection[Config] = ()
    ) -> tuple[Memory, ...]:
        """The estimated memory of a layout, if it fits and some order of axes may be below `cutoff`; else empty."""
        recomputes = config.memory.policy.recomputes
        keeper = keeping_all(config) if recomputes else config
        # The bound without recomputation is asked first: it is lower, and needs no recording of recomputed attention.
        if not self._may_be_fast(keeper, found, cutoff) or self._waits(config, full):
            return ()
        if recomputes and (self.models.recomputes_for_nothing(config) or not self._may_be_fast(config, found, cutoff)):
            return ()
        # Weights alone are cheaper to count than activations, and rule out whole families.
        if not self._has_room(config, found) or self._gathers_for_nothing(config):
            return ()
        memory = self.models.estimated_memory(config)
        if fits(memory, self.job.cluster):
            return (memory,)
        found.count(config)
        found.unfit += 1
        found.include_runner_up(RunnerUp(strategy_of(config), config, memory, whole=True))
        most = (1 + MAX_EXCESS_SHARE) * self.job.cluster.device.memory_bytes
        if memory.total <= most and not lacks_host(memory, self.job.cluster):
            seconds = self.models.estimated_seconds(config)
            if found.nearly_fits is None or seconds < found.nearly_fits[0]:
                found.nearly_fits = seconds, config, memory
        return ()

    def _gathers_for_nothing(self, config: Config) -> bool:
        """Whether a stage gathers weights in each task although zero2, which sends less, fits.

        A stage does not know which of its chunks comes next and gathers a chunk's weights for each task
        (data_parallel/gathering.py), so zero3 beside stages is the fastest only where whole weights do not fit.
        """
        if not config.layout.data.strategy.gathers or config.layout.pipeline.size == 1:
            return False
        name = next(
            name for name, sync in entries("syncs").items() if sync.candidate and sync.slices and not sync.gathers
        )
        whole = with_field(config, "layout.data.sync", name)
        if not fits(self.models.weights_memory(whole), self.job.cluster):
            return False
        # Estimates of memory may be 1 - SURE too low; the verdict "fits" leaves more than this free.
        return verdict(self.models.estimated_memory(whole), self.job.cluster) == "fits"

    def _has_room(self, config: Config, found: SearchState) -> bool:
        """Whether weights, gradients and states alone fit."""
        weights = self.models.weights_memory(config)
        if fits(weights, self.job.cluster):
            return True
        found.count(config)
        found.too_full += 1
        found.include_runner_up(RunnerUp(strategy_of(config), config, weights, whole=False))
        return False


def strategy_of(config: Config) -> str:
    """`data`, `zero3`, `megatron`, `pipeline` or `context`: the first axis of the layout besides replicas."""
    layout = config.layout
    if layout.tensor.axes:
        return layout.tensor.kind
    if layout.pipeline.size > 1:
        return "pipeline"
    if layout.context.token_axes:
        return "context"
    return layout.data.sync if layout.data.strategy.slices else "data"


def round_of(layout: Layout) -> tuple[bool, int, int]:
    """Sort key of a search's rounds: one stage before several, then the number of cuts (tensor, context), then the
    ranks that share a layer. The cuts of `cuts_within` come in earlier rounds."""
    # One stage and few ranks are few layouts and mostly fast: later rounds meet a low cutoff.
    cuts = bool(layout.tensor.axes) + bool(layout.context.axes)
    return layout.pipeline.size > 1, cuts, ranks_of_layer(layout)


def cuts_within(layout: Layout) -> Iterator[Hashable]:
    """Keys (expert, context, tensor) of the cuts that a layer's cut contains: tensor alone, context alone, both over
    fewer ranks. The search takes a cut to be no faster together with others than alone."""
    cut = layout.context, layout.tensor
    contexts = [
        layout.context.model_copy(update={"size": size}) if size > 1 else ContextParallel()
        for size in divisors(layout.context.size)
    ]
    sizes = {name: size for name, size in layout.tensor if isinstance(size, int) and not isinstance(size, bool)}
    tensors = [
        layout.tensor.model_copy(update=dict(zip(sizes, smaller, strict=True)))
        for smaller in product(*map(divisors, sizes.values()))
    ]
    for inside in product(contexts, (Whole(), *tensors)):
        if inside not in (cut, (ContextParallel(), Whole())):
            yield layout.data.expert, *inside
