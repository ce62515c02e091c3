"""The search: of all legal layouts the fastest that fit, of which few are predicted.

| what is asked of a layout | from                                                        | it is out where      |
|---------------------------|-------------------------------------------------------------|----------------------|
| the memory of its weights | parameters in buckets, with gradients and states            | it does not fit      |
| an estimate of its step   | recordings at two sizes of microbatch, scaled (estimate.py) | it does not fit      |
| its prediction            | recordings of its own, and the simulated step (predict.py)  | it does not fit, or  |
|                           |                                                             | the top K are faster |

Layouts are predicted in the order of their estimates. When the next estimate is not below the K-th fastest prediction,
nothing that is left can be, as far as an estimate is no more than 1/SURE of the prediction (estimate.py). A layout that
recomputes, or moves, what it might keep is not predicted where the one that keeps it fits: it is slower.
"""

from __future__ import annotations

import gc
import heapq
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from meshwright.config import Config
from meshwright.config.schema import Layout
from meshwright.data.files import ShowProgress, silent
from meshwright.errors import ConfigError, Problem
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.estimate import Estimates
from meshwright.tools.plan.predict import Memory, Planner, Prediction
from meshwright.tools.plan.space import SearchJob, legal_layouts

Keep = Callable[[Layout], bool]

TRIES = 6
"""The most layouts that are predicted until one fits, of a strategy that has none among the fastest."""


@dataclass(frozen=True)
class Counts:
    """Numbers of layouts, by what became of them."""

    legal: int
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
    kinds of tensor sections of which no layout is legal, with a rule that one breaks."""

    job: SearchJob
    predictions: tuple[Prediction, ...]
    losers: tuple[Loser, ...]
    absent: dict[str, Problem]
    counts: Counts


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
) -> SearchResult:
    """The `top` fastest layouts of a run on so many devices that fit, of those that `keep` lets pass.

    `fixed`: fields that keep the run's values (space.py). `models`: shared by searches for one cluster.

    Raises ConfigError where no layout is legal, and where none fits: with what the closest one lacks.
    """
    job = SearchJob(config, cluster, devices, frozenset(fixed))
    hunt = _Hunt(job, top, models or Estimates(Planner(cluster)), report)
    refused: dict[str, Problem] = {}
    with _uncollected():
        hunt.gather(layout for layout in legal_layouts(job, refused) if keep(layout.layout))
        if not hunt.legal:
            raise ConfigError([Problem("--devices", devices, "leaves the run no legal layout"), *refused.values()])
        hunt.run()
        if not hunt.best:
            raise hunt.nothing_fits()
        losers = hunt.losers()
    absent = {kind: problem for kind, problem in refused.items() if kind not in hunt.kinds}
    return SearchResult(job, tuple(hunt.best), losers, absent, hunt.counts)


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

    def __init__(self, job: SearchJob, top: int, models: Estimates, report: ShowProgress) -> None:
        self.job, self.top, self.models, self.report = job, top, models, report
        self.legal = self.too_full = self.unfit = self.dominated = self.predicted = 0
        self.kinds: set[str] = set()
        self.best: list[Prediction] = []
        self.queue: list[tuple[float, int, Config]] = []
        self.fitting: set[Config | None] = set()
        self.fastest: dict[str, Prediction] = {}
        self.closest: dict[str, Loser] = {}

    @property
    def counts(self) -> Counts:
        out = self.too_full + self.unfit + self.dominated + self.predicted
        return Counts(self.legal, self.too_full, self.unfit, self.dominated, self.legal - out, self.predicted)

    def gather(self, layouts: Iterable[Config]) -> None:
        """Queue the layouts that may fit, by their estimates."""
        for number, config in enumerate(layouts):
            self.legal += 1
            self.kinds.add(config.layout.tensor.kind)
            if number % 1000 == 0:
                self.report(f"{number:,} legal layouts", None)
            weights = self.models.weights_memory(config)
            if weights.total > self.job.cluster.device.memory:
                self.too_full += 1
                self._does_not_fit(config, weights, whole=False)
                continue
            estimate = self.models.estimate(config)
            if self._fits(config, estimate.memory):
                self.queue.append((estimate.seconds, number, config))
        heapq.heapify(self.queue)

    def run(self) -> None:
        """Predict until nothing in the queue can be among the best."""
        while self.queue and (len(self.best) < self.top or self.queue[0][0] < self.best[-1].seconds):
            self._predict(heapq.heappop(self.queue)[-1])

    def losers(self) -> tuple[Loser, ...]:
        """The best layout of each strategy but the fastest's. Where none of its layouts has been predicted, that is the
        first that fits of those with the least estimates."""
        waiting: dict[str, list[tuple[float, int, Config]]] = {}
        for entry in sorted(self.queue):
            waiting.setdefault(strategy_of(entry[-1]), []).append(entry)
        strategies = waiting.keys() | self.fastest.keys() | self.closest.keys()
        for strategy, entries in waiting.items():
            for tries, (_, _, config) in enumerate(entries):
                if strategy in self.fastest or (tries >= TRIES and strategy in self.closest):
                    break
                self._predict(config)
        return tuple(self._loser(strategy) for strategy in sorted(strategies - {strategy_of(self.best[0].config)}))

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
            return
        prediction = self.models.predict(config)
        self.report(f"{self.predicted:,} predicted of {self.legal:,} legal layouts", None)
        if not self._fits(config, prediction.fullest):
            return
        self.predicted += 1
        self.fitting.add(config)
        strategy = strategy_of(config)
        if strategy not in self.fastest or prediction.seconds < self.fastest[strategy].seconds:
            self.fastest[strategy] = prediction
        insort(self.best, prediction, key=lambda one: one.seconds)
        del self.best[self.top :]

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
