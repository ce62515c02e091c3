"""A process of a search finds out which layouts may fit, about how fast they are, and what a prediction says.

A search's processes share families of layouts; what all have found is put together in the order of the families, so
that the answer does not hang on how many they were.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from meshwright.config import Config
from meshwright.config.layout import ContextParallel, Layout
from meshwright.data.files import ShowProgress, silent
from meshwright.registry import entries
from meshwright.section import divisors, with_field
from meshwright.tensor.section import Whole
from meshwright.tools.plan.answer import verdict
from meshwright.tools.plan.estimate import Estimates
from meshwright.tools.plan.predict import Memory, Prediction
from meshwright.tools.plan.space import Refused, SearchJob, layouts_of, orders_of
from meshwright.tools.plan.workers import Turns

Keep = Callable[[Layout], bool]

WORTH_HAVING = 0.5
"""The part of a device's memory that the search says would be worth having, at most."""

_TOLD = 100
"""Layouts of a family after which it is told how far it is."""


class Queued(NamedTuple):
    """A layout that may fit: its estimated seconds and memory, and whether it is tight at best."""

    seconds: float
    memory: int
    tight: bool
    config: Config


@dataclass(frozen=True)
class Loser:
    """The best layout of a strategy that did not win: its fastest that fits, with a prediction; or, where none of the
    strategy fits, of those that were looked at the one that lacks least. `memory`: of its fullest rank, without
    activations where `whole` is false."""

    strategy: str
    config: Config
    memory: Memory
    whole: bool
    prediction: Prediction | None = None

    @property
    def lack(self) -> tuple[bool, int]:
        """The order of layouts that do not fit: those that are counted whole before the others."""
        return not self.whole, self.memory.total


@dataclass
class Outlook:
    """The knowledge of layouts before any is predicted. `legal`: how many were looked at (Counts), `kinds` of their
    tensor sections; `queue`: those that may fit; `slow`: the strategies of which some are slower than was asked for;
    `least`: the least seconds that a way to cut a layer can take; `closest`: of those that do not fit, by strategy, the
    one that lacks least; `lacking`: the one with the least estimated seconds, and these."""

    legal: int = 0
    too_full: int = 0
    unfit: int = 0
    kinds: set[str] = field(default_factory=set)
    refused: Refused = field(default_factory=dict)
    queue: list[Queued] = field(default_factory=list)
    slow: set[str] = field(default_factory=set)
    least: dict[Hashable, float] = field(default_factory=dict)
    closest: dict[str, Loser] = field(default_factory=dict)
    lacking: tuple[float, Config, Memory] | None = None

    def include(self, later: Outlook) -> None:
        """Add what was found of later families."""
        self.legal += later.legal
        self.too_full += later.too_full
        self.unfit += later.unfit
        self.kinds |= later.kinds
        self.refused = later.refused | self.refused
        self.queue += later.queue
        self.slow |= later.slow
        for cut, seconds in later.least.items():
            self.include_least(cut, seconds)
        for loser in later.closest.values():
            self.include_loser(loser)
        if later.lacking is not None:
            self.include_lacking(later.lacking)

    def count(self, config: Config) -> None:
        self.legal += 1
        self.kinds.add(config.layout.tensor.kind)

    def count_slow(self, config: Config) -> None:
        """Layouts of which none is as fast as was asked for count once."""
        self.count(config)
        self.slow.add(strategy_of(config))

    def include_least(self, cut: Hashable, seconds: float) -> None:
        self.least[cut] = min(seconds, self.least.get(cut, seconds))

    def include_loser(self, loser: Loser) -> None:
        """The first stays of layouts that lack as much."""
        known = self.closest.get(loser.strategy, loser)
        self.closest[loser.strategy] = min(known, loser, key=lambda one: one.lack)

    def include_lacking(self, lacking: tuple[float, Config, Memory]) -> None:
        if self.lacking is None or lacking[0] < self.lacking[0]:
            self.lacking = lacking


class Scout:
    """One process of a search for layouts that `keep` lets pass."""

    def __init__(self, job: SearchJob, models: Estimates, keep: Keep) -> None:
        self.job, self.models, self.keep = job, models, keep
        self.turns = Turns()
        self.device_bytes = job.cluster.device.memory_bytes
        self._bounds: dict[Hashable, float] = {}

    def look(self, family: Config, found: Outlook, cutoff: float = math.inf, report: ShowProgress = silent) -> None:
        """Put into `found` what there is to know of a family's layouts that may take less than `cutoff` seconds."""
        for config, memory in self._kept(family, found, cutoff):
            seconds = self.models.estimated_seconds(config)
            if seconds < cutoff:
                found.count(config)
                tight = verdict(memory, self.job.cluster) == "tight"
                found.queue.append(Queued(seconds, memory.total, tight, config))
            else:
                found.count_slow(config)
            if found.legal % _TOLD == 1:
                report(config.layout.summary, None)

    def look_at(
        self,
        lists: Sequence[Sequence[tuple[int, Config]]],
        cutoff: float,
        found: dict[int, Outlook],
        turns: Iterable[int],
        report: ShowProgress = silent,
    ) -> None:
        """Put into `found` what families have in them, by their numbers: of one list after the other as turns come."""
        for turn in turns:
            if turn >= len(lists):
                return
            for number, family in lists[turn]:
                found[number] = Outlook()
                self.look(family, found[number], cutoff, report)

    def found(self, lists: Sequence[Sequence[tuple[int, Config]]], cutoff: float) -> dict[int, Outlook]:
        """Look at families as long as there are turns: what they have in them, by their numbers."""
        found: dict[int, Outlook] = {}
        self.look_at(lists, cutoff, found, self.turns)
        return found

    def verdict(self, config: Config) -> Prediction | Memory:
        """The prediction if the layout fits, else the memory that shows it does not."""
        memory = self.models.least_memory(config)
        if memory.total > self.device_bytes:
            return memory
        prediction = self.models.predict(config)
        return prediction if prediction.fullest.total <= self.device_bytes else prediction.fullest

    def _kept(self, family: Config, found: Outlook, cutoff: float) -> Iterator[tuple[Config, Memory]]:
        """The family's layouts that may fit and may be fast enough, with their estimated memory."""
        if not self.keep(family.layout):
            return
        least = with_field(family, "batch.micro", family.replica_batch) if family.replica_batch else None
        if least is None or self._has_room(least, found):
            memory: list[Memory] = []

            def enters(sized: Config) -> bool:
                return self._may_be_fast(sized, found, cutoff)

            def holds(config: Config) -> bool:
                memory[:] = self._room(config, found, cutoff)
                return bool(memory)

            for config in layouts_of(family, self.job, found.refused, enters, holds):
                yield config, memory[0]

    def _may_be_fast(self, config: Config, found: Outlook, cutoff: float) -> bool:
        """Whether layouts like this one may take less than `cutoff` seconds, in whatever order of axes."""
        key = config.layout.layer, config.layout.axes, config.batch, config.memory.recompute, config.widens_gradients
        if key not in self._bounds:
            self._bounds[key] = min(self.models.least_seconds(one) for one in orders_of(config, self.job))
        seconds = self._bounds[key]
        found.include_least(config.layout.layer, seconds)
        if seconds < cutoff:
            return True
        found.count_slow(config)
        return False

    def _room(self, config: Config, found: Outlook, cutoff: float) -> tuple[Memory, ...]:
        """The estimated memory of a layout that may fit, and may be fast enough, in whatever order of axes."""
        if self.models.recomputes_for_nothing(config) or not self._may_be_fast(config, found, cutoff):
            return ()
        # The bytes of weights alone are asked first: they rule out whole families, and cost less than activations.
        if not self._has_room(config, found) or self._gathers_for_nothing(config):
            return ()
        memory = self.models.estimated_memory(config)
        if memory.total <= self.device_bytes:
            return (memory,)
        found.count(config)
        found.unfit += 1
        found.include_loser(Loser(strategy_of(config), config, memory, whole=True))
        if memory.total <= (1 + WORTH_HAVING) * self.device_bytes:
            found.include_lacking((self.models.estimated_seconds(config), config, memory))
        return ()

    def _gathers_for_nothing(self, config: Config) -> bool:
        """Whether a stage gathers weights in each of its tasks that could stay: zero2, which sends less, fits as well.

        A stage does not know which of its chunks comes next and gathers a chunk's weights in each task
        (data_parallel/gathering.py), so zero3 beside stages is only ever the fastest where whole weights do not fit.
        """
        if not config.layout.data.strategy.gathers or config.layout.pipeline.size == 1:
            return False
        name = next(
            name for name, sync in entries("syncs").items() if sync.candidate and sync.slices and not sync.gathers
        )
        whole = with_field(config, "layout.data.sync", name)
        if self.models.weights_memory(whole).total > self.device_bytes:
            return False
        # An estimate is SURE of what is held; a layout that is judged to fit leaves more than the rest free.
        return verdict(self.models.estimated_memory(whole), self.job.cluster) == "fits"

    def _has_room(self, config: Config, found: Outlook) -> bool:
        """Whether weights, gradients and states fit alone."""
        weights = self.models.weights_memory(config)
        if weights.total <= self.device_bytes:
            return True
        found.count(config)
        found.too_full += 1
        found.include_loser(Loser(strategy_of(config), config, weights, whole=False))
        return False


def strategy_of(config: Config) -> str:
    """`data`, `zero3`, `megatron`, `pipeline`, `context`: what a layout is made of first, besides replicas."""
    layout = config.layout
    if layout.tensor.axes:
        return layout.tensor.kind
    if layout.pipeline.size > 1:
        return "pipeline"
    if layout.context.token_axes:
        return "context"
    return layout.data.sync if layout.data.strategy.slices else "data"


def ways_cut(layout: Layout) -> int:
    """In how many ways layers are cut: their inside, their sequences."""
    return bool(layout.tensor.axes) + bool(layout.context.axes)


def round_of(layout: Layout) -> tuple[int, int]:
    """The order in which the search comes to a way to cut layers: what `cuts_within` names comes before."""
    ways = ways_cut(layout)
    return ways, layout.context.size if ways == 1 else 1


def cuts_within(layout: Layout) -> Iterator[Hashable]:
    """The cuts that a layer's cut is made of: of its inside alone, of its sequences alone, and over fewer ranks. None
    is taken to become faster by the others beside it, or a sequence's over more ranks."""
    context = layout.context
    if context.axes and layout.tensor.axes:
        yield layout.data.expert, ContextParallel(), layout.tensor
    for size in divisors(context.size)[1:]:
        yield layout.data.expert, context.model_copy(update={"size": size}), Whole()
