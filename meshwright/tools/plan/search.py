"""The search: of all legal layouts the fastest that fit, without predicting the others.

| what is asked of a layout | from                                                         | it is out where      |
|---------------------------|--------------------------------------------------------------|----------------------|
| what it holds anyhow      | parameters in buckets                                        | it does not fit      |
| the least seconds         | products, the device's best, the bubble (bounds.py)          | the top K are faster |
| an estimate of the tasks  | those of two sizes, scaled; the bubble (estimates.py)        | the top K are faster |
| an estimate of all        | that, and sums of gradients; what tasks keep                 | either               |
| the memory, again         | recordings of its own                                        | it does not fit      |
| its prediction            | these, and the simulated step                                | it does not fit      |

A layout that computes twice, or moves, what it might keep comes after the one that keeps it: it is slower.

Best first: the layout with the least bound is looked at one row further. When it is not below the K-th fastest
prediction, nothing that is left can be, as far as an estimate is no more than 1/SURE of the prediction (estimates.py).
"""

from __future__ import annotations

import gc
import heapq
from bisect import insort
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.data.progress import ShowProgress as Report
from meshwright.data.progress import silent
from meshwright.errors import ConfigError, Problem
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.estimates import Estimates, Least
from meshwright.tools.plan.output import layout_text, parts_text
from meshwright.tools.plan.predict import Memory, Prediction
from meshwright.tools.plan.space import Job, legal_layouts

Keep = Callable[[Layout], bool]

LOOKS = 6
"""Of a strategy that has none among the fastest, how many layouts are predicted until one fits."""


class Models(Protocol):
    """What the search asks of the planner's models of memory and time (estimates.py)."""

    def held(self, config: Config) -> Memory:
        """Of the fullest rank, what it holds whatever it does: weights, gradients, states."""

    def glance(self, config: Config) -> float:
        """Seconds that a step takes at least, told from no recordings."""

    def line(self, config: Config) -> float:
        """About how long its tasks take."""

    def rough(self, config: Config) -> Least:
        """About what it holds and how long a step takes at least, told from few recordings."""

    def least_memory(self, config: Config) -> Memory:
        """What it holds at least, of recordings of its own."""

    def predict(self, config: Config) -> Prediction: ...


@dataclass(frozen=True)
class Counts:
    """How many layouts are legal, and what became of them, by the table's rows."""

    legal: int
    too_full: int
    """Weights, gradients and states alone do not fit."""
    unfit: int
    """With activations and all else they do not."""
    dominated: int
    """The same layout fits without recomputing or moving."""
    too_slow: int
    """A bound or an estimate says that they are not among the fastest."""
    predicted: int


@dataclass(frozen=True)
class Loser:
    """The best of a strategy that is not the fastest's. It fits and has a prediction; or none does, and of those that
    were looked at this one needs least. `memory`: of its fullest rank, without activations where `counted` is false."""

    strategy: str
    config: Config
    memory: Memory
    counted: bool
    prediction: Prediction | None = None


@dataclass(frozen=True)
class Found:
    """`predictions`: the fastest that fit, the fastest first; at least one. `losers`: of each other strategy. `absent`:
    kinds of tensor sections of which no layout is legal, with a rule that one breaks."""

    job: Job
    predictions: tuple[Prediction, ...]
    losers: tuple[Loser, ...]
    absent: dict[str, Problem]
    counts: Counts


def strategy_of(config: Config) -> str:
    """`data`, `megatron`, `tesseract + pipeline`, ...: what a layout is made of, besides replicas."""
    tensor, stages = config.layout.tensor, config.layout.pipeline.size
    parts = ([tensor.kind] if tensor.axes else []) + (["pipeline"] if stages > 1 else [])
    return " + ".join(parts) or "data"


def search(
    config: Config,
    cluster: Cluster,
    devices: int,
    top: int = 5,
    *,
    fixed: Collection[str] = (),
    keep: Keep = lambda layout: True,
    models: Models | None = None,
    report: Report = silent,
) -> Found:
    """The `top` fastest layouts of a run on so many devices that fit, of those that `keep` lets pass.

    `fixed`: fields that keep the run's values (space.py). `models`: shared by searches for one cluster.

    Raises ConfigError where no layout is legal, and where none fits: with what the closest one lacks.
    """
    job = Job(config, cluster, devices, frozenset(fixed))
    hunt = _Hunt(job, top, models or Estimates(cluster), report)
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
    return Found(job, tuple(hunt.best), losers, absent, hunt.counts)


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
    """A search under way. `queue`: a bound, a number that no two share, the row that it has come to, the layout."""

    def __init__(self, job: Job, top: int, models: Models, report: Report) -> None:
        self.job, self.top, self.models, self.report = job, top, models, report
        self.legal = self.too_full = self.unfit = self.dominated = self.predicted = 0
        self.kinds: set[str] = set()
        self.best: list[Prediction] = []
        self.queue: list[tuple[float, int, int, Config]] = []
        self.left = self.queue
        self.fitting: set[Config | None] = set()
        self.fastest: dict[str, Prediction] = {}
        self.closest: dict[str, Loser] = {}

    @property
    def counts(self) -> Counts:
        out = self.too_full + self.unfit + self.dominated + self.predicted
        return Counts(self.legal, self.too_full, self.unfit, self.dominated, self.legal - out, self.predicted)

    def gather(self, layouts: Iterable[Config]) -> None:
        """Queue what may fit, by its first bound."""
        for number, config in enumerate(layouts):
            self.legal += 1
            self.kinds.add(config.layout.tensor.kind)
            if number % 1000 == 0:
                self.report(f"{number:,} legal layouts", None)
            held = self.models.held(config)
            if held.total > self.job.cluster.device.memory:
                self.too_full += 1
                self._does_not_fit(Loser(strategy_of(config), config, held, counted=False))
            else:
                self.queue.append((self.models.glance(config), number, 0, config))
        heapq.heapify(self.queue)

    def run(self) -> None:
        """Until nothing in the queue can be among the best."""
        while self.queue and (len(self.best) < self.top or self.queue[0][0] < self.best[-1].seconds):
            self._look(*heapq.heappop(self.queue))

    def losers(self) -> tuple[Loser, ...]:
        """Of each strategy but the fastest's."""
        self.left = self.queue
        seen = {strategy_of(config) for *_, config in self.left} | self.fastest.keys() | self.closest.keys()
        return tuple(self._loser(strategy) for strategy in sorted(seen - {strategy_of(self.best[0].config)}))

    def nothing_fits(self) -> ConfigError:
        """With the layout that lacks least."""
        closest = min(self.closest.values(), key=_lack)
        device = self.job.cluster.device.memory
        needs = f"{parts_text(closest.memory)}; {(closest.memory.total - device) / 1e9:.2f} GB are missing"
        alone = "" if closest.counted else " before it computes anything"
        rule = (
            f"has {device / 1e9:.2f} GB a device, and none of {self.legal:,} legal layouts on {self.job.devices} fits: "
            f"the closest, {layout_text(closest.config)}, needs {closest.memory.total / 1e9:.2f} GB{alone} ({needs})"
        )
        return ConfigError.of("--cluster", self.job.cluster.name, rule, "more --devices, or a smaller model")

    def _look(self, bound: float, number: int, row: int, config: Config) -> None:
        """One row further in the table."""
        if row == 0:
            self._wait(self.models.line(config), bound, number, row, config)
        elif row == 1:
            least = self.models.rough(config)
            if self._has_room(config, least.memory):
                self._wait(least.seconds, bound, number, row, config)
        elif _keeping(config) in self.fitting:
            self.dominated += 1
        elif self._has_room(config, self.models.least_memory(config)):
            self._predict(config)

    def _wait(self, seconds: float, bound: float, number: int, row: int, config: Config) -> None:
        heapq.heappush(self.queue, (max(bound, seconds), number, row + 1, config))

    def _has_room(self, config: Config, memory: Memory) -> bool:
        if memory.total <= self.job.cluster.device.memory:
            return True
        self.unfit += 1
        self._does_not_fit(Loser(strategy_of(config), config, memory, counted=True))
        return False

    def _predict(self, config: Config) -> None:
        prediction = self.models.predict(config)
        self.report(f"{self.predicted:,} predicted of {self.legal:,} legal layouts", None)
        fullest = max(prediction.memory, key=lambda memory: memory.total)
        if not self._has_room(config, fullest):
            return
        self.predicted += 1
        self.fitting.add(config)
        strategy = strategy_of(config)
        if strategy not in self.fastest or prediction.seconds < self.fastest[strategy].seconds:
            self.fastest[strategy] = prediction
        insort(self.best, prediction, key=lambda made: made.seconds)
        del self.best[self.top :]

    def _does_not_fit(self, loser: Loser) -> None:
        self.closest[loser.strategy] = min(self.closest.get(loser.strategy, loser), loser, key=_lack)

    def _loser(self, strategy: str) -> Loser:
        """A strategy's fastest; where none has been predicted, the first that fits of those with the least bounds."""
        self.queue = [entry for entry in self.left if strategy_of(entry[-1]) == strategy]
        heapq.heapify(self.queue)
        looks = 0
        while self.queue and strategy not in self.fastest and (looks < LOOKS or strategy not in self.closest):
            looks += self.queue[0][2] == 2
            self._look(*heapq.heappop(self.queue))
        if strategy not in self.fastest:
            return self.closest[strategy]
        prediction = self.fastest[strategy]
        fullest = max(prediction.memory, key=lambda memory: memory.total)
        return Loser(strategy, prediction.config, fullest, counted=True, prediction=prediction)


def _keeping(config: Config) -> Config | None:
    """The layout that keeps what this one computes twice, or moves to and fro: it is faster. Not so where a stage holds
    as many microbatches as memory allows."""
    pipeline, memory = config.layout.pipeline, config.memory
    if pipeline.size > 1 and pipeline.schedule == "message-driven" and pipeline.limit == "auto":
        return None
    if memory.offload.to != "none":
        offload = memory.offload.model_copy(update={"to": "none"})
        return config.model_copy(update={"memory": memory.model_copy(update={"offload": offload})})
    if memory.recompute != "none":
        return config.model_copy(update={"memory": memory.model_copy(update={"recompute": "none"})})
    return None


def _lack(loser: Loser) -> tuple[bool, int]:
    """What orders layouts that do not fit: those that are counted whole before the others."""
    return not loser.counted, loser.memory.total
