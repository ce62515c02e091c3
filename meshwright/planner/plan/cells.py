"""Estimates for the layouts of a family with one size of microbatch, without a config for each layout.

A family's layouts differ in few fields, and each part of an estimate depends on only some of these fields:

| part                                 | differs in a family with                        | common to               |
|--------------------------------------|-------------------------------------------------|-------------------------|
| lower bound of seconds               | microbatch, recomputation                       | schedules, limits       |
| seconds of the pipeline phase        | microbatch, schedule and limit, recomputation   | syncs, offload          |
| memory of weights, gradients, states | chunks, their placement, the type of gradients  | microbatches, schedules |
| memory of activations                | microbatch, schedule and limit, recomputation   | syncs, shards, offload  |

So a part is looked up by the fields in the table, and a layout's estimated memory is a sum of looked-up numbers. A
config is made only for a layout with enough memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal, get_args

from meshwright.config import Config
from meshwright.config.registry import entries
from meshwright.config.section import with_field
from meshwright.planner.plan.buckets import streams
from meshwright.planner.plan.memory import HeldStage, Memory, fits, least_total, verdict
from meshwright.planner.plan.remembered import LAYER, PARTS, remembered
from meshwright.planner.plan.site import Links, transport_on
from meshwright.planner.plan.space import (
    CHUNKS,
    OFFLOAD,
    SAVINGS,
    TAIL,
    Refused,
    SearchJob,
    Tail,
    is_fixed,
    ordered,
    orders_of,
    own_tail,
    sizes_of,
    tails_of,
)  # fmt: skip
from meshwright.strategies.memory.section import FIELD as RECOMPUTE

if TYPE_CHECKING:
    from meshwright.planner.plan.estimate import Estimates


Bounded = Literal["whole", "cuts", "layers", "model"]
"""The work in a lower bound: a share of whole layers (for seeds alone); the model with two cuts, from models with one
cut; layers; the model. A later bound needs more recordings."""

_Held = dict[Tail, tuple[HeldStage, ...]]
_Alone = tuple[str, int, str, bool]
"""The facts on which a family's memory without activations depends: the name of the changed field, chunks, placement,
are gradients of several microbatches added up."""


@dataclass(eq=False)
class Bounds:
    """Lower bounds of seconds in all orders of axes, of the layouts with one size of microbatch; the same for all
    families that differ in sync, shard and offload only. `links`: Judge.links of these families."""

    judge: Judge
    config: Config
    links: tuple[Links, ...]
    _seconds: dict[tuple[str | int, int, Bounded], float] = field(default_factory=dict)
    """By recomputation, chunks and the bounded work."""
    _phases: dict[Tail, float] = field(default_factory=dict)
    _promising: dict[float, list[Tail]] = field(default_factory=dict)
    _least: dict[float, float] = field(default_factory=dict)
    _fast: dict[float, tuple[list[Tail], float]] = field(default_factory=dict)

    @cached_property
    def tails(self) -> tuple[tuple[Tail, ...], Refused]:
        """`space.tails_of` of the config."""
        return self.judge.tails(self.config)

    @cached_property
    def held(self) -> _Held:
        """Bytes of activations by tail."""
        return self.judge.held(self.config)

    @cached_property
    def shares(self) -> _Held:
        """Lower bounds of the bytes of activations by tail, from whole layers."""
        return self.judge.shares(self.config)

    @cached_property
    def accumulates(self) -> bool:
        """True if gradients of several microbatches are added up."""
        return self.config.accumulates

    @cached_property
    def recorded(self) -> Collection[int]:
        """Estimates.recorded_parts of the config."""
        return self.judge.models.recorded_parts(self.config)

    @property
    def is_recorded(self) -> bool:
        """True if a layer is recorded for the microbatch's size."""
        return 0 in self.recorded

    def seconds(self, tail: Tail, bounded: Bounded = "model") -> float:
        """Return a lower bound of a layout's seconds."""
        key = tail.recompute, max(CHUNKS, tail.pipeline.chunks), bounded
        if key not in self._seconds:
            config, models = tail.of(self.config), self.judge.models
            if bounded == "whole":
                self._seconds[key] = models.least_of_whole(config, self.links)
            elif bounded == "cuts":
                self._seconds[key] = models.least_of_cuts(config, self.links)
            else:
                self._seconds[key] = models.least_seconds(config, self.links, layers=bounded == "layers")
        return self._seconds[key]

    def phase(self, tail: Tail) -> float:
        """Return a lower bound of the layout's seconds under its own schedule and limit."""
        if tail not in self._phases:
            self._phases[tail] = self.judge.models.phase_seconds(tail.of(self.config), self.links)
        return self._phases[tail]

    def least(self, tail: Tail, cutoff: float) -> float:
        """Return the first bound of a layout's seconds that is `cutoff` or more; else the bound from the whole
        model."""
        seconds = 0.0
        for bounded in get_args(Bounded)[1:]:
            seconds = self.seconds(tail, bounded)
            if seconds >= cutoff:
                break
        return seconds

    def least_of_own(self, cutoff: float) -> float:
        """Return `least` of the config's own choices after the microbatch."""
        if cutoff not in self._least:
            self._least[cutoff] = self.least(own_tail(self.config), cutoff)
        return self._least[cutoff]

    def promising(self, cutoff: float) -> list[Tail]:
        """Return the tails with a bound below `cutoff` without a recording of the cut layer."""
        if cutoff not in self._promising:
            # Most tails are too slow without recomputation already.
            fast = (tail for tail in self.tails[0] if self.seconds(tail.keeping(), "cuts") < cutoff)
            self._promising[cutoff] = [tail for tail in fast if self.seconds(tail, "cuts") < cutoff]
        return self._promising[cutoff]

    def fast(self, cutoff: float) -> tuple[list[Tail], float]:
        """Return the tails with all bounds below `cutoff` without recomputation, which needs no recording of recomputed
        attention; and the lowest bound of any tail."""
        if cutoff not in self._fast:
            least = {keeper: self.least(keeper, cutoff) for keeper in dict.fromkeys(map(Tail.keeping, self.tails[0]))}
            fast = {keeper for keeper in least if least[keeper] < cutoff and self.is_fast_phase(keeper, cutoff)}
            left = [tail for tail in self.tails[0] if tail.keeping() in fast]
            self._fast[cutoff] = left, min(least.values(), default=math.inf)
        return self._fast[cutoff]

    def is_fast_phase(self, tail: Tail, cutoff: float) -> bool:
        """Return True if the bound under the layout's own schedule is below `cutoff`."""
        return cutoff == math.inf or self.phase(tail) < cutoff


@dataclass
class Table:
    """Bounds by size of microbatch. `legal`: of legal sizes, once known. `refused`: the first broken rule by tensor
    kind."""

    bounds: dict[int, Bounds] = field(default_factory=dict)
    legal: tuple[Bounds, ...] | None = None
    refused: Refused = field(default_factory=dict)


@dataclass
class Judge:
    """Store of the parts of estimates for the layouts of a job."""

    job: SearchJob
    models: Estimates

    def sizes(self, family: Config) -> tuple[tuple[Bounds, ...], Refused]:
        """Return bounds for each legal size of the family's microbatch, and the first broken rule by tensor kind."""
        table = self.table(family, self.links_of(family))
        if table.legal is None:
            table.legal = tuple(self.bounds(sized) for sized in sizes_of(family, self.job, table.refused))
        return table.legal, table.refused

    def bounds(self, config: Config) -> Bounds:
        """Return the bounds of a config with a size of microbatch."""
        links = self.links_of(config)
        table = self.table(config, links)
        if config.micro not in table.bounds:
            table.bounds[config.micro] = Bounds(self, config, links)
        return table.bounds[config.micro]

    @remembered(
        *PARTS, "batch.global_", "memory.recompute", "layout.data.size", "layout.pipeline", "layout.ranks_per_node",
    )  # fmt: skip
    def table(self, config: Config, links: tuple[Links, ...]) -> Table:
        """Return a table to fill, equal for all syncs, shards and offloads with these links."""
        return Table()

    def links_of(self, config: Config) -> tuple[Links, ...]:
        """Return `links` of a config with the transport of a run on the cluster."""
        return self.links(with_field(config, "layout.transport", transport_on(self.job.cluster, config)))

    @remembered(
        *LAYER, "model", "bits", "layout.pipeline.size", "layout.pipeline.head", "layout.data.size",
        "layout.data.shard", "layout.ranks_per_node", "layout.transport",
    )  # fmt: skip
    def links(self, config: Config) -> tuple[Links, ...]:
        """Return the links between a layer's ranks in each order of the axes."""
        links = self.models.links_of_layer
        orders = (links(with_field(config, "layout.order", order)) for order in orders_of(config, self.job))
        return tuple(dict.fromkeys(orders))

    @remembered(*PARTS, "micro", "num_microbatches", "layout.pipeline.size")
    def held(self, config: Config) -> _Held:
        """Return a table to fill: bytes of activations by tail, equal for all syncs, shards and offloads."""
        return {}

    @remembered(*PARTS, "micro", "num_microbatches", "layout.pipeline.size")
    def shares(self, config: Config) -> _Held:
        """Return a table to fill: lower bounds of bytes of activations by tail, equal for all syncs and offloads."""
        return {}

    @remembered(*TAIL)
    def tails(self, config: Config) -> tuple[tuple[Tail, ...], Refused]:
        """Return `space.tails_of` of a config with a size of microbatch; remembered."""
        return tails_of(config, self.job)

    @cached_property
    def lone_sync(self) -> str:
        """The sync that slices least, among syncs that slice and do not gather."""
        return next(
            name for name, sync in entries("syncs").items() if sync.candidate and sync.slices and not sync.gathers
        )

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """Savings that may be switched off. A layout with such a saving waits for the layout without."""
        free = (name for name in SAVINGS if not is_fixed(name, self.job.fixed))
        return tuple(name for name in free if self.job.is_known(name, SAVINGS[name]))


@dataclass(eq=False)
class Family:
    """Layouts with equal choices up to the microbatch's size. `alone`: memory without activations; `least_alone`: lower
    bounds of the bytes of `alone`."""

    judge: Judge
    config: Config
    alone: dict[_Alone, tuple[Memory, int]] = field(default_factory=dict)
    least_alone: dict[_Alone, float] = field(default_factory=dict)

    @cached_property
    def strategy(self) -> str:
        """`strategy_of` the family."""
        return strategy_of(self.config)

    @cached_property
    def offloads_late(self) -> bool:
        """True if states are offloaded and the optimizer does not step each bucket on arrival. An offloading optimizer
        that does step on arrival may be faster than an optimizer on the device."""
        return self.config.memory.offload.to != SAVINGS[OFFLOAD] and not streams(self.config)


@dataclass(eq=False)
class Cell:
    """The layouts of a family with one size of microbatch, each given by a tail."""

    family: Family
    bounds: Bounds
    _for_nothing: dict[str | int, bool] = field(default_factory=dict)
    _memory: dict[tuple[Tail, str, str], Memory] = field(default_factory=dict)
    _fits: dict[tuple[Tail, str, str], bool] = field(default_factory=dict)

    @cached_property
    def judge(self) -> Judge:
        """The family's judge."""
        return self.family.judge

    @cached_property
    def config(self) -> Config:
        """The choices up to the microbatch's size."""
        return with_field(self.family.config, "batch.micro", self.bounds.config.batch.micro)

    def without_activations(self, tail: Tail, field: str = "", value: str = "") -> tuple[Memory, int]:
        """Return Estimates.alone_memory of the layout, or of the same layout with another value of a field."""
        key, known = self._alone_key(tail, field), self.family.alone
        if key not in known:
            config = tail.of(self.config)
            known[key] = self.judge.models.alone_memory(with_field(config, field, value) if field else config)
        return known[key]

    def least_bytes(self, tail: Tail, field: str = "", value: str = "", *, recorded: bool = True) -> float:
        """Return a lower bound of the bytes of `memory`, without buckets. `recorded` False: also without a recording of
        the cut layer."""
        shares = self.bounds.shares
        if not recorded and tail not in shares:
            shares[tail] = self.judge.models.least_activations(tail.of(self.bounds.config))
        stages = self.activations(tail) if recorded else shares[tail]
        return least_total(self.alone_bytes(tail, field, value), stages)

    def alone_bytes(self, tail: Tail, field: str = "", value: str = "") -> float:
        """Return a lower bound of the bytes of `without_activations`, without buckets."""
        key, known = self._alone_key(tail, field), self.family.least_alone
        if key not in known:
            config = tail.of(self.config)
            known[key] = self.judge.models.least_alone(with_field(config, field, value) if field else config)
        return known[key]

    def _alone_key(self, tail: Tail, field: str) -> _Alone:
        return field, tail.pipeline.chunks, tail.pipeline.placement, self.bounds.accumulates

    def activations(self, tail: Tail) -> tuple[HeldStage, ...]:
        """Return Estimates.held_activations of the layout."""
        held = self.bounds.held
        if tail not in held:
            held[tail] = self.judge.models.held_activations(tail.of(self.bounds.config))
        return held[tail]

    def memory(self, tail: Tail, field: str = "", value: str = "") -> Memory:
        """Return Estimates.estimated_memory of the layout, or of the same layout with another value of a field."""
        key = tail, field, value
        if key not in self._memory:
            alone = self.without_activations(tail, field, value)
            self._memory[key] = self.judge.models.with_activations(*alone, self.activations(tail))
        return self._memory[key]

    def is_slow_with_sums(self, tail: Tail, cutoff: float) -> bool:
        """Return True if a slicing layout of one stage is bounded by `cutoff` or more in all orders of axes, counting
        communication of data parallelism. Needs no recording of the cut layer."""
        # Sums of whole gradients take little of a step, and stages sum under other stages' tasks.
        if tail.pipeline.size > 1 or not self.config.layout.data.strategy.slices:
            return False
        models, every = self.judge.models, self.bounds.links
        orders = ordered(tail.of(self.config), self.judge.job, {})
        return all(models.least_with_sums(config, every, cutoff) >= cutoff for config in orders)

    def recomputes_for_nothing(self, tail: Tail) -> bool:
        """Return True if the layout recomputes attention although the kernel keeps too little (MAX_KEPT_SHARE)."""
        setting = tail.recompute
        if setting not in self._for_nothing:
            config = with_field(self.bounds.config, RECOMPUTE, setting)
            self._for_nothing[setting] = self.judge.models.recomputes_for_nothing(config)
        return self._for_nothing[setting]

    def fits(self, tail: Tail, field: str = "", value: str = "") -> bool:
        """Return True if the estimated memory of the layout fits, or of the same layout with another value of a
        field."""
        key = tail, field, value
        if key not in self._fits:
            self._fits[key] = self._is_within(*key)
        return self._fits[key]

    def _is_within(self, tail: Tail, field: str, value: str) -> bool:
        cluster = self.judge.job.cluster
        if self.least_bytes(tail, field, value) > cluster.device.memory_bytes:
            return False
        alone, _ = self.without_activations(tail, field, value)
        return fits(alone, cluster) and fits(self.memory(tail, field, value), cluster)

    def waits(self, tail: Tail, full: Collection[Config] = ()) -> bool:
        """Return True if the same layout without one saving has a fitting estimate. That layout is at least as fast, so
        the saving is tried only if that layout is in `full`: layouts with a prediction that does not fit or is
        tight."""
        # Under a limit by memory a saving admits more microbatches and may make the layout faster.
        if tail.pipeline.limit_by_memory:
            return False

        def is_full(name: str) -> bool:
            return bool(full) and with_field(tail.of(self.config), name, SAVINGS[name]) in full

        for name in self.judge.left_out:
            if (
                name == OFFLOAD
                and self.family.offloads_late
                and not is_full(name)
                and self.fits(tail, name, SAVINGS[name])
            ):
                return True
            if name == RECOMPUTE and tail.keeper is not None and not is_full(name) and self.fits(tail.keeper):
                return True
        return False

    def gathers_for_nothing(self, tail: Tail) -> bool:
        """Return True if a stage gathers weights in each task although zero2, which sends less, fits.

        A stage does not know the chunk of the next task and gathers a chunk's weights for each task
        (data_parallel/gathering.py). So zero3 with several stages is the fastest only if whole weights do not fit.
        """
        if not self.config.layout.data.strategy.gathers or tail.pipeline.size == 1:
            return False
        sync, cluster = ("layout.data.sync", self.judge.lone_sync), self.judge.job.cluster
        if self.least_bytes(tail, *sync) > cluster.device.memory_bytes or not fits(
            self.without_activations(tail, *sync)[0], cluster
        ):
            return False
        # Estimates of memory may be 1 - SURE_BYTES too low; the verdict "fits" leaves more than this free.
        return verdict(self.memory(tail, *sync), cluster) == "fits"


def strategy_of(config: Config) -> str:
    """Name the strategy, `data`, `zero3`, `megatron`, `pipeline` or `context`: the layout's first axis other than
    replicas."""
    layout = config.layout
    if layout.tensor.axes:
        return layout.tensor.kind
    if layout.pipeline.size > 1:
        return "pipeline"
    if layout.context.token_axes:
        return "context"
    return layout.data.sync if layout.data.strategy.slices else "data"
