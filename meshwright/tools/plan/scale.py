"""Scaling: the best layout of each strategy on more and more devices, as papers draw it.

| strategy           | data parallelism, and         | fixed                                 |
|--------------------|-------------------------------|---------------------------------------|
| data               | nothing else                  | no stages, layout.data.sync=allreduce |
| zero1              | nothing else                  | no stages, layout.data.sync=zero1     |
| each kind of kit   | that kit, of any size         | no stages                             |
| pipeline           | two stages or more            | no tensor parallelism                 |
| best               | all that the search knows     |                                       |

| mode   | on n devices, n0 being the fewest |
|--------|-----------------------------------|
| strong | the run's global batch            |
| weak   | n/n0 times the run's global batch |

In weak scaling the batch grows and the model does not. Papers that let the model grow do it each in its own way
(Megatron, arXiv 1909.08053: hidden and layers; Tesseract, arXiv 2105.14500: hidden, heads and batch): each of their
rows is a run of its own.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from meshwright.config import Config
from meshwright.config.schema import Layout
from meshwright.data.files import ShowProgress, silent
from meshwright.errors import ConfigError
from meshwright.registry import entries
from meshwright.section import field_of, with_field
from meshwright.tensor.section import TensorSection, Whole
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.estimate import Estimates
from meshwright.tools.plan.predict import Planner, Prediction
from meshwright.tools.plan.recordings import Recordings
from meshwright.tools.plan.search import Keep, layout_text, search
from meshwright.tools.report.scaling import Line, draw_scaling

MODES = ("strong", "weak")

KIND, STAGES, SYNC = "layout.tensor.kind", "layout.pipeline.size", "layout.data.sync"

_WIDTH = 160
"""Columns, where no terminal says how many there are."""


@dataclass(frozen=True)
class ScaledStrategy:
    """What it fixes of a layout; the search chooses all else, the sizes of `tensor` too. `staged`: only with stages."""

    tensor: TensorSection | None = None
    stages: int | None = None
    sync: str | None = None
    staged: bool = False

    @property
    def fixed(self) -> dict[str, object]:
        """The fields that it fixes, with their values."""
        kind = None if self.tensor is None else self.tensor.kind
        values = {KIND: kind, STAGES: self.stages, SYNC: self.sync}
        return {name: value for name, value in values.items() if value is not None}

    def keeps(self, layout: Layout) -> bool:
        return layout.pipeline.size > 1 or not self.staged

    def applied(self, config: Config) -> Config:
        """The run with the fields that the strategy fixes."""
        if self.tensor is not None and config.layout.tensor.kind != self.tensor.kind:
            config = with_field(config, "layout.tensor", self.tensor)
        for name in self.fixed.keys() - {KIND}:
            config = with_field(config, name, self.fixed[name])
        return config


def _sections() -> Iterator[TensorSection]:
    """One section of each kind that divides layers and that a planner tries."""
    for section in entries("tensor").values():
        tried = (candidate for devices in range(2, 65) for candidate in section.candidates(devices) if candidate.axes)
        if (first := next(tried, None)) is not None:
            yield first


PLAIN, *SHARDED = (name for name, sync in entries("syncs").items() if sync.candidate)

STRATEGIES = {
    "data": ScaledStrategy(Whole(), 1, PLAIN),
    **{name: ScaledStrategy(Whole(), 1, name) for name in SHARDED},
    **{section.kind: ScaledStrategy(section, 1) for section in _sections()},
    "pipeline": ScaledStrategy(Whole(), staged=True),
    "best": ScaledStrategy(),
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
class ScalingCurve:
    """A strategy's points, by rising devices."""

    strategy: str
    points: tuple[Point, ...]

    @cached_property
    def efficiencies(self) -> tuple[float | None, ...]:
        """Each point's samples a second and device, relative to those of the first one that has a layout."""
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
    curves: tuple[ScalingCurve, ...]

    @property
    def title(self) -> str:
        return f"{self.mode.capitalize()} scaling on {self.cluster.name}, predicted"


@dataclass(frozen=True)
class ScalingQuestion:
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
        fewest, samples = min(self.devices), self.run.batch.global_
        if samples * devices % fewest:
            rule = f"does not divide batch.global={samples} x {devices}: weak scaling keeps the samples a device"
            raise ConfigError.of("--devices", fewest, rule, "multiples of the fewest")
        batch = self.run.batch.model_copy(update={"global_": samples * devices // fewest})
        return self.run.model_copy(update={"batch": batch})


Find = Callable[[Config, int, Collection[str], Keep], Prediction | Gap]
"""find(config, devices, fixed, keep): the fastest layout that fits of those that are kept."""


class Search:
    """The planner's search as a Find. `report`: is told how far it is."""

    def __init__(self, cluster: Cluster, report: ShowProgress = silent) -> None:
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
            first, *others = error.problems
            if first.field != "--devices":
                return Gap(str(error))  # what the closest lacks
            return Gap("; ".join(map(str, others)) or f"{devices} devices make no layout of this kind")
        return found.predictions[0]


def scale(question: ScalingQuestion, find: Find) -> Scaling:
    """Raises ConfigError where a weak batch would be no whole number of samples."""
    runs = {devices: question.run_on(devices) for devices in sorted(question.devices)}
    curves = []
    for name in question.strategies:
        strategy = STRATEGIES[name]
        points = (
            Point(devices, run.batch.global_, _found(strategy, run, devices, question.given, find))
            for devices, run in runs.items()
        )
        curves.append(ScalingCurve(name, tuple(points)))
    return Scaling(question.run, question.cluster, question.mode, tuple(curves))


def _found(strategy: ScaledStrategy, run: Config, devices: int, given: frozenset[str], find: Find) -> Prediction | Gap:
    """The strategy's best layout, where the user has not fixed anything else."""
    for name, value in strategy.fixed.items():
        if name in given and field_of(run, name) != value:
            return Gap(f"{name}={field_of(run, name)} was asked for")
    return find(strategy.applied(run), devices, given | strategy.fixed.keys(), strategy.keeps)


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


def as_dict(scaling: Scaling) -> dict[str, object]:
    """The curves as plain values for a script: a row a strategy and number of devices, of a gap its reason alone."""
    rows: list[dict[str, object]] = []
    for curve in scaling.curves:
        for point, efficiency in zip(curve.points, curve.efficiencies, strict=True):
            found, gap = (None, point.found.reason) if isinstance(point.found, Gap) else (point.found, None)
            rows.append({
                "strategy": curve.strategy,
                "devices": point.devices,
                "samples": point.samples,
                "layout": found and layout_text(found.config),
                "seconds": found and found.seconds,
                "samples_per_second": point.samples_per_second,
                "efficiency": efficiency,
                "memory_bytes": found and found.worst_memory,
                "reason": gap,
            })  # fmt: skip
    return {
        "cluster": scaling.cluster.name,
        "mode": scaling.mode,
        "device_memory_bytes": scaling.cluster.device.memory,
        "rows": rows,
    }


def render(scaling: Scaling) -> None:
    """Print a table with a section for each strategy."""
    right = [Column(name, justify="right") for name in ("devices", "samples a step", "seconds a step", "samples/s")]
    table = Table(
        "strategy", *right, Column("efficiency", justify="right"), Column("GB", justify="right"),
        Column("layout, or why there is none", overflow="fold"),
        title=f"{scaling.title} (devices of {scaling.cluster.device.memory / 1e9:.1f} GB)",
    )  # fmt: skip
    for curve in scaling.curves:
        for index, (point, efficiency) in enumerate(zip(curve.points, curve.efficiencies, strict=True)):
            cells = ["" if index else curve.strategy, f"{point.devices:,}", f"{point.samples:,}"]
            found = point.found
            if isinstance(found, Gap):
                cells += ["-", "-", "-", "-", found.reason]
            else:
                cells += [f"{found.seconds:.4g}", f"{point.samples_per_second:,.4g}", f"{efficiency:.1%}"]
                cells += [f"{found.worst_memory / 1e9:.2f}", layout_text(found.config)]
            table.add_row(*cells)
        table.add_section()
    Console(highlight=False, width=None if sys.stdout.isatty() else _WIDTH).print(table)


def write(scaling: Scaling, folder: Path) -> list[Path]:
    """Write scaling.csv, scaling.json and, where any strategy has a layout, scaling.png. Older ones are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    table, values, picture = (folder / f"scaling.{ending}" for ending in ("csv", "json", "png"))
    tree = as_dict(scaling)
    rows = tree["rows"]
    assert isinstance(rows, list), rows
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    values.write_text(json.dumps(tree, indent=1) + "\n", encoding="utf-8")
    lines = {curve.strategy: _line(curve) for curve in scaling.curves}
    if not any(line.devices for line in lines.values()):
        return [table, values]
    draw_scaling(lines, picture, scaling.title)
    return [table, values, picture]


def _line(curve: ScalingCurve) -> Line:
    """The curve's points that have a layout."""
    there = [
        (point.devices, point.samples_per_second, efficiency)
        for point, efficiency in zip(curve.points, curve.efficiencies, strict=True)
        if point.samples_per_second is not None and efficiency is not None
    ]
    return Line(*zip(*there, strict=True)) if there else Line((), (), ())
