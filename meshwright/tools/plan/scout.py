"""A process of a search finds out which layouts may fit, about how fast they are, and what a prediction says.

A search's processes share families of layouts; what all have found is put together in the order of the families, so
that the answer does not hang on how many they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.data.files import ShowProgress, silent
from meshwright.registry import entries
from meshwright.section import with_field
from meshwright.tools.plan.estimate import Estimates
from meshwright.tools.plan.predict import SYNC, Memory, Prediction
from meshwright.tools.plan.space import Refused, SearchJob, is_fixed, layouts_of
from meshwright.tools.plan.workers import Turns

Keep = Callable[[Layout], bool]

ROOMY = 0.5
"""The part of a device's memory under which weights, gradients and states leave room enough to slice no more."""

WORTH_HAVING = 0.5
"""The part of a device's memory that the search says would be worth having, at most."""

_TOLD = 100
"""Layouts of a family after which it is told how far it is."""


@dataclass(frozen=True)
class Loser:
    """The best layout of a strategy that did not win: its fastest that fits, with a prediction; or, if none fits, of
    those that were looked at the one that lacks least. `memory`: of its fullest rank, without activations where `whole`
    is false."""

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
    tensor sections; `queue`: those that may fit, with their estimated seconds; `closest`: of those that do not, by
    strategy, the one that lacks least; `lacking`: the one with the least estimated seconds, and these."""

    legal: int = 0
    too_full: int = 0
    unfit: int = 0
    kinds: set[str] = field(default_factory=set)
    refused: Refused = field(default_factory=dict)
    queue: list[tuple[float, Config]] = field(default_factory=list)
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
        for loser in later.closest.values():
            self.include_loser(loser)
        if later.lacking is not None:
            self.include_lacking(later.lacking)

    def count(self, config: Config) -> None:
        self.legal += 1
        self.kinds.add(config.layout.tensor.kind)

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
        self.device_bytes = job.cluster.device.memory

    def look(self, family: Config, found: Outlook, report: ShowProgress = silent) -> None:
        """Put into `found` what there is to know of a family."""
        for config in self._kept(family, found):
            found.count(config)
            found.queue.append((self.models.estimated_seconds(config), config))
            if found.legal % _TOLD == 1:
                report(config.layout.summary, None)

    def look_at(
        self,
        cuts: Sequence[Sequence[tuple[int, Config]]],
        found: dict[int, Outlook],
        turns: Iterable[int],
        report: ShowProgress = silent,
    ) -> None:
        """Put into `found` what families have in them, by their numbers: of one list after the other as turns come."""
        for turn in turns:
            if turn >= len(cuts):
                return
            for number, family in cuts[turn]:
                found[number] = Outlook()
                self.look(family, found[number], report)

    def found(self, cuts: Sequence[Sequence[tuple[int, Config]]]) -> dict[int, Outlook]:
        """Look at families as long as there are turns: what they have in them, by their numbers."""
        found: dict[int, Outlook] = {}
        self.look_at(cuts, found, self.turns)
        return found

    def verdict(self, config: Config) -> Prediction | Memory:
        """The prediction of a layout that fits; of another one so much of its memory that it does not."""
        memory = self.models.least_memory(config)
        if memory.total > self.device_bytes:
            return memory
        prediction = self.models.predict(config)
        return prediction if prediction.fullest.total <= self.device_bytes else prediction.fullest

    def _kept(self, family: Config, found: Outlook) -> Iterator[Config]:
        """The family's layouts that may fit."""
        least = with_field(family, "batch.micro", family.replica_batch) if family.replica_batch else None
        if least is None or self._enters(least, found):
            for config in layouts_of(family, self.job, found.refused, partial(self._holds, found)):
                if self.keep(config.layout):
                    yield config

    def _enters(self, family: Config, found: Outlook) -> bool:
        """Whether the weights of a family of layouts fit; it is one that might be its least full."""
        if not self.keep(family.layout):
            return True
        if not is_fixed(SYNC, self.job.fixed) and any(map(self._roomy, slicing_less(family))):
            return False
        return self._has_room(family, found)

    def _holds(self, found: Outlook, config: Config) -> bool:
        """Whether a layout may fit, in whatever order of axes."""
        if not self.keep(config.layout):
            return True
        if not self._has_room(config, found) or self.models.recomputes_for_nothing(config):
            return False
        memory = self.models.estimated_memory(config)
        if memory.total <= self.device_bytes:
            return True
        found.count(config)
        found.unfit += 1
        found.include_loser(Loser(strategy_of(config), config, memory, whole=True))
        if memory.total <= (1 + WORTH_HAVING) * self.device_bytes:
            found.include_lacking((self.models.estimated_seconds(config), config, memory))
        return False

    def _has_room(self, config: Config, found: Outlook) -> bool:
        """Whether weights, gradients and states fit alone."""
        weights = self.models.weights_memory(config)
        if weights.total <= self.device_bytes:
            return True
        found.count(config)
        found.too_full += 1
        found.include_loser(Loser(strategy_of(config), config, weights, whole=False))
        return False

    def _roomy(self, family: Config) -> bool:
        return self.models.weights_memory(family).total <= ROOMY * self.device_bytes


def strategy_of(config: Config) -> str:
    """`data`, `megatron`, `tesseract + pipeline`, ...: what a layout is made of, besides replicas."""
    tensor, stages = config.layout.tensor, config.layout.pipeline.size
    parts = [tensor.kind] * bool(tensor.axes) + ["pipeline"] * (stages > 1) + [*config.layout.context.token_axes]
    return " + ".join(parts) or "data"


def slicing_less(config: Config) -> Iterator[Config]:
    """The layout under the strategies that a search tries before its own, which slices gradients; none where it does
    not."""
    sync = config.layout.data.sync
    if config.layout.data.strategy.slices:
        for other, tried in entries("syncs").items():
            if other == sync:
                return
            if tried.candidate:
                data = config.layout.data.model_copy(update={"sync": other, "shard": None})
                yield config.model_copy(update={"layout": config.layout.model_copy(update={"data": data})})
