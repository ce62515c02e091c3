"""Search for the fastest layouts that fit: cheap bounds rule most layouts out, and few are predicted.

| question to a layout      | answered by                                                 | ruled out if         |
|---------------------------|-------------------------------------------------------------|----------------------|
| the work of both cuts     | recordings of layers with each cut alone (estimate.py)      | the top K are faster |
| the work of its parts     | recordings at two sizes of microbatch, scaled: once for all | the top K are faster |
|                           | schedules and limits of a size of microbatch                |                      |
| the pipeline phase under  | the same recordings, without messages between stages: once  | the top K are faster |
| its schedule and limit    | for all syncs and offloads                                  |                      |
| the memory of its weights | parameters in buckets, with gradients and states: once for  | memory is exceeded   |
|                           | a whole family (space.py)                                   |                      |
| an estimate of its memory | the same recordings (estimate.py)                           | memory is exceeded   |
| an estimate of the step,  | the same, on the links between the layout's ranks           | the top K are faster |
| in each order of axes     |                                                             |                      |
| its seconds               | recordings of the layout itself, the whole step (predict.py)| the top K are faster |
| the memory of its tensors | the same recordings, the first microbatches simulated       | memory is exceeded   |
| its memory                | allocations, replayed (process.py)                          | memory is exceeded   |

The run file's own layout is predicted first, if it is legal. If it does not fit, a layout by rule of thumb is
predicted (seeds.first_guesses). Layouts follow in rounds (evaluator.round_of): layers on a
node's ranks before layers on more; one stage before several; whole layers, then layers cut inside or along the sequence
over more and more ranks, then both cuts. After whole layers a few pipelines (seeds.py) are evaluated, so that the next
rounds begin with a low cutoff. Layouts with a tight estimate are predicted after the rounds.
Both cuts are tried only if each cut alone is fast enough. After each round layouts are predicted in the order of
estimated seconds, until K fit and ENOUGH are predicted, or VAIN in a row are not among the K fastest; after the last
round all that may be.
Layouts slower than the K fastest predictions are left out of the next round. The search ends when the next estimate is
above the K-th prediction: estimates are at most 1/SURE of predictions (estimate.py).

A layout that recomputes or offloads is evaluated if the same layout without that saving does not fit or is tight. A
layout that slices is not predicted if the same layout without slices fits and is estimated to be SYNCS_APART times as
fast. Both kinds are predicted if fewer than K other layouts fit. Attention is not recomputed if the kernel keeps
nothing.

Layouts that fit even with Device.unpredicted_share rank first; faster tight layouts are listed separately. One layout
of each strategy (evaluator.strategy_of) is predicted. A strategy does not fit if neither the fastest layouts nor the
least full layout of the strategy fit. Ctrl-C ends a search with the best layouts so far.
"""

from __future__ import annotations

import gc
import math
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import TYPE_CHECKING

from meshwright.config import Config
from meshwright.config.registry import entries
from meshwright.config.section import with_field
from meshwright.data.files import ShowProgress, silent
from meshwright.planner.plan.answer import Change, Training
from meshwright.planner.plan.cells import strategy_of
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.evaluator import (
    WHOLE,
    Evaluator,
    Keep,
    Queued,
    RunnerUp,
    SearchState,
    cuts_within,
    round_of,
)
from meshwright.planner.plan.memory import Memory, bytes_text, lacks_host, missing, verdict
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.seeds import GUESSES, first_guesses, seeds_of
from meshwright.planner.plan.software import Program
from meshwright.planner.plan.space import SearchJob, as_messages, families, own_layout
from meshwright.ranks.errors import ConfigError, Problem
from meshwright.strategies.memory.section import keeping_all

if TYPE_CHECKING:
    from meshwright.planner.foreign.job import ForeignJob

SIMULATED = 80
"""Most predictions of the last round in a row, for each round, that are not among the K fastest, once any prediction
fits: many layouts with a fitting estimate exceed memory."""

VAIN = 8
"""Most predictions in a row of a round but the last that are not among the K fastest, while fewer than K fit."""

ENOUGH = 5
"""Most predictions of a round but the last, once K layouts fit: later rounds have faster layouts, and predict the rest
if no K layouts are faster."""

DOUBTFUL = 2
"""Predictions of a round but the last that do not fit, while none is known to fit, until the round's least full layout
is predicted: if this layout does not fit either, later rounds may have layouts that do."""

SYNCS_APART = 1.05
"""Factor that covers errors between estimates of two syncs: zero3, estimated 2 % slower than zero1, was 4 % faster in
the prediction."""

AS_MESSAGES = 2
"""How many of the fastest layouts with shared experts are also predicted with rows as messages, which takes several
times as long to simulate."""

MUCH_FASTER = 0.95
"""The most that a seed's score is of the fastest prediction: predictions are mostly a few percent above scores."""

TRIES = 6
"""Layouts predicted of a strategy that is not among the fastest, until one fits; then the least full one decides. Also
the layouts with tight estimates that do not fit, in a row."""


@dataclass(frozen=True)
class Counts:
    """Numbers of layouts by result of the search."""

    legal: int
    """Evaluated. A family that cannot fit, a microbatch size too slow for a family, and a layout that fits in no order
    of its axes count once."""
    too_full: int
    """Weights, gradients and states alone do not fit."""
    unfit: int
    """Weights, gradients and states fit alone, but not with activations and all else."""
    dominated: int
    """Recompute, offload or slice although the same layout fits without."""
    too_slow: int
    """Estimated to be slower than the K fastest that fit; tight layouts: than K tight ones."""
    predicted: int


@dataclass(frozen=True)
class SearchResult:
    """The answer of a search.

    `predictions`: the fastest layouts that fit, fastest first; at least one, and only tight ones if none fits.
    `tight`: tight layouts that are faster. `runner_ups`: the best layout of each other strategy. `not_reached`,
    `left_share`: strategies, and the share of families, not evaluated when Ctrl-C `stopped` the search. `predicted`:
    all predictions within the device's memory. `illegal`: a broken rule by kind of tensor section without a legal
    layout. `nearly_fits`: (estimated seconds, layout, memory) of a layout that lacks memory and would be the fastest.
    `program`: another program, if only layouts of that program were searched. `training`: a whole training's
    tokens and price. `changes`: seconds of a step under changes of the cluster. `foreign`: the job of another program,
    if the user asked about one.
    """

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
    foreign: ForeignJob | None = None
    written: Prediction | str | None = None
    """The job's own layout, predicted, or why there is no prediction."""

    @property
    def fastest(self) -> Prediction:
        """The fastest prediction; `predictions` may begin with a simpler layout."""
        return min(self.predictions, key=lambda prediction: prediction.seconds)


def layout_text(config: Config) -> str:
    """Write a layout as `megatron, cut by sequence: data 4 (zero1), pipe 2 (1f1b), tensor 2; micro 4, recompute auto,
    offload host`. A `data` of one replica is left out."""
    memory, layout = config.memory, config.layout
    limit, tensor_words, data = layout.pipeline.limit, layout.tensor.words, layout.data
    words = [f"micro {config.micro}"]
    words += [f"limit {limit}"] * (limit != "auto")
    words += ["rows to experts as messages"] * data.in_pieces
    words += [f"recompute {memory.recompute}"] * memory.policy.recomputes
    words += [f"offload {memory.offload.to}"] * (memory.offload.to != "none")
    words += [] if memory.logits == "auto" else [f"logits {bytes_text(memory.logits)}"]
    axes = layout.summary
    if data.strategy.like:
        axes = axes.replace(f"({data.sync})", f"({data.sync}, as {data.strategy.like})")
    if layout.world_size == 1:
        axes = "one device"
    elif math.prod(size for name, size in layout.axes if name in layout.token_axes) == 1:
        axes = ", ".join(axis for axis in axes.split(", ") if not axis.startswith("data "))
    return f"{f'{tensor_words}: ' if tensor_words else ''}{axes}; {', '.join(words)}"


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
    """Search for the `top` fastest layouts of a run that fit on `devices`.

    Args:
        config: The run.
        cluster: The devices and links.
        devices: The number of devices that every layout uses.
        top: The number K of layouts to find.
        fixed: Fields that keep the run's values (space.py).
        keep: False leaves a layout out.
        models: Estimates, shared by searches on one cluster.
        report: Shows progress.
        partial: True: Ctrl-C ends the search with the best layouts so far.
        program: If given, only layouts of this program are searched.
        improved: Called with each new fastest prediction that fits.

    Raises:
        ConfigError: No layout is legal, or none fits; the error names the bytes that the closest layout lacks.
    """
    known, experts = (program.layouts, program.software.expert_ranks) if program else ({}, None)
    job = SearchJob(config, cluster, devices, frozenset(fixed), known, experts)
    evaluator = Evaluator(job, models or Estimates(Planner(cluster)), keep)
    current = _Search(evaluator, top, report, improved)
    # torch's first pass leaves reference cycles, which would count as memory: run that pass with the collector on.
    stopped = not _finishes(current.predict_own, partial)
    with _uncollected():
        stopped = stopped or not _finishes(current.run, partial)
    evaluator.models.planner.keep()
    if stopped and not current.known:
        raise KeyboardInterrupt
    if not current.found.legal:
        problems = current.found.refused.values()
        raise ConfigError([Problem("--devices", devices, "leaves the run no legal layout"), *problems])
    if not current.known:
        raise current.nothing_fits()
    return replace(current.result(stopped=stopped), program=program)


def _finishes(work: Callable[[], None], partial: bool) -> bool:
    """Run `work`; return False if Ctrl-C stopped the call. Without `partial` re-raise KeyboardInterrupt."""
    try:
        work()
    except KeyboardInterrupt:
        if not partial:
            raise
        return False
    return True


@contextmanager
def _uncollected() -> Iterator[None]:
    """Turn off Python's cyclic garbage collector, which would walk a hundred thousand layouts again and again."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            # Moves all objects to the oldest generation, which the next young collection does not walk.
            gc.freeze()
            gc.unfreeze()
            gc.enable()


class _Search:
    """A running search.

    `queue`: layouts to predict, in the order of estimated seconds; the first `passed` are done. `best`: the fastest
    predictions that fit; `guessed`: among these, by rule of thumb. `tight`: the fastest that fit, but only tightly.
    `known`: all predictions. `fastest`: one by strategy, a fitting layout before a tight one. `fitting`: estimated
    seconds of layouts that fit. `dominated`: layouts that fit, but save memory that a layout in `fitting` does not
    need to save. `behind`: layouts at or above the cutoff, and with a tight estimate. `too_full`: predicted memory of
    layouts that do not fit in any order of axes, by the layout in the usual order. `evaluated`: ids of the evaluated
    families.
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
        self.strategies: list[str] = []
        self.evaluated: set[int] = set()
        self.best: list[Prediction] = []
        self.guessed: list[Prediction] = []
        self.tight: list[Prediction] = []
        self.known: list[Prediction] = []
        self.queue: list[Queued] = []
        self.dominated: dict[Config, Queued] = {}
        self.behind: list[Queued] = []
        self.seen: set[Config] = set()
        self.full: set[Config] = set()
        self.too_full: dict[Config, Memory] = {}
        self.fitting: dict[Config, float] = {}
        self.fastest: dict[str, Prediction] = {}

    @property
    def cutoff(self) -> float:
        """Seconds of the K-th fastest prediction that fits; the answer holds no slower layout."""
        return self.best[-1].seconds if len(self.best) >= self.top else math.inf

    @property
    def left_share(self) -> float:
        """The share of families not evaluated yet."""
        return 1 - len(self.evaluated) / max(1, len(self.families))

    def predict_own(self) -> None:
        """Predict the run's own layout, then a layout by rule of thumb if the own one does not fit; list the families
        of layouts."""
        written = own_layout(self.evaluator.job)
        # Predicted regardless of the estimate, so that the user can compare.
        first = [] if written is None or written.layout.data.strategy.unplanned else [written]
        for config in chain(first, islice(first_guesses(self.evaluator.judge), GUESSES)):
            if self.evaluator.keep(config.layout):
                self.found.count(config)
                self._predict(config)
            if self.best:
                break
        self.guessed = [prediction for prediction in self.best if prediction.config != written]
        every = families(self.evaluator.job, self.found.refused)
        self.families = [family for family in every if self.evaluator.keep(family.layout)]
        self.strategies = list(dict.fromkeys(map(strategy_of, self.families)))

    def run(self) -> None:
        """Predict the fastest layouts, and one layout of each strategy."""
        rounds = _in_rounds(self.families)
        is_seeded = False
        for index, group in enumerate(rounds):
            if not is_seeded and round_of(group[0].layout) > WHOLE:
                is_seeded = True
                # If the fastest layout recomputes nothing, a pipeline saves communication alone: no seeds.
                best = next((each for each in self.best if each not in self.guessed), None)
                if best is None or best.config.memory.policy.recomputes:
                    limit = MUCH_FASTER * best.seconds if best else math.inf
                    self._gather(seeds_of(self.evaluator.judge, self.families, limit))
                    self._predict_fastest(VAIN, last=False)
            self._gather(group)
            last = index == len(rounds) - 1
            self._predict_fastest(len(rounds) * SIMULATED if last else VAIN, last=last)
        self._try_tight()
        self._try_messages()
        # If fewer than K layouts fit, layouts with unneeded savings of memory fill the answer.
        for config in [*self.fitting] if len(self.best) < self.top else ():
            found = SearchState()
            self.evaluator.evaluate_savings(config, {*self.full, *self.fitting}, found, math.inf)
            self.dominated |= {queued.config: queued for queued in found.queue if queued.config not in self.seen}
            self.found.include(found)
        for queued in sorted(self.dominated.values(), key=lambda candidate: candidate.seconds):
            if len(self.best) < self.top and not queued.tight:
                self._predict(queued.config)
        for strategy in self.strategies:
            if not self._try(strategy) and strategy in self.found.slow:
                self._try_slow(strategy)
        if self.best:
            self.evaluator.find_nearly(self.found, self.best[0].seconds)

    def result(self, *, stopped: bool) -> SearchResult:
        """Return the answer so far. Strategies that a stopped search has not predicted are `not_reached`."""
        best, found = tuple(self.best) or tuple(self.tight), self.found
        first = best[0]
        tight = tuple(prediction for prediction in self.tight if self.best and prediction.seconds < first.seconds)
        others = [strategy for strategy in self.strategies if strategy != strategy_of(first.config)]
        not_reached = tuple(strategy for strategy in others if stopped and strategy not in self.fastest)
        runner_ups = []
        for strategy in others:
            if strategy in self.fastest:
                prediction = self.fastest[strategy]
                runner_ups.append(
                    RunnerUp(strategy, prediction.config, prediction.fullest, whole=True, prediction=prediction)
                )
            elif strategy in found.closest and strategy not in not_reached:
                runner_ups.append(found.closest[strategy])
        illegal = {
            tensor_kind: problem for tensor_kind, problem in found.refused.items() if tensor_kind not in found.kinds
        }
        nearly_fits = found.nearly_fits if found.nearly_fits and found.nearly_fits[0] < first.seconds else None
        predicted = tuple(sorted(self.known, key=lambda prediction: prediction.seconds))
        # `too_slow` is the rest, so that the numbers add up to `legal`.
        out = found.too_full + found.unfit + len(self.dominated) + len(predicted)
        counts = Counts(
            found.legal, found.too_full, found.unfit, len(self.dominated), found.legal - out, len(predicted)
        )
        return SearchResult(
            self.evaluator.job, best, tight, tuple(runner_ups), not_reached, predicted, illegal, counts, stopped,
            self.left_share, nearly_fits,
        )  # fmt: skip

    def nothing_fits(self) -> ConfigError:
        """Make the error that names the layout that lacks the least memory, and the missing bytes."""
        job, closest = self.evaluator.job, min(self.found.closest.values(), key=lambda runner_up: runner_up.excess)
        device = job.cluster.device.memory_bytes
        needs = f"{closest.memory.text}; {missing(closest.memory, job.cluster)}"
        alone = "" if closest.whole else " before it computes anything"
        rule = (
            f"has {bytes_text(device)} a device, and none of {self.found.legal:,} legal layouts on {job.devices} "
            f"fits: the closest, {layout_text(closest.config)}, needs {bytes_text(closest.memory.total)}{alone} "
            f"({needs})"
        )
        elsewhere = " memory.offload.to=none or disk," * lacks_host(closest.memory, job.cluster)
        return ConfigError.of("--cluster", job.cluster.name, rule, f"more --devices,{elsewhere} or a smaller model")

    def _gather(self, group: Sequence[Config]) -> None:
        """Queue the layouts of one round whose estimates fit and are below the cutoff."""
        # Layouts that do not fit are compared with the earlier rounds' ones.
        known = self.found
        cutoff, found = self.cutoff, SearchState(closest=dict(known.closest), nearly_fits=known.nearly_fits)
        try:
            for family in group:
                if id(family) in self.evaluated:
                    continue
                self.evaluated.add(id(family))
                # Two cuts together make no layer cheaper than one of the cuts alone.
                if any(self.found.least.get(cut, 0.0) >= cutoff for cut in cuts_within(family.layout)):
                    self.found.count(family, slow=True)
                else:
                    self._evaluate(family, cutoff, found)
        finally:
            self.queue = sorted([*self.queue[self.passed :], *found.queue], key=lambda queued: queued.turn)
            self.passed = 0
            self.found.include(found)

    def _try_tight(self) -> None:
        """Predict layouts with a tight estimate that may be faster than the fastest that fits, and among the K fastest
        tight ones, until `most` in a row do not fit."""
        tight, vain = [queued for queued in self.behind if queued.tight], 0
        most = TRIES if self.best else SIMULATED
        for queued in sorted(tight, key=lambda candidate: candidate.seconds):
            ahead = [*self.best[:1], *self.tight[self.top - 1 :]]
            if vain >= most or any(queued.seconds >= prediction.seconds for prediction in ahead):
                return
            known = len(self.known)
            # Memory is predicted first, and the seconds of a layout that fits: most do not.
            self._predict(queued.config)
            vain = 0 if len(self.known) > known else vain + 1

    def _evaluate(self, family: Config, cutoff: float, found: SearchState) -> None:
        """Evaluate a family into `found`, and name the family on the progress line."""
        looked_at = f"{self.found.legal + found.legal:,} layouts, {self.left_share:.0%} of the families left"
        self.report(f"{looked_at}; now {family.layout.summary}", 1 - self.left_share)
        self.evaluator.evaluate_family(family, found, cutoff)

    def _predict_fastest(self, limit: int, *, last: bool) -> None:
        """Predict in the order of the estimates until the next estimate is slower than the K-th prediction that fits,
        or `limit` predictions in a row are not among the K fastest. `last`: no later round predicts the rest."""
        vain, best, before = 0, [*self.best], self.simulated
        while self.passed < len(self.queue):
            queued = self.queue[self.passed]
            if queued.seconds >= self.cutoff or (self.known and vain >= limit):
                return
            if not last and len(self.best) >= self.top and self.simulated - before >= ENOUGH:
                return
            if vain == DOUBTFUL and not last and not self.best:
                queued = min(self.queue[self.passed :], key=lambda candidate: candidate.memory)
                self.queue.remove(queued)
                self._predict(queued.config)
                if not self.best:
                    return
                continue
            self.passed += 1
            # A layout of a tight estimate is no answer while others fit: predicted at the end (_try_tight).
            if queued.tight:
                self.behind.append(queued)
                self._queue_savings(queued.config)
                continue
            # The queue is ordered by estimates, so a layout of the same sync in `fitting` was estimated to be as fast.
            sync, enough = queued.config.layout.data.sync, queued.seconds / SYNCS_APART
            if any(
                keeps in self.fitting and (keeps.layout.data.sync == sync or self.fitting[keeps] <= enough)
                for keeps in without_savings(queued.config)
            ):
                self.dominated[queued.config] = queued
                self.fitting[queued.config] = queued.seconds  # rules out layouts that save even more
                continue
            if not self._predict(queued.config, self.cutoff):
                self.behind.append(queued)
            vain, best = (vain + 1, best) if self.best == best else (0, [*self.best])
        # While no layout is known, each round tries the least full tight one, so that a stopped search has an answer.
        tight = [queued for queued in self.behind if queued.tight]
        if tight and not self.known:
            least_full = min(tight, key=lambda candidate: candidate.memory)
            self.behind.remove(least_full)
            self._predict(least_full.config)

    def _queue_savings(self, config: Config) -> None:
        """Queue the layouts that save more memory than `config`, which does not fit or is tight."""
        self.full.add(config)
        found = SearchState()
        self.evaluator.evaluate_savings(config, self.full, found, self.cutoff)
        for queued in found.queue:
            insort(self.queue, queued, lo=self.passed, key=lambda candidate: candidate.turn)
        self.found.include(found)

    def _try_messages(self) -> None:
        """Predict the fastest layouts with shared experts again with rows as messages, under the first limit that
        fits."""
        # Chosen by predictions: estimates do not model rows as messages. Layouts that differ only in schedule or slices
        # give one variant.
        sharing = [prediction for prediction in self.known if prediction.config.layout.data.expert > 1]
        sharing.sort(key=lambda prediction: (not self._fits(prediction), prediction.seconds))
        variants = dict.fromkeys(tuple(as_messages(prediction.config, self.evaluator.job)) for prediction in sharing)
        for limits in [*filter(None, variants)][:AS_MESSAGES]:
            for config in limits:
                self.found.count(config)
                known = len(self.known)
                if not self._predict(config, self.cutoff) or len(self.known) > known:
                    break

    def _try(self, strategy: str) -> bool:
        """Predict a strategy's layouts in the order of estimates until one fits or TRIES do not; then the least full
        one. Returns True if a layout of the strategy has a prediction."""
        # The fastest by estimate use most memory.
        for index in range(TRIES + 1):
            left = (*self.dominated.values(), *self.behind, *self.queue[self.passed :])
            waiting = [
                candidate
                for candidate in left
                if strategy_of(candidate.config) == strategy and candidate.config not in self.seen
            ]
            if strategy in self.fastest or not waiting:
                break
            if index < TRIES:
                # Layouts with a tight estimate mostly do not fit.
                self._predict(min(waiting, key=lambda candidate: (candidate.tight, candidate.turn)).config)
            else:
                self._predict(self.evaluator.least_full(min(waiting, key=lambda candidate: candidate.memory).config))
        return strategy in self.fastest

    def _try_slow(self, strategy: str) -> None:
        """Predict one layout of a strategy with all layouts above the cutoff: "why not this strategy?"."""
        # The first round with a layout that fits ends the loop.
        for group in _in_rounds([family for family in self.families if strategy_of(family) == strategy]):
            found = SearchState()
            for family in group:
                self._evaluate(family, math.inf, found)
            for runner_up in found.closest.values():
                self.found.include_runner_up(runner_up)
            self.behind += found.queue
            if self._try(strategy):
                return

    def _predict(self, config: Config, cutoff: float = math.inf) -> bool:
        """Predict a layout. Returns False if a step takes `cutoff` seconds or more; the memory is then unknown."""
        if config in self.seen:
            self.found.legal -= 1  # the run's own
            return True
        self.simulated += 1
        looked_at = f"{self.found.legal:,} layouts, {self.left_share:.0%} of the families left"
        self.report(f"{looked_at}; predicting number {self.simulated}: {layout_text(config)}", 1 - self.left_share)
        strategy, in_usual_order = strategy_of(config), with_field(config, "layout.order", "auto")
        found = self.too_full.get(in_usual_order) or self.evaluator.predict_or_memory(config, cutoff)
        if found is None:
            return False
        self.seen.add(config)
        self.dominated.pop(config, None)
        if isinstance(found, Memory):
            # Other orders of the axes hold as many tensors, and communicators of other links.
            if found.total - found.communicators > self.evaluator.job.cluster.device.memory_bytes:
                self.too_full[in_usual_order] = found
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
            insort(fastest, found, key=lambda prediction: prediction.seconds)
            del fastest[self.top :]
        if fits and self.best[0] is found:
            self.improved(found)
        known = self.fastest.get(strategy, found)
        self.fastest[strategy] = min(
            known, found, key=lambda prediction: (not self._fits(prediction), prediction.seconds)
        )
        return True

    def _fits(self, prediction: Prediction) -> bool:
        return verdict(prediction.fullest, self.evaluator.job.cluster) == "fits"


def _in_rounds(every: Sequence[Config]) -> list[list[Config]]:
    """Group families of layouts by round, in the order of rounds."""
    rounds: dict[tuple[bool, bool, int, int], list[Config]] = {}
    for family in every:
        rounds.setdefault(round_of(family.layout), []).append(family)
    return [rounds[this] for this in sorted(rounds)]


def without_savings(config: Config) -> Iterator[Config]:
    """Yield the same layout without offload, without recomputation, or with each sync that slices less. The yielded
    layouts are as fast or faster. Under a limit by memory they would admit fewer microbatches, so none is yielded."""
    pipeline, memory, data = config.layout.pipeline, config.memory, config.layout.data
    if pipeline.limit_by_memory:
        return
    if memory.offload.to != "none":
        yield with_field(config, "memory.offload.to", "none")
    if memory.policy.recomputes:
        yield keeping_all(config)
    if data.strategy.slices:
        for sync_name, sync in entries("syncs").items():
            if sync_name == data.sync:
                return
            if sync.candidate:
                # Syncs are registered from the one that slices least. Without slices there is no axis `replicate`.
                shard, order = data.shard if sync.slices else None, config.layout.order
                if shard is None and order != "auto":
                    order = tuple(name for name in order if name != "replicate")
                section = data.model_copy(update={"sync": sync_name, "shard": shard})
                layout = config.layout.model_copy(update={"data": section, "order": order})
                yield config.model_copy(update={"layout": layout})
