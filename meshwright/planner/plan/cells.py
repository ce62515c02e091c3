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
    orders_of,
    tails_of,
)  # fmt: skip
from meshwright.ranks.transports import TransportName
from meshwright.strategies.memory.section import FIELD as RECOMPUTE

if TYPE_CHECKING:
    from meshwright.planner.plan.estimate import Estimates


Bounded = Literal["cuts", "layers", "model"]
"""The work in a lower bound: the model with two cuts, from models with one cut; layers; the model. A later bound needs
more recordings."""


@dataclass
class Least:
    """Lower bounds of seconds in all orders of axes."""

    bounds: dict[tuple[str | int, int, TransportName, Bounded], float] = field(default_factory=dict)
    """By recomputation, chunks, transport and the bounded work."""
    phases: dict[tuple[Tail, TransportName], float] = field(default_factory=dict)
    """Seconds of the pipeline phase, by tail and transport."""
    fast: dict[tuple[float, TransportName, tuple[Tail, ...]], tuple[float, list[Tail]]] = field(default_factory=dict)
    """By cutoff, transport and tails: the lowest bound of any tail, and the tails with bounds below the cutoff."""


_Held = dict[Tail, tuple[HeldStage, ...]]
_Alone = dict[tuple[str, int, str, bool], tuple[Memory, int]]
"""Memory without activations, by (name of the changed field, chunks, placement, are gradients widened)."""


@dataclass
class Judge:
    """Store of the parts of estimates for the layouts of a job."""

    job: SearchJob
    models: Estimates

    @remembered(
        *PARTS, "batch", "memory.recompute", "layout.data.size", "layout.data.shard", "layout.pipeline.size",
        "layout.pipeline.head", "layout.ranks_per_node",
    )  # fmt: skip
    def bound(self, config: Config, chunks: int, transport: TransportName, bounded: Bounded) -> float:
        """Return the lower bound of a layout's seconds over all orders of the axes."""
        config = with_field(with_field(config, "layout.pipeline.chunks", chunks), "layout.transport", transport)
        links = self.links(config)
        if bounded == "cuts":
            return self.models.least_of_cuts(config, links)
        return self.models.least_seconds(config, links, layers=bounded == "layers")

    @remembered(
        *LAYER, "model", "bits", "layout.pipeline.size", "layout.pipeline.head", "layout.data.size",
        "layout.data.shard", "layout.ranks_per_node", "layout.transport",
    )  # fmt: skip
    def links(self, config: Config) -> tuple[Links, ...]:
        """Return the links between a layer's ranks in each order of the axes."""
        links = self.models.links_of_layer
        orders = (links(with_field(config, "layout.order", order)) for order in orders_of(config, self.job))
        return tuple(dict.fromkeys(orders))

    @remembered(
        *PARTS, "batch", "layout.data.size", "layout.data.shard", "layout.pipeline.size", "layout.ranks_per_node",
    )  # fmt: skip
    def least(self, config: Config) -> Least:
        """Return tables to fill, equal for all syncs and offloads."""
        return Least()

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


@dataclass
class Cell:
    """Layouts with the choices of `config` up to the microbatch, each given by a tail. `alone`: memory without
    activations, shared by the whole family."""

    judge: Judge
    config: Config
    alone: _Alone = field(default_factory=dict)
    least_alone: dict[tuple[str, int, str, bool], float] = field(default_factory=dict)
    """Lower bounds of the bytes of `alone`, shared by the whole family."""
    lowest: float = math.inf
    """The lowest bound of seconds computed so far."""
    _for_nothing: dict[str | int, bool] = field(default_factory=dict)
    _memory: dict[tuple[Tail, str, str], Memory] = field(default_factory=dict)

    @cached_property
    def least(self) -> Least:
        """Lower bounds of seconds."""
        return self.judge.least(self.config)

    @cached_property
    def transport(self) -> TransportName:
        """The carrier of messages."""
        return transport_on(self.judge.job.cluster, self.config)

    @cached_property
    def held(self) -> _Held:
        """Bytes of activations by tail."""
        return self.judge.held(self.config)

    @cached_property
    def shares(self) -> _Held:
        """Lower bounds of the bytes of activations by tail, from whole layers."""
        return self.judge.shares(self.config)

    @cached_property
    def widens(self) -> bool:
        """True if gradients are float32 sums of half-precision ones."""
        return self.config.widens_gradients

    @cached_property
    def offloads_late(self) -> bool:
        """True if states are offloaded and the optimizer does not step each bucket on arrival. An offloading optimizer
        that does step on arrival may be faster than an optimizer on the device."""
        return self.config.memory.offload.to != SAVINGS[OFFLOAD] and not streams(self.config)

    def bound(self, tail: Tail, bounded: Bounded = "model") -> float:
        """Return a lower bound of the layout's seconds in any order of axes."""
        chunks = max(CHUNKS, tail.pipeline.chunks)
        key = tail.recompute, chunks, self.transport, bounded
        if key not in self.least.bounds:
            config = with_field(self.config, RECOMPUTE, tail.recompute)
            self.least.bounds[key] = self.judge.bound(config, *key[1:])
        return self.least.bounds[key]

    def phase(self, tail: Tail) -> float:
        """Return a lower bound of the layout's seconds under its own schedule and limit, in any order of axes."""
        key = tail, self.transport
        if key not in self.least.phases:
            config = with_field(tail.of(self.config), "layout.transport", self.transport)
            self.least.phases[key] = self.judge.models.phase_seconds(config, self.judge.links(config))
        return self.least.phases[key]

    def is_fast(self, tail: Tail, cutoff: float, *, phase: bool = False) -> bool:
        """Return True if the lower bound of the layout's seconds is below `cutoff`. `phase`: the bound under the
        layout's own schedule must be below `cutoff`, too."""
        seconds = 0.0
        for bounded in get_args(Bounded):
            seconds = self.bound(tail, bounded)
            if seconds >= cutoff:
                break
        self.lowest = min(seconds, self.lowest)
        return seconds < cutoff and (not phase or cutoff == math.inf or self.phase(tail) < cutoff)

    def fast(self, tails: tuple[Tail, ...], cutoff: float) -> list[Tail]:
        """Return the tails with bounds below `cutoff` without recomputation, which needs no recording of recomputed
        attention."""
        key = cutoff, self.transport, tails
        if key not in self.least.fast:
            keepers = dict.fromkeys(tail.keeper or tail for tail in tails)
            fast = {keeper: self.is_fast(keeper, cutoff, phase=True) for keeper in keepers}
            self.least.fast[key] = self.lowest, [tail for tail in tails if fast[tail.keeper or tail]]
        lowest, left = self.least.fast[key]
        self.lowest = min(lowest, self.lowest)
        return left

    def without_activations(self, tail: Tail, field: str = "", value: str = "") -> tuple[Memory, int]:
        """Return Estimates.alone_memory of the layout, or of the same layout with another value of a field."""
        key = field, tail.pipeline.chunks, tail.pipeline.placement, self.widens
        if key not in self.alone:
            config = tail.of(self.config)
            self.alone[key] = self.judge.models.alone_memory(with_field(config, field, value) if field else config)
        return self.alone[key]

    def least_bytes(self, tail: Tail, field: str = "", value: str = "", *, recorded: bool = True) -> float:
        """Return a lower bound of the bytes of `memory`, without buckets. `recorded` False: also without a recording of
        the cut layer."""
        if not recorded and tail not in self.shares:
            self.shares[tail] = self.judge.models.least_activations(tail.of(self.config))
        stages = self.activations(tail) if recorded else self.shares[tail]
        return least_total(self.alone_bytes(tail, field, value), stages)

    def alone_bytes(self, tail: Tail, field: str = "", value: str = "") -> float:
        """Return a lower bound of the bytes of `without_activations`, without buckets."""
        key = field, tail.pipeline.chunks, tail.pipeline.placement, self.widens
        if key not in self.least_alone:
            config = tail.of(self.config)
            self.least_alone[key] = self.judge.models.least_alone(with_field(config, field, value) if field else config)
        return self.least_alone[key]

    def activations(self, tail: Tail) -> tuple[HeldStage, ...]:
        """Return Estimates.held_activations of the layout."""
        if tail not in self.held:
            self.held[tail] = self.judge.models.held_activations(tail.of(self.config))
        return self.held[tail]

    def memory(self, tail: Tail, field: str = "", value: str = "") -> Memory:
        """Return Estimates.estimated_memory of the layout, or of the same layout with another value of a field."""
        key = tail, field, value
        if key not in self._memory:
            alone = self.without_activations(tail, field, value)
            self._memory[key] = self.judge.models.with_activations(*alone, self.activations(tail))
        return self._memory[key]

    def recomputes_for_nothing(self, tail: Tail) -> bool:
        """Return True if the layout recomputes attention although the kernel keeps too little (MAX_KEPT_SHARE)."""
        setting = tail.recompute
        if setting not in self._for_nothing:
            config = with_field(self.config, RECOMPUTE, setting)
            self._for_nothing[setting] = self.judge.models.recomputes_for_nothing(config)
        return self._for_nothing[setting]

    def fits(self, tail: Tail, field: str = "", value: str = "") -> bool:
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
            if name == OFFLOAD and self.offloads_late and not is_full(name) and self.fits(tail, name, SAVINGS[name]):
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
