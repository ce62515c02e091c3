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
it is slower; attention is not recomputed at all where its kernel keeps nothing. Slices of gradients and weights (zero2,
zero3) cost messages to save memory: a family of them is looked at where each strategy that slices less fills more than
ROOMY of the memory with weights, gradients and states. Ctrl-C ends a search with the best that it has.
"""

from __future__ import annotations

import gc
from bisect import insort
from collections.abc import Callable, Collection, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain

from meshwright.config import Config
from meshwright.data.files import ShowProgress, silent
from meshwright.errors import ConfigError, Problem
from meshwright.tools.plan.answer import Change, Training
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.estimate import Estimates
from meshwright.tools.plan.predict import Memory, Planner, Prediction
from meshwright.tools.plan.scout import Keep, Loser, Outlook, Scout, strategy_of
from meshwright.tools.plan.space import SearchJob, families
from meshwright.tools.plan.workers import Workers

SIMULATED = 80
"""The most layouts that are predicted, once as many fit as were asked for: estimates let pass what hardly fits."""

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
    scout = Scout(job, models or Estimates(Planner(cluster)), keep)
    with _uncollected(), Workers(processes, scout) as workers:
        hunt = _Hunt(scout, top, report, workers)
        stopped = not _finishes(hunt.gather, partial)
        if stopped:
            workers.end()  # they are at layouts that nobody waits for any more
        if not hunt.found.legal and stopped:
            raise KeyboardInterrupt
        if not hunt.found.legal:
            problems = hunt.found.refused.values()
            raise ConfigError([Problem("--devices", devices, "leaves the run no legal layout"), *problems])
        stopped = not _finishes(hunt.run, partial, hunt.top if not stopped else 1) or stopped
        if not hunt.best:
            raise hunt.nothing_fits() if not stopped else KeyboardInterrupt
        stopped = stopped or not _finishes(hunt.try_losers, partial, TRIES)
        losers = hunt.losers()
    found = hunt.found
    absent = {kind: problem for kind, problem in found.refused.items() if kind not in found.kinds}
    lacking = found.lacking if found.lacking and found.lacking[0] < hunt.best[0].seconds else None
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
    """A search under way. `queue`: estimated seconds, a number that no two share, the layout; the first `passed` are
    done with. `ahead`: those that try_losers() will ask for; `known`: verdicts on some of them, `fitting_ahead` the
    strategies of which one fits, `asked` which one a worker is at."""

    def __init__(self, scout: Scout, top: int, report: ShowProgress, workers: Workers) -> None:
        self.scout, self.top, self.report, self.workers = scout, top, report, workers
        self.found = Outlook()
        self.dominated = self.predicted = self.simulated = self.passed = 0
        self.best: list[Prediction] = []
        self.queue: list[tuple[float, int, Config]] = []
        self.fitting: set[Config | None] = set()
        self.fastest: dict[str, Prediction] = {}
        self.known: dict[Config, Prediction | Memory] = {}
        self.asked: dict[int, Config] = {}
        self.ahead: list[Config] = []
        self.fitting_ahead: set[str] = set()

    @property
    def counts(self) -> Counts:
        found = self.found
        out = found.too_full + found.unfit + self.dominated + self.predicted
        return Counts(found.legal, found.too_full, found.unfit, self.dominated, found.legal - out, self.predicted)

    def gather(self) -> None:
        """Queue the layouts that may fit, by their estimates; stopped by Ctrl-C, those that are known by then.

        The processes take in turn the ways to cut a layer, whose layouts have recordings in common; those with most
        families first, so that all end at about the same time.
        """
        cuts: dict[Hashable, list[tuple[int, Config]]] = {}
        for number, family in enumerate(families(self.scout.job, self.found.refused)):
            cuts.setdefault(family.layout.layer, []).append((number, family))
        shared = sorted(cuts.values(), key=len, reverse=True)
        found: dict[int, Outlook] = {}

        def tell(summary: str, share: float | None) -> None:
            self.report(f"{sum(one.legal for one in found.values()):,} layouts; now {summary}", share)

        for worker in self.workers.idle:
            self.workers.ask(worker, Scout.found, shared)
        try:
            self.scout.look_at(shared, found, chain((0,), self.scout.turns), tell)
            while len(self.workers.idle) < len(self.workers) - 1:
                for _, others in self.workers.answers(wait=True):
                    found |= others
        finally:
            for number in sorted(found):
                self.found.include(found[number])
            estimated = enumerate(self.found.queue)
            self.queue = sorted((seconds, number, config) for number, (seconds, config) in estimated)
            self.found.queue = []

    def run(self, top: int) -> None:
        """Predict until nothing in the queue can be among so many of the fastest."""
        self.ahead = [config for queued in self._by_strategy().values() for config in queued[:TRIES]]
        while self.passed < len(self.queue):
            estimate, _, config = self.queue[self.passed]
            if len(self.best) >= top and (self.simulated >= SIMULATED or estimate >= self.best[-1].seconds):
                return
            self.passed += 1
            self._predict(config)

    def try_losers(self, tries: int) -> None:
        """Predict layouts of each strategy that has none yet, by their estimates, until one fits or `tries` do not."""
        closest = self.found.closest
        for strategy, queued in self._by_strategy().items():
            for place, config in enumerate(queued):
                if strategy in self.fastest or (place >= tries and strategy in closest):
                    break
                self._predict(config)

    def losers(self) -> tuple[Loser, ...]:
        """The best known layout of each strategy but the fastest's."""
        known = self.fastest.keys() | self.found.closest.keys()
        return tuple(self._loser(strategy) for strategy in sorted(known - {strategy_of(self.best[0].config)}))

    def _by_strategy(self) -> dict[str, list[Config]]:
        """The rest of the queue, by strategy."""
        waiting: dict[str, list[Config]] = {}
        for _, _, config in self.queue[self.passed :]:
            waiting.setdefault(strategy_of(config), []).append(config)
        return waiting

    def nothing_fits(self) -> ConfigError:
        """The error that names the layout which lacks least memory."""
        job, closest = self.scout.job, min(self.found.closest.values(), key=lambda one: one.lack)
        device = self.scout.device_bytes
        needs = f"{closest.memory.text}; {(closest.memory.total - device) / 1e9:.2f} GB are missing"
        alone = "" if closest.whole else " before it computes anything"
        rule = (
            f"has {device / 1e9:.2f} GB a device, and none of {self.found.legal:,} legal layouts on {job.devices} "
            f"fits: the closest, {layout_text(closest.config)}, needs {closest.memory.total / 1e9:.2f} GB{alone} "
            f"({needs})"
        )
        return ConfigError.of("--cluster", job.cluster.name, rule, "more --devices, or a smaller model")

    def _predict(self, config: Config) -> None:
        if keeping(config) in self.fitting:
            self.dominated += 1
            self.fitting.add(config)  # it keeps less; so what keeps even less is slower still
            return
        self.simulated += 1
        share = min(1.0, self.simulated / SIMULATED)
        text = f"{self.found.legal:,} layouts; predicting number {self.simulated}: {layout_text(config)}"
        self.report(text, share)
        verdict = self._verdict(config)
        if isinstance(verdict, Memory):
            self.found.unfit += 1
            self.found.include_loser(Loser(strategy_of(config), config, verdict, whole=True))
            return
        self.predicted += 1
        self.fitting.add(config)
        strategy = strategy_of(config)
        if strategy not in self.fastest or verdict.seconds < self.fastest[strategy].seconds:
            self.fastest[strategy] = verdict
        insort(self.best, verdict, key=lambda one: one.seconds)
        del self.best[self.top :]

    def _verdict(self, config: Config) -> Prediction | Memory:
        """The scout's verdict, or the one that a worker has found."""
        self._hand_on()
        while config in self.asked.values():
            self._take_verdicts(wait=True)
        return self.known.pop(config) if config in self.known else self.scout.verdict(config)

    def _hand_on(self) -> None:
        """While this process predicts the fastest, the workers predict what try_losers() will ask for."""
        self._take_verdicts()
        for worker in self.workers.idle:
            left = [one for one in self.ahead if strategy_of(one) not in self.fastest.keys() | self.fitting_ahead]
            if left:
                config, *self.ahead = left
                self.asked[worker] = config
                self.workers.ask(worker, Scout.verdict, config)

    def _take_verdicts(self, *, wait: bool = False) -> None:
        for worker, verdict in self.workers.answers(wait=wait):
            config = self.asked.pop(worker)
            self.known[config] = verdict
            if isinstance(verdict, Prediction):
                self.fitting_ahead.add(strategy_of(config))

    def _loser(self, strategy: str) -> Loser:
        if strategy not in self.fastest:
            return self.found.closest[strategy]
        prediction = self.fastest[strategy]
        return Loser(strategy, prediction.config, prediction.fullest, whole=True, prediction=prediction)


def keeping(config: Config) -> Config | None:
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
