"""The search: of all legal layouts the fastest that fit, of which few are predicted.

| what is asked of a layout | from                                                        | it is out where      |
|---------------------------|-------------------------------------------------------------|----------------------|
| the work of its parts     | recordings at two sizes of microbatch, scaled: of all       | the top K are faster |
|                           | schedules and limits of a size of microbatch at once        |                      |
| the memory of its weights | parameters in buckets, with gradients and states: of a      | it does not fit      |
|                           | whole family at once (space.py)                             |                      |
| an estimate of its memory | the same recordings (estimate.py)                           | it does not fit      |
| an estimate of its step,  | the same, on the links between its ranks                    | the top K are faster |
| in each order of axes     |                                                             |                      |
| the memory of its tensors | recordings of its own, its first microbatches simulated     | it does not fit      |
| its seconds               | the whole step (predict.py)                                 | the top K are faster |
| its memory                | its allocations, replayed (process.py)                      | it does not fit      |

The run file's own layout is predicted first, if it is legal. Then come layouts in rounds (evaluator.round_of): one
stage before several; of whole layers, of layers cut in one way, inside or along the sequence, over more and more ranks,
then in both, where each cut that a cut is made of is fast enough. After each round layouts are predicted in the order
of their estimates: what is slower than the K fastest is not looked at in the next. SIMULATED of a round are predicted
at most. When the next estimate is not below the K-th fastest prediction, nothing that is left can be, as far as an
estimate is no more than 1/SURE of the prediction (estimate.py).

A layout that recomputes or moves what it might keep is looked at when the one that keeps it does not fit, by an
estimate or a prediction, or is tight; one that sends in slices what it might keep is not predicted where the one that
keeps it fits and is estimated to be as fast; both also where fewer than K fit without. Attention is not recomputed at
all where its kernel keeps nothing.

What fits with all that is not predicted (Device.unpredicted_share) stands first; what is tight stands beside it, where
it is faster. Of each strategy (evaluator.strategy_of) one layout that fits is predicted; a strategy does not fit where
neither its fastest layouts nor the one that holds least do. Ctrl-C ends a search with the best that it has.
"""

from __future__ import annotations

import gc
import math
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from meshwright.config import Config
from meshwright.data.files import ShowProgress, silent
from meshwright.errors import ConfigError, Problem
from meshwright.registry import entries
from meshwright.section import with_field
from meshwright.tools.plan.answer import Change, Training
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.estimate import Estimates
from meshwright.tools.plan.evaluator import (
    Evaluator,
    Keep,
    Queued,
    RunnerUp,
    SearchState,
    cuts_within,
    round_of,
    strategy_of,
)
from meshwright.tools.plan.memory import Memory, bytes_text, verdict
from meshwright.tools.plan.predict import Planner, Prediction
from meshwright.tools.plan.software import Program
from meshwright.tools.plan.space import SearchJob, as_messages, families, own_layout

SIMULATED = 80
"""The most layouts of a round that are predicted, once any fits: estimates let pass what hardly fits."""

SYNCS_APART = 1.05
"""How far estimates of two syncs err apart: one that slices is left out for one that does not only where it was
estimated to take as many times as long. zero3 was estimated 2 % slower than zero1, and predicted 4 % faster."""

AS_MESSAGES = 2
"""The most layouts that share experts, the fastest first, of which rows are also tried as messages: a step in pieces
takes several times as long to simulate."""

TRIES = 6
"""The most layouts that are predicted until one fits, of a strategy that has none among the fastest, before the one
that holds least is asked."""


@dataclass(frozen=True)
class Counts:
    """Numbers of layouts, by what became of them."""

    legal: int
    """Those that were looked at; those of a family of which none can fit, or with a microbatch with which none is fast
    enough, count once, and so do all orders of axes of a layout that does not fit."""
    too_full: int
    """Weights, gradients and states alone do not fit."""
    unfit: int
    """Activations and all else do not fit beside them."""
    dominated: int
    """They recompute, offload or slice, where the same layout fits without."""
    too_slow: int
    """Their estimates are behind the fastest, or behind as many that are tight as they are."""
    predicted: int


@dataclass(frozen=True)
class SearchResult:
    """`predictions`: the fastest that fit, the fastest first; at least one. Only where none fits are they tight.
    `tight`: those that are, and are faster than the first. `runner_ups`: of each other strategy; `not_reached`: the
    strategies that a stopped search has not come to. `predicted`: all that were predicted and are no more than the
    device holds. `illegal`: kinds of tensor sections of which no layout is legal, with a rule that one breaks.
    `left_share`: of families of layouts, those that a stopped search has not looked at. `stopped`: by Ctrl-C, so that
    there may be faster ones. `nearly_fits`: of those that do not fit the one with the least estimated seconds, if it
    would be the fastest. `program`: whose run it is; None: our own. `training`: what the user would train with it;
    `changes`: what would change it."""

    job: SearchJob
    predictions: tuple[Prediction, ...]
    tight: tuple[Prediction, ...]
    runner_ups: tuple[RunnerUp, ...]
    not_reached: tuple[str, ...]
    predicted: tuple[Prediction, ...]
    illegal: dict[str, Problem]
    counts: Counts
    stopped: bool = False
    left_share: float = 0.0
    nearly_fits: tuple[float, Config, Memory] | None = None
    training: Training = field(default_factory=Training)
    program: Program | None = None
    changes: tuple[Change, ...] = ()


def layout_text(config: Config) -> str:
    """`megatron, cut by sequence: data 4 (zero1), pipe 2 (1f1b), tensor 2; micro 4, recompute auto, offload host`. One
    replica of whole sequences is not named: nothing is reduced."""
    memory, layout = config.memory, config.layout
    limit, kind, data = layout.pipeline.limit, layout.tensor.words, layout.data
    words = [f"micro {config.micro}"]
    words += [f"limit {limit}"] * (limit != "auto")
    words += ["rows to experts as messages"] * data.in_pieces
    words += [f"recompute {memory.recompute}"] * (memory.recompute != "none")
    words += [f"offload {memory.offload.to}"] * (memory.offload.to != "none")
    axes = layout.summary
    if data.strategy.like:
        axes = axes.replace(f"({data.sync})", f"({data.sync}, as {data.strategy.like})")
    if layout.world_size == 1:
        axes = "one device"
    elif math.prod(size for name, size in layout.axes if name in layout.token_axes) == 1:
        axes = ", ".join(part for part in axes.split(", ") if not part.startswith("data "))
    return f"{f'{kind}: ' if kind else ''}{axes}; {', '.join(words)}"


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
    program: Program | None = None,
    improved: Callable[[Prediction], None] = lambda best: None,
) -> SearchResult:
    """The `top` fastest layouts of a run on so many devices that fit, of those that `keep` lets pass.

    `fixed`: fields that keep the run's values (space.py). `models`: shared by searches for one cluster. `partial`:
    whether Ctrl-C ends the search with the best so far. `program`: whose layouts alone are looked at. `improved`: is
    given the fastest that fits, each time that a faster one is found.

    Raises ConfigError where no layout is legal, and where none fits: with what the closest one lacks.
    """
    job = SearchJob(config, cluster, devices, frozenset(fixed), program.layouts if program else {})
    evaluator = Evaluator(job, models or Estimates(Planner(cluster)), keep)
    current = _Search(evaluator, top, report, improved)
    # What torch makes at its first pass hangs together in a cycle, and would count as memory if it stayed.
    stopped = not _finishes(current.predict_own, partial)
    with _uncollected():
        stopped = stopped or not _finishes(current.run, partial)
    if stopped and not current.known:
        raise KeyboardInterrupt
    if not current.found.legal:
        problems = current.found.refused.values()
        raise ConfigError([Problem("--devices", devices, "leaves the run no legal layout"), *problems])
    if not current.known:
        raise current.nothing_fits()
    return replace(current.result(stopped=stopped), program=program)


def _finishes(work: Callable[[], None], partial: bool) -> bool:
    """Whether the work came to its end, or was stopped by Ctrl-C, where a part of it is of use."""
    try:
        work()
    except KeyboardInterrupt:
        if not partial:
            raise
        return False
    return True


@contextmanager
def _uncollected() -> Iterator[None]:
    """Without Python's search for cycles, which would go through a hundred thousand layouts again and again."""
    # Switched back on also by an error and by Ctrl-C: whoever called the search goes on in this process.
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # As if they had been gone through: else the first search for cycles would go through all of them.
            gc.freeze()
            gc.unfreeze()
            gc.enable()


class _Search:
    """A search under way.

    `queue`: layouts to predict, in the order of their estimates; the first `passed` are done with. `best`: the fastest
    predictions that fit; `tight`: the fastest that nearly do not; `known`: all; `fastest`: one by strategy, one that
    fits before one that is tight. `fitting`: estimated seconds of layouts that fit. `dominated`: layouts that save
    memory which one of `fitting` does not need; they fit, too. `behind`: layouts that would be tight, and no faster.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        top: int,
        report: ShowProgress,
        improved: Callable[[Prediction], None],
    ) -> None:
        self.evaluator, self.top, self.report, self.improved = evaluator, top, report, improved
        self.found = SearchState()
        self.simulated = self.passed = 0
        self.families: list[Config] = []
        self.looked_at = 0
        self.best: list[Prediction] = []
        self.tight: list[Prediction] = []
        self.known: list[Prediction] = []
        self.queue: list[Queued] = []
        self.dominated: dict[Config, Queued] = {}
        self.behind: list[Queued] = []
        self.seen: set[Config] = set()
        self.full: set[Config] = set()
        self.fitting: dict[Config, float] = {}
        self.fastest: dict[str, Prediction] = {}

    @property
    def counts(self) -> Counts:
        # Every layout has one end: too slow is whatever is left, so that the numbers add up to the legal ones.
        found, predicted = self.found, len(self.known)
        out = found.too_full + found.unfit + len(self.dominated) + predicted
        return Counts(found.legal, found.too_full, found.unfit, len(self.dominated), found.legal - out, predicted)

    @property
    def cutoff(self) -> float:
        """Seconds from which on a layout is of no interest, as far as is known."""
        return self.best[-1].seconds if len(self.best) >= self.top else math.inf

    @property
    def left_share(self) -> float:
        """The share of families of layouts that were not looked at."""
        return 1 - self.looked_at / max(1, len(self.families))

    @property
    def left_text(self) -> str:
        return f"{self.left_share:.0%} of the families left"

    @property
    def strategies(self) -> list[str]:
        return list(dict.fromkeys(strategy_of(family) for family in self.families))

    def predict_own(self) -> None:
        """Predict the run's own layout; and list the families of all."""
        every = families(self.evaluator.job, self.found.refused)
        self.families = [family for family in every if self.evaluator.keep(family.layout)]
        own = own_layout(self.evaluator.job)
        # Predicted whatever its estimate, so that the answer can be held against what the user has.
        if own is None or own.layout.data.strategy.unplanned or not self.evaluator.keep(own.layout):
            return
        self.found.count(own)
        self._predict(own)

    def run(self) -> None:
        """Predict the fastest, and one of each strategy."""
        rounds = _in_rounds(self.families)
        for place, own in enumerate(rounds):
            self._gather(own)
            self._predict_fastest(complete=place > 0 or len(rounds) == 1)
        self._try_messages()
        # Where fewer fit than were asked for, those that keep less are worth their predictions.
        for config in [*self.fitting] if len(self.best) < self.top else ():
            found = SearchState()
            self.evaluator.evaluate_savings(config, {*self.full, *self.fitting}, found, math.inf)
            self.dominated |= {queued.config: queued for queued in found.queue if queued.config not in self.seen}
            self.found.include(found)
        for queued in sorted(self.dominated.values(), key=lambda one: one.seconds):
            if len(self.best) < self.top and not queued.tight:
                self._predict(queued.config)
        for strategy in self.strategies:
            if not self._try(strategy) and strategy in self.found.slow:
                self._try_slow(strategy)

    def result(self, *, stopped: bool) -> SearchResult:
        """All that is known. About a strategy that a stopped search has not predicted nothing is said."""
        best, found = tuple(self.best) or tuple(self.tight), self.found
        first = best[0]
        tight = tuple(one for one in self.tight if self.best and one.seconds < first.seconds)
        others = [strategy for strategy in self.strategies if strategy != strategy_of(first.config)]
        not_reached = tuple(strategy for strategy in others if stopped and strategy not in self.fastest)
        runner_ups = []
        for strategy in others:
            if strategy in self.fastest:
                one = self.fastest[strategy]
                runner_ups.append(RunnerUp(strategy, one.config, one.fullest, whole=True, prediction=one))
            elif strategy in found.closest and strategy not in not_reached:
                runner_ups.append(found.closest[strategy])
        illegal = {kind: problem for kind, problem in found.refused.items() if kind not in found.kinds}
        nearly_fits = found.nearly_fits if found.nearly_fits and found.nearly_fits[0] < first.seconds else None
        predicted = tuple(sorted(self.known, key=lambda one: one.seconds))
        return SearchResult(
            self.evaluator.job, best, tight, tuple(runner_ups), not_reached, predicted, illegal, self.counts, stopped,
            self.left_share, nearly_fits,
        )  # fmt: skip

    def nothing_fits(self) -> ConfigError:
        """The error that names the layout which lacks least memory."""
        job, closest = self.evaluator.job, min(self.found.closest.values(), key=lambda one: one.excess)
        device = self.evaluator.device_bytes
        needs = f"{closest.memory.text}; {bytes_text(closest.memory.total - device)} are missing"
        alone = "" if closest.whole else " before it computes anything"
        rule = (
            f"has {bytes_text(device)} a device, and none of {self.found.legal:,} legal layouts on {job.devices} "
            f"fits: the closest, {layout_text(closest.config)}, needs {bytes_text(closest.memory.total)}{alone} "
            f"({needs})"
        )
        return ConfigError.of("--cluster", job.cluster.name, rule, "more --devices, or a smaller model")

    def _gather(self, own: Sequence[Config]) -> None:
        """Queue the layouts of one round that may fit and may be fast enough, by their estimates."""
        cutoff, found = self.cutoff, SearchState()
        try:
            for family in own:
                # A cut beside another makes no layer cheaper: what one cut alone cannot reach, both cannot.
                if any(self.found.least.get(cut, 0.0) >= cutoff for cut in cuts_within(family.layout)):
                    self.found.count_slow(family)
                else:
                    self._evaluate(family, cutoff, found)
                self.looked_at += 1
        finally:
            self.queue = sorted([*self.queue[self.passed :], *found.queue], key=lambda queued: queued.seconds)
            self.passed = 0
            self.found.include(found)

    def _evaluate(self, family: Config, cutoff: float, found: SearchState) -> None:
        """Put into `found` what a family has in it."""
        looked_at = f"{self.found.legal + found.legal:,} layouts, {self.left_text}"
        self.report(f"{looked_at}; now {family.layout.summary}", 1 - self.left_share)
        self.evaluator.evaluate_family(family, found, cutoff)

    def _predict_fastest(self, *, complete: bool) -> None:
        """Predict in the order of the estimates until as many fit as were asked for; where `complete` says so, until
        nothing in the queue can be among these."""
        # Of each round, or the first round's predictions would leave none for the layouts that are cut.
        limit = self.simulated + SIMULATED
        while self.passed < len(self.queue):
            queued = self.queue[self.passed]
            if len(self.best) >= self.top and (not complete or queued.seconds >= self.best[-1].seconds):
                return
            if self.known and self.simulated >= limit:
                return
            self.passed += 1
            behind = bool(self.best) and queued.seconds >= self.best[0].seconds
            # What is tight at best is of use only while it may be faster than the first that fits.
            if queued.tight and (behind or len(self.tight) >= self.top):
                self.behind.append(queued)
                self._queue_savings(queued.config)
                continue
            # The queue is in the order of the estimates, so what fits and keeps more was estimated to be as fast.
            sync, enough = queued.config.layout.data.sync, queued.seconds / SYNCS_APART
            if any(
                keeps in self.fitting and (keeps.layout.data.sync == sync or self.fitting[keeps] <= enough)
                for keeps in without_savings(queued.config)
            ):
                self.dominated[queued.config] = queued
                self.fitting[queued.config] = queued.seconds  # what keeps even less is slower still
                continue
            if not self._predict(queued.config, self.cutoff):
                self.behind.append(queued)

    def _queue_savings(self, config: Config) -> None:
        """Queue the layouts that save more memory than one that does not fit, or is tight."""
        self.full.add(config)
        found = SearchState()
        self.evaluator.evaluate_savings(config, self.full, found, self.cutoff)
        for queued in found.queue:
            insort(self.queue, queued, lo=self.passed, key=lambda one: one.seconds)
        self.found.include(found)

    def _try_messages(self) -> None:
        """Predict the fastest layouts that share experts with rows that travel under other tasks, too: under the first
        limit that fits."""
        # Of predictions, not of estimates, which know nothing of pieces; layouts that differ in their schedule or their
        # slices become one.
        sharing = [one for one in self.known if one.config.layout.data.expert > 1]
        sharing.sort(key=lambda one: (not self._fits(one), one.seconds))
        variants = dict.fromkeys(tuple(as_messages(one.config, self.evaluator.job)) for one in sharing)
        for limits in [*filter(None, variants)][:AS_MESSAGES]:
            for config in limits:
                self.found.count(config)
                known = len(self.known)
                if not self._predict(config, self.cutoff) or len(self.known) > known:
                    break

    def _try(self, strategy: str) -> bool:
        """Predict a strategy's layouts by their estimates until one fits or TRIES do not; then the one that holds
        least. Whether one fits."""
        # The fastest by their estimates use most memory; if these do not fit, the one that holds least decides.
        for number in range(TRIES + 1):
            left = (*self.dominated.values(), *self.behind, *self.queue[self.passed :])
            waiting = [one for one in left if strategy_of(one.config) == strategy and one.config not in self.seen]
            if strategy in self.fastest or not waiting:
                break
            if number < TRIES:
                # Those that are tight by their estimates mostly do not fit.
                self._predict(min(waiting, key=lambda one: (one.tight, one.seconds)).config)
            else:
                self._predict(self.evaluator.least_full(min(waiting, key=lambda one: one.memory).config))
        return strategy in self.fastest

    def _try_slow(self, strategy: str) -> None:
        """Predict one of a strategy of which all layouts that may fit were too slow to be looked at."""
        # A cutoff has kept its seconds from being estimated, and the answer to "why not this strategy" needs them.
        # Rounds go from whole layers on, and the first in which one fits ends this.
        for own in _in_rounds([family for family in self.families if strategy_of(family) == strategy]):
            found = SearchState()
            for family in own:
                self._evaluate(family, math.inf, found)
            for runner_up in found.closest.values():
                self.found.include_runner_up(runner_up)
            self.behind += found.queue
            if self._try(strategy):
                return

    def _predict(self, config: Config, cutoff: float = math.inf) -> bool:
        """Predict a layout; False where it takes `cutoff` seconds or more, of which nothing else is known."""
        if config in self.seen:
            self.found.legal -= 1  # the run's own
            return True
        self.simulated += 1
        text = f"{self.found.legal:,} layouts, {self.left_text}; predicting number {self.simulated}: "
        self.report(text + layout_text(config), 1 - self.left_share)
        found, strategy = self.evaluator.predict_or_memory(config, cutoff), strategy_of(config)
        if found is None:
            return False
        self.seen.add(config)
        self.dominated.pop(config, None)
        if isinstance(found, Memory):
            self.found.unfit += 1
            self.found.include_runner_up(RunnerUp(strategy, config, found, whole=True))
            self._queue_savings(config)
            return True
        self.known.append(found)
        fits = self._fits(found)
        if fits:
            self.fitting[config] = self.evaluator.models.estimated_seconds(config)
        else:
            self._queue_savings(config)
        for fastest in (self.best,) if fits else (self.tight,):
            insort(fastest, found, key=lambda one: one.seconds)
            del fastest[self.top :]
        if fits and self.best[0] is found:
            self.improved(found)
        known = self.fastest.get(strategy, found)
        self.fastest[strategy] = min(known, found, key=lambda one: (not self._fits(one), one.seconds))
        return True

    def _fits(self, prediction: Prediction) -> bool:
        return verdict(prediction.fullest, self.evaluator.job.cluster) == "fits"


def _in_rounds(every: Sequence[Config]) -> list[list[Config]]:
    """Families of layouts, round by round."""
    rounds: dict[tuple[bool, int, int], list[Config]] = {}
    for family in every:
        rounds.setdefault(round_of(family.layout), []).append(family)
    return [rounds[this] for this in sorted(rounds)]


def without_savings(config: Config) -> Iterator[Config]:
    """The layouts that keep what this one computes twice, moves to and fro, or sends in pieces: they are faster, but
    where a stage holds as many microbatches as memory allows."""
    pipeline, memory, data = config.layout.pipeline, config.memory, config.layout.data
    if pipeline.limit_by_memory:
        return
    if memory.offload.to != "none":
        yield with_field(config, "memory.offload.to", "none")
    if memory.recompute != "none":
        yield with_field(config, "memory.recompute", "none")
    if data.strategy.slices:
        for other, sync in entries("syncs").items():
            if other == data.sync:
                return
            if sync.candidate:
                # Strategies stand in the order of what they slice. Without slices there are no groups that share them,
                # and so no axis `replicate` that an order could name.
                shard, order = data.shard if sync.slices else None, config.layout.order
                if shard is None and order != "auto":
                    order = tuple(name for name in order if name != "replicate")
                own = data.model_copy(update={"sync": other, "shard": shard})
                layout = config.layout.model_copy(update={"data": own, "order": order})
                yield config.model_copy(update={"layout": layout})
