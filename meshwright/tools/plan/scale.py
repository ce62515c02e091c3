"""Scaling: the best layout of each strategy on more and more devices, as papers draw it.

| strategy  | data parallelism, and     | fixed                                 |
|-----------|---------------------------|---------------------------------------|
| data      | nothing else              | no stages, layout.data.sync=allreduce |
| zero1     | nothing else              | no stages, layout.data.sync=zero1     |
| megatron  | 1-D tensor parallelism    | no stages                             |
| tesseract | 2-D or 2.5-D              | no stages                             |
| subgraph  | D&SP                      | no stages                             |
| pipeline  | two stages or more        | no tensor parallelism                 |
| best      | all that the search knows |                                       |

| mode   | on n devices, n0 being the fewest |
|--------|-----------------------------------|
| strong | the run's global batch            |
| weak   | n/n0 times the run's global batch |

In weak scaling the batch grows and the model does not. Papers that let the model grow do it each in its own way
(Megatron, arXiv 1909.08053: hidden and layers; Tesseract, arXiv 2105.14500: hidden, heads and batch): each of their
rows is a run of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.data.progress import ShowProgress as Report
from meshwright.data.progress import silent
from meshwright.errors import ConfigError
from meshwright.registry import entries
from meshwright.tensor.section import TensorSection, Whole
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.estimate import Estimates
from meshwright.tools.plan.predict import Planner, Prediction
from meshwright.tools.plan.recordings import Recordings
from meshwright.tools.plan.search import Keep, search

MODES = ("strong", "weak")

KIND, STAGES, SYNC = "layout.tensor.kind", "layout.pipeline.size", "layout.data.sync"


@dataclass(frozen=True)
class Strategy:
    """What it fixes of a layout; the search chooses all else, the sizes of `tensor` too. `staged`: only with stages."""

    tensor: TensorSection | None = None
    stages: int | None = None
    sync: str | None = None
    staged: bool = False

    @property
    def fixed(self) -> dict[str, object]:
        kind = None if self.tensor is None else self.tensor.kind
        values = {KIND: kind, STAGES: self.stages, SYNC: self.sync}
        return {name: value for name, value in values.items() if value is not None}

    def keeps(self, layout: Layout) -> bool:
        return layout.pipeline.size > 1 or not self.staged

    def applied(self, config: Config) -> Config:
        """The run with the fields that the strategy fixes."""
        layout = config.layout
        pipeline, data, tensor = layout.pipeline, layout.data, layout.tensor
        if self.stages is not None:
            pipeline = pipeline.model_copy(update={"size": self.stages})
        if self.sync is not None:
            data = data.model_copy(update={"sync": self.sync})
        if self.tensor is not None and tensor.kind != self.tensor.kind:
            tensor = self.tensor
        changed = layout.model_copy(update={"pipeline": pipeline, "data": data, "tensor": tensor})
        return config.model_copy(update={"layout": changed})


def _sections() -> Iterator[TensorSection]:
    """One section of each kind that divides layers and that a planner tries."""
    for section in entries("tensor").values():
        tried = (candidate for devices in range(2, 65) for candidate in section.candidates(devices) if candidate.axes)
        if (first := next(tried, None)) is not None:
            yield first


PLAIN, *SHARDED = (name for name, sync in entries("syncs").items() if sync.candidate)

STRATEGIES = {
    "data": Strategy(Whole(), 1, PLAIN),
    **{name: Strategy(Whole(), 1, name) for name in SHARDED},
    **{section.kind: Strategy(section, 1) for section in _sections()},
    "pipeline": Strategy(Whole(), staged=True),
    "best": Strategy(),
}


@dataclass(frozen=True)
class Gap:
    """Why a strategy has no layout on so many devices."""

    reason: str


@dataclass(frozen=True)
class Point:
    """A strategy on so many devices, `samples` a step: the fastest of its layouts that fit, or why there is none."""

    devices: int
    samples: int
    found: Prediction | Gap

    @property
    def samples_per_second(self) -> float | None:
        return None if isinstance(self.found, Gap) else self.samples / self.found.seconds


@dataclass(frozen=True)
class Curve:
    """`points`: by rising devices."""

    strategy: str
    points: tuple[Point, ...]

    @cached_property
    def efficiencies(self) -> tuple[float | None, ...]:
        """Of each point the samples a second and device, in those of the first one that has a layout."""
        rates = [(point.samples_per_second, point.devices) for point in self.points]
        each = [None if rate is None else rate / devices for rate, devices in rates]
        first = next((rate for rate in each if rate is not None), 1.0)
        return tuple(None if rate is None else rate / first for rate in each)


@dataclass(frozen=True)
class Scaling:
    """A run's curves on a cluster."""

    run: Config
    cluster: Cluster
    mode: str
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Question:
    """`run`: for the fewest devices. `given`: fields that the user has fixed (space.py)."""

    run: Config
    cluster: Cluster
    devices: tuple[int, ...]
    mode: str = "strong"
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    given: frozenset[str] = field(default_factory=frozenset)

    def run_on(self, devices: int) -> Config:
        """The run as it grows. Raises ConfigError where its batch would be no whole number of samples."""
        if self.mode == "strong":
            return self.run
        fewest, batch = min(self.devices), self.run.batch
        samples, rest = divmod(batch.global_ * devices, fewest)
        if rest:
            rule = f"does not divide batch.global={batch.global_} x {devices}: weak scaling keeps the samples a device"
            raise ConfigError.of("--devices", fewest, rule, "multiples of the fewest")
        return self.run.model_copy(update={"batch": batch.model_copy(update={"global_": samples})})


Find = Callable[[Config, int, Collection[str], Keep], Prediction | Gap]
"""find(config, devices, fixed, keep): the fastest layout that fits of those that are kept."""


class Search:
    """The planner's search as a Find. `report`: is told how far it is."""

    def __init__(self, cluster: Cluster, report: Report = silent) -> None:
        self.cluster = cluster
        self.report = report
        self._recordings = Recordings()
        self._estimates: dict[int, Estimates] = {}

    def __call__(self, config: Config, devices: int, fixed: Collection[str], keep: Keep) -> Prediction | Gap:
        if devices not in self._estimates:
            self._estimates[devices] = Estimates(Planner(self.cluster, self._recordings))
        models = self._estimates[devices]

        def report(text: str, done: float | None) -> None:
            self.report(f"{devices:,} devices: {text}", done)

        try:
            found = search(config, self.cluster, devices, 1, fixed=fixed, keep=keep, models=models, report=report)
        except ConfigError as error:
            return Gap(_reason(error, devices))
        return found.predictions[0]


def _reason(error: ConfigError, devices: int) -> str:
    """Of a search that found nothing: what refused the layouts, or what the closest lacks."""
    first, *others = error.problems
    if first.field != "--devices":
        return str(error)
    return "; ".join(map(str, others)) or f"{devices} devices make no layout of this kind"


def scale(question: Question, find: Find) -> Scaling:
    """Raises ConfigError where a weak batch would be no whole number of samples."""
    runs = {devices: question.run_on(devices) for devices in sorted(question.devices)}
    curves = []
    for name in question.strategies:
        strategy = STRATEGIES[name]
        points = (
            Point(devices, run.batch.global_, _found(strategy, run, devices, question.given, find))
            for devices, run in runs.items()
        )
        curves.append(Curve(name, tuple(points)))
    return Scaling(question.run, question.cluster, question.mode, tuple(curves))


def _found(strategy: Strategy, run: Config, devices: int, given: frozenset[str], find: Find) -> Prediction | Gap:
    """What is found of a strategy where the user has not fixed anything else."""
    held: dict[str, object] = {
        KIND: run.layout.tensor.kind, STAGES: run.layout.pipeline.size, SYNC: run.layout.data.sync
    }  # fmt: skip
    for name, value in strategy.fixed.items():
        if name in given and held[name] != value:
            return Gap(f"{name}={held[name]} was asked for")
    return find(strategy.applied(run), devices, given | strategy.fixed.keys(), strategy.keeps)


def parse_devices(text: str) -> tuple[int, ...]:
    """`4,16,64` -> (4, 16, 64), sorted and each once. Raises ConfigError for what is no number of devices."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if not (word.isdecimal() and int(word) > 0):
            raise ConfigError.of("--devices", word, "is not a number of devices", "1 or more, such as 4,16,64")
    return tuple(sorted(set(map(int, words))))


def parse_strategies(text: str) -> tuple[str, ...]:
    """`data,best` -> (data, best), each once. Raises ConfigError for what is none."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in STRATEGIES:
            raise ConfigError.of("--strategies", word, "is no strategy", ", ".join(STRATEGIES))
    return tuple(dict.fromkeys(words))


def parse_mode(text: str) -> str:
    """Raises ConfigError for what is none."""
    if text not in MODES:
        raise ConfigError.of("--mode", text, "is no kind of scaling", ", ".join(MODES))
    return text
