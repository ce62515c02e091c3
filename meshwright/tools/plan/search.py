"""The search: of all legal layouts the fastest that fit, of which few are predicted.

| what is asked of a layout | from                                                        | it is out where      |
|---------------------------|-------------------------------------------------------------|----------------------|
| the memory of its weights | parameters in buckets, with gradients and states: of a      | it does not fit      |
|                           | whole family at once (space.py)                             |                      |
| an estimate of its memory | recordings at two sizes of microbatch, scaled (estimate.py) | it does not fit      |
| an estimate of its step,  | the same, on the links between its ranks                    |                      |
| in each order of axes     |                                                             |                      |
| its memory                | recordings of its own, its first microbatches simulated     | it does not fit      |
| its prediction            | the whole step (predict.py)                                 | it does not fit, or  |
|                           |                                                             | the top K are faster |

Layouts are predicted in the order of their estimates, SIMULATED at most. When the next estimate is not below the K-th
fastest prediction, nothing that is left can be, as far as an estimate is no more than 1/SURE of the prediction
(estimate.py). A layout that recomputes, or moves, what it might keep is not predicted where the one that keeps it fits:
it is slower. Slices of gradients and weights (zero2, zero3) cost messages to save memory: a family of them is looked at
where each strategy that slices less fills more than ROOMY of the memory with weights, gradients and states. Ctrl-C ends
a search with the best that it has.
"""

from __future__ import annotations

import gc
import heapq
from bisect import insort
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.data.files import ShowProgress, silent
from meshwright.errors import ConfigError, Problem
from meshwright.registry import entries
from meshwright.tools.plan.answer import Change, Training
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.estimate import Estimates
from meshwright.tools.plan.predict import SYNC, Memory, Planner, Prediction
from meshwright.tools.plan.space import Refused, SearchJob, families, is_fixed, layouts_of
from meshwright.tools.plan.workers import Workers

Keep = Callable[[Layout], bool]

SIMULATED = 80
"""The most layouts that are predicted, once as many fit as were asked for: estimates let pass what hardly fits."""

ROOMY = 0.5
"""The part of a device's memory under which weights, gradients and states leave room enough to slice no more."""

WORTH_HAVING = 0.5
"""The part of a device's memory that the search says would be worth having, at most."""

TRIES = 6
"""The most layouts that are predicted until one fits, of a strategy that has none among the fastest."""


@dataclass(frozen=True)
class Counts:
    """Numbers of layouts, by what became of them."""

    legal: int
    """Those that were looked at; a family of which no layout can fit counts once, and so do all orders of axes of a
    layout that does not."""
    too_full: int
    """Weights, gradients and states alone do not fit."""
    unfit: int
    """Activations and all else do not fit beside them."""
    dominated: int
    """They recompute or offload, where the same layout fits without."""
    too_slow: int
    """Their estimates are behind the fastest."""
    predicted: int


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


@dataclass(frozen=True)
class SearchResult:
    """`predictions`: the fastest that fit, the fastest first; at least one. `losers`: of each other strategy. `absent`:
    kinds of tensor sections of which no layout is legal, with a rule that one breaks. `stopped`: by Ctrl-C, so that
    there may be faster ones. `lacking`: of those that do not fit the one with the least estimated seconds, if it would
    be the fastest. `training`: what the user would train with it; `changes`: what would change it."""

    job: SearchJob
    predictions: tuple[Prediction, ...]
    losers: tuple[Loser, ...]
    absent: dict[str, Problem]
    counts: Counts
    stopped: bool = False
    lacking: tuple[float, Config, Memory] | None = None
    training: Training = field(default_factory=Training)
    changes: tuple[Change, ...] = ()


def strategy_of(config: Config) -> str:
    """`data`, `megatron`, `tesseract + pipeline`, ...: what a layout is made of, besides replicas."""
    tensor, stages = config.layout.tensor, config.layout.pipeline.size
    parts = [tensor.kind] * bool(tensor.axes) + ["pipeline"] * (stages > 1) + [*config.layout.context.token_axes]
    return " + ".join(parts) or "data"


def layout_text(config: Config) -> str:
    """`megatron, cut by sequence: data 4 (zero1), pipe 2 (1f1b), tensor 2; micro 4, recompute auto, offload host`."""
    memory, limit = config.memory, config.layout.pipeline.limit
    words = [f"micro {config.micro}"]
    words += [f"limit {limit}"] * (limit != "auto")
    words += [f"recompute {memory.recompute}"] * (memory.recompute != "none")
    words += [f"offload {memory.offload.to}"] * (memory.offload.to != "none")
    kind = config.layout.tensor.words
    return f"{f'{kind}: ' if kind else ''}{config.layout.summary}; {', '.join(words)}"


def search(
    config: Config,
    cluster: Cluster,
    devices: int,
    top: int = 5,
    *,
    fixed: Collection[str] = (),
    keep: Keep = lambda layout: True,
    models: Estimates | None = None,
    report: ShowProgress = silent,
    partial: bool = False,
    processes: int = 1,
) -> SearchResult:
    """The `top` fastest layouts of a run on so many devices that fit, of those that `keep` lets pass.

    `fixed`: fields that keep the run's values (space.py). `models`: shared by searches for one cluster. `partial`:
    whether Ctrl-C ends the search with the best so far. `processes`: among how many it is shared, whatever their number
    with one answer; more than one are forked (workers.py), and must be before torch has gone backward.

    Raises ConfigError where no layout is legal, and where none fits: with what the closest one lacks.
    """
    job = SearchJob(config, cluster, devices, frozenset(fixed))
    models = models or Estimates(Planner(cluster))
    with _uncollected(), Workers(processes, lambda: _Answers(job, models, keep)) as workers:
        hunt = _Hunt(job, top, models, keep, report, workers)
        stopped = not _finishes(hunt.gather, partial)
        if not hunt.found.legal:
            problems = hunt.refused.values()
            raise ConfigError([Problem("--devices", devices, "leaves the run no legal layout"), *problems])
        stopped = not _finishes(hunt.run, partial, hunt.top if not stopped else 1) or stopped
        if not hunt.best:
            raise hunt.nothing_fits() if not stopped else KeyboardInterrupt
        losers = hunt.losers(TRIES if not stopped else 0)
    absent = {kind: problem for kind, problem in hunt.refused.items() if kind not in hunt.kinds}
    lacking = hunt.lacking if hunt.lacking and hunt.lacking[0] < hunt.best[0].seconds else None
    return SearchResult(job, tuple(hunt.best), losers, absent, hunt.counts, stopped, lacking)


def _finishes(work: Callable[..., None], partial: bool, *arguments: int) -> bool:
    """Whether the work came to its end, or was stopped by Ctrl-C, where a part of it is of use."""
    try:
        work(*arguments)
    except KeyboardInterrupt:
        if not partial:
            raise
        return False
    return True


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for cycles, which would go through a hundred thousand layouts again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


class _Hunt:
    """A search under way. `queue`: estimated seconds, a number that no two share, the layout."""

    def __init__(self, job: SearchJob, top: int, models: Estimates, keep: Keep, report: ShowProgress) -> None:
        self.job, self.top, self.models, self.keep, self.report = job, top, models, keep, report
        self.legal = self.too_full = self.unfit = self.dominated = self.predicted = self.simulated = 0
        self.kinds: set[str] = set()
        self.refused: dict[str, Problem] = {}
        self.best: list[Prediction] = []
        self.queue: list[tuple[float, int, Config]] = []
        self.fitting: set[Config | None] = set()
        self.fastest: dict[str, Prediction] = {}
        self.closest: dict[str, Loser] = {}
        self.lacking: tuple[float, Config, Memory] | None = None

    @property
    def counts(self) -> Counts:
        out = self.too_full + self.unfit + self.dominated + self.predicted
        return Counts(self.legal, self.too_full, self.unfit, self.dominated, self.legal - out, self.predicted)

    def gather(self) -> None:
        """Queue the layouts that may fit, by their estimates."""
        for number, config in enumerate(legal_layouts(self.job, self.refused, self._enters, self._holds)):
            if self.keep(config.layout):
                self._count(config)
                self.queue.append((self.models.estimated_seconds(config), number, config))

    def run(self, top: int) -> None:
        """Predict until nothing in the queue can be among so many of the fastest."""
        heapq.heapify(self.queue)
        while self.queue and (len(self.best) < top or self.queue[0][0] < self.best[-1].seconds):
            if len(self.best) >= top and self.simulated >= SIMULATED:
                return
            self._predict(heapq.heappop(self.queue)[-1])

    def losers(self, tries: int) -> tuple[Loser, ...]:
        """The best layout of each strategy but the fastest's. Where none of its layouts has been predicted, that is the
        first that fits of those with the least estimates, of which `tries` are predicted."""
        waiting: dict[str, list[tuple[float, int, Config]]] = {}
        for entry in sorted(self.queue):
            waiting.setdefault(strategy_of(entry[-1]), []).append(entry)
        strategies = waiting.keys() | self.fastest.keys() | self.closest.keys()
        for strategy, queued in waiting.items():
            for place, (_, _, config) in enumerate(queued):
                if strategy in self.fastest or (place >= tries and (strategy in self.closest or not tries)):
                    break
                self._predict(config)
        known = strategies & (self.fastest.keys() | self.closest.keys())
        return tuple(self._loser(strategy) for strategy in sorted(known - {strategy_of(self.best[0].config)}))

    def nothing_fits(self) -> ConfigError:
        """The error that names the layout which lacks least memory."""
        closest = min(self.closest.values(), key=_lack)
        device = self.job.cluster.device.memory
        needs = f"{closest.memory.text}; {(closest.memory.total - device) / 1e9:.2f} GB are missing"
        alone = "" if closest.whole else " before it computes anything"
        rule = (
            f"has {device / 1e9:.2f} GB a device, and none of {self.legal:,} legal layouts on {self.job.devices} fits: "
            f"the closest, {layout_text(closest.config)}, needs {closest.memory.total / 1e9:.2f} GB{alone} ({needs})"
        )
        return ConfigError.of("--cluster", self.job.cluster.name, rule, "more --devices, or a smaller model")

    def _predict(self, config: Config) -> None:
        if _keeping(config) in self.fitting:
            self.dominated += 1
            self.fitting.add(config)  # it keeps less; so what keeps even less is slower still
            return
        self.simulated += 1
        share = min(1.0, self.simulated / SIMULATED)
        self.report(f"{self.legal:,} layouts; predicting number {self.simulated}: {layout_text(config)}", share)
        if not self._fits(config, self.models.least_memory(config)):
            return
        prediction = self.models.predict(config)
        if not self._fits(config, prediction.fullest):
            return
        self.predicted += 1
        self.fitting.add(config)
        strategy = strategy_of(config)
        if strategy not in self.fastest or prediction.seconds < self.fastest[strategy].seconds:
            self.fastest[strategy] = prediction
        insort(self.best, prediction, key=lambda one: one.seconds)
        del self.best[self.top :]

    def _count(self, config: Config) -> None:
        self.legal += 1
        self.kinds.add(config.layout.tensor.kind)
        if self.legal % 500 == 1:
            self.report(f"{self.legal:,} layouts; now {config.layout.summary}", None)

    def _enters(self, family: Config) -> bool:
        """Whether the weights of a family of layouts fit."""
        if not self.keep(family.layout):
            return True
        if not is_fixed(SYNC, self.job.fixed) and any(map(self._roomy, slicing_less(family))):
            return False
        weights = self.models.weights_memory(family)
        if weights.total <= self.job.cluster.device.memory:
            return True
        self._count(family)
        self._is_too_full(family, weights)
        return False

    def _holds(self, config: Config) -> bool:
        """Whether a layout may fit, in whatever order of axes."""
        if not self.keep(config.layout):
            return True
        weights, device = self.models.weights_memory(config), self.job.cluster.device.memory
        if weights.total > device:
            self._count(config)
            self._is_too_full(config, weights)
            return False
        memory = self.models.estimated_memory(config)
        if memory.total <= device:
            return True
        self._count(config)
        self._fits(config, memory)
        if memory.total <= (1 + WORTH_HAVING) * device:
            seconds = self.models.estimated_seconds(config)
            if self.lacking is None or seconds < self.lacking[0]:
                self.lacking = seconds, config, memory
        return False

    def _roomy(self, family: Config) -> bool:
        return self.models.weights_memory(family).total <= ROOMY * self.job.cluster.device.memory

    def _is_too_full(self, config: Config, weights: Memory) -> None:
        self.too_full += 1
        self._does_not_fit(config, weights, whole=False)

    def _fits(self, config: Config, memory: Memory) -> bool:
        if memory.total <= self.job.cluster.device.memory:
            return True
        self.unfit += 1
        self._does_not_fit(config, memory, whole=True)
        return False

    def _does_not_fit(self, config: Config, memory: Memory, *, whole: bool) -> None:
        loser = Loser(strategy_of(config), config, memory, whole)
        self.closest[loser.strategy] = min(self.closest.get(loser.strategy, loser), loser, key=_lack)

    def _loser(self, strategy: str) -> Loser:
        if strategy not in self.fastest:
            return self.closest[strategy]
        prediction = self.fastest[strategy]
        return Loser(strategy, prediction.config, prediction.fullest, whole=True, prediction=prediction)


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


def _keeping(config: Config) -> Config | None:
    """The layout that keeps what this one computes twice, or moves to and fro: it is faster. Not so where a stage holds
    as many microbatches as memory allows."""
    pipeline, memory = config.layout.pipeline, config.memory
    if pipeline.limit_by_memory:
        return None
    if memory.offload.to != "none":
        offload = memory.offload.model_copy(update={"to": "none"})
        return config.model_copy(update={"memory": memory.model_copy(update={"offload": offload})})
    if memory.recompute != "none":
        return config.model_copy(update={"memory": memory.model_copy(update={"recompute": "none"})})
    return None


def _lack(loser: Loser) -> tuple[bool, int]:
    """The order of layouts that do not fit: those that are counted whole before the others."""
    return not loser.whole, loser.memory.total
