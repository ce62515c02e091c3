"""Scaling: the best layout of each strategy on more and more devices, as in papers' figures.

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

In weak scaling the batch grows and the model does not. Papers in which the model grows differ in the method
(Megatron, arXiv 1909.08053: hidden and layers; Tesseract, arXiv 2105.14500: hidden, heads and batch): each row of such
a table is a separate run.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.table import Column, Table

from meshwright.compute.tensor.section import TensorSection, Whole
from meshwright.config import Config
from meshwright.config.layout import Layout
from meshwright.config.registry import entries
from meshwright.config.section import field_of, with_field
from meshwright.data.files import ShowProgress, silent
from meshwright.output import terminal
from meshwright.output.tables import print_table
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.estimate import Estimates
from meshwright.planner.plan.evaluator import Keep
from meshwright.planner.plan.kept import KeptRecordings
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.scaling_picture import Line, draw_scaling
from meshwright.planner.plan.search import layout_text, search
from meshwright.ranks.errors import ConfigError

MODES = ("strong", "weak")

KIND, STAGES, SYNC = "layout.tensor.kind", "layout.pipeline.size", "layout.data.sync"

_WIDTH = 160
"""Columns of a table if the output is no terminal."""


@dataclass(frozen=True)
class ScaledStrategy:
    """The fields that a strategy fixes; the search chooses all other fields, and the sizes of `tensor`. `staged`: the
    layout has stages."""

    tensor: TensorSection | None = None
    stages: int | None = None
    sync: str | None = None
    staged: bool = False

    @property
    def fixed(self) -> dict[str, object]:
        """The fixed fields, with their values."""
        tensor_kind = None if self.tensor is None else self.tensor.kind
        values = {KIND: tensor_kind, STAGES: self.stages, SYNC: self.sync}
        return {name: value for name, value in values.items() if value is not None}

    def keeps(self, layout: Layout) -> bool:
        return layout.pipeline.size > 1 or not self.staged

    def applied(self, config: Config) -> Config:
        """Return the run with the strategy's fields."""
        if self.tensor is not None and config.layout.tensor.kind != self.tensor.kind:
            config = with_field(config, "layout.tensor", self.tensor)
        for name in self.fixed.keys() - {KIND}:
            config = with_field(config, name, self.fixed[name])
        return config


def _sections() -> Iterator[TensorSection]:
    """Yield one section of each kind of kit that divides layers and is a candidate of the planner."""
    for section in entries("tensor").values():
        # A kind is represented by its smallest size on 2 to 64 devices.
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
class Point:
    """A strategy on a number of devices."""

    strategy: str
    devices: int
    samples: int
    """Samples a step."""
    best: Prediction | str
    """The fastest layout that fits, or the reason why there is none."""
    efficiency: float | None = None
    """Samples a second a device, relative to the strategy's first point with a layout."""

    @property
    def samples_per_second(self) -> float | None:
        return None if isinstance(self.best, str) else self.samples / self.best.seconds


@dataclass(frozen=True)
class Scaling:
    """A run's curves on a cluster: the points of each strategy, by ascending devices."""

    cluster: Cluster
    mode: str
    curves: tuple[tuple[Point, ...], ...]

    @property
    def title(self) -> str:
        return f"{self.mode.capitalize()} scaling on {self.cluster.name}, predicted"


@dataclass(frozen=True)
class ScalingQuestion:
    """A run to scale. `run`: for the fewest devices; `given`: fields set by the user (space.py)."""

    run: Config
    cluster: Cluster
    devices: tuple[int, ...]
    mode: str = "strong"
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    given: frozenset[str] = field(default_factory=frozenset)

    def run_on(self, devices: int) -> Config:
        """Return the run for a number of devices. Raises ConfigError if its batch is no whole number of samples."""
        if self.mode == "strong":
            return self.run
        fewest, samples = min(self.devices), self.run.batch.global_
        if samples * devices % fewest:
            rule = f"does not divide batch.global={samples} x {devices}: weak scaling keeps the samples a device"
            raise ConfigError.of("--devices", fewest, rule, "multiples of the fewest")
        batch = self.run.batch.model_copy(update={"global_": samples * devices // fewest})
        return self.run.model_copy(update={"batch": batch})


Find = Callable[[Config, int, Collection[str], Keep], Prediction | str]
"""find(config, devices, fixed, keep): the fastest layout that fits and passes `keep`, or the reason why there is none.
"""


def searching(cluster: Cluster, report: ShowProgress = silent) -> Find:
    """Return the planner's search as a Find. `report` is called with the progress."""
    models = Estimates(Planner(cluster, kept=KeptRecordings.here()))  # shared by all strategies and numbers of devices

    def find(config: Config, devices: int, fixed: Collection[str], keep: Keep) -> Prediction | str:
        try:
            result = search(
                config, cluster, devices, 1, fixed=fixed, keep=keep, models=models,
                report=lambda text, done: report(f"{devices:,} devices: {text}", done),
            )  # fmt: skip
        except ConfigError as error:
            first, *others = error.problems
            if first.field != "--devices":
                return str(error)  # says why the closest layout fails
            return "; ".join(map(str, others)) or f"{devices} devices make no layout of this kind"
        return result.predictions[0]

    return find


def scale(question: ScalingQuestion, find: Find) -> Scaling:
    """Find the best layout of each strategy for each number of devices. Raises ConfigError if a weak batch is no whole
    number of samples."""
    runs = {devices: question.run_on(devices) for devices in sorted(question.devices)}
    curves = []
    for name in question.strategies:
        points: list[Point] = []
        first: float | None = None
        for devices, run in runs.items():
            strategy = STRATEGIES[name]
            # If the user has set a field to another value than the strategy's, there is no search.
            asked = [
                f"{field_name}={field_of(run, field_name)} was asked for"
                for field_name, value in strategy.fixed.items()
                if field_name in question.given and field_of(run, field_name) != value
            ]
            fixed = question.given | strategy.fixed.keys()
            best = asked[0] if asked else find(strategy.applied(run), devices, fixed, strategy.keeps)
            point = Point(name, devices, run.batch.global_, best)
            if (rate := point.samples_per_second) is not None:
                # Efficiency is relative to the strategy's own first point, as in the papers' figures.
                first = rate / devices if first is None else first
                point = replace(point, efficiency=rate / devices / first)
            points.append(point)
        curves.append(tuple(points))
    return Scaling(question.cluster, question.mode, tuple(curves))


def parse_strategies(text: str) -> tuple[str, ...]:
    """Parse `data,best` to (data, best), each once. Raises ConfigError for an unknown strategy."""
    words = [word.strip() for word in text.split(",")]
    for word in words:
        if word not in STRATEGIES:
            raise ConfigError.of("--strategies", word, "is no strategy", ", ".join(STRATEGIES))
    return tuple(dict.fromkeys(words))


def parse_mode(text: str) -> str:
    """Check a kind of scaling. Raises ConfigError for an unknown kind."""
    if text not in MODES:
        raise ConfigError.of("--mode", text, "is no kind of scaling", ", ".join(MODES))
    return text


def _row(point: Point) -> dict[str, object]:
    best, reason = (None, point.best) if isinstance(point.best, str) else (point.best, None)
    return {
        "strategy": point.strategy,
        "devices": point.devices,
        "samples": point.samples,
        "layout": best and layout_text(best.config),
        "seconds": best and best.seconds,
        "samples_per_second": point.samples_per_second,
        "efficiency": point.efficiency,
        "memory_bytes": best and best.worst_memory,
        "reason": reason,
    }


def as_dict(scaling: Scaling) -> dict[str, object]:
    """Return the curves as plain values for a script: a row for each strategy and number of devices."""
    return {
        "cluster": scaling.cluster.name,
        "mode": scaling.mode,
        "device_memory_bytes": scaling.cluster.device.memory_bytes,
        "rows": [_row(point) for curve in scaling.curves for point in curve],
    }


def render(scaling: Scaling) -> None:
    """Print a table with a section for each strategy."""
    right = [Column(name, justify="right") for name in ("devices", "samples a step", "seconds a step", "samples/s")]
    table = Table(
        "strategy", *right, Column("efficiency", justify="right"), Column("GB", justify="right"),
        Column("layout, or why there is none", overflow="fold"),
        title=f"{scaling.title} (devices of {scaling.cluster.device.memory_bytes / 1e9:.1f} GB)",
    )  # fmt: skip
    for curve in scaling.curves:
        for index, point in enumerate(curve):
            best = point.best
            if isinstance(best, str):
                cells = ["-", "-", "-", "-", best]
            else:
                cells = [f"{best.seconds:.4g}", f"{point.samples_per_second:,.4g}", f"{point.efficiency:.1%}"]
                cells += [f"{best.worst_memory / 1e9:.2f}", layout_text(best.config)]
            table.add_row("" if index else point.strategy, f"{point.devices:,}", f"{point.samples:,}", *cells)
        table.add_section()
    print_table(terminal.console(width=None if sys.stdout.isatty() else _WIDTH), table)


def write(scaling: Scaling, folder: Path) -> list[Path]:
    """Write scaling.csv, scaling.json and, if any strategy has a layout, scaling.png. Older files are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    table, values, picture = (folder / f"scaling.{ending}" for ending in ("csv", "json", "png"))
    rows = [_row(point) for curve in scaling.curves for point in curve]
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    values.write_text(json.dumps(as_dict(scaling), indent=1) + "\n", encoding="utf-8")
    lines = {}
    for curve in scaling.curves:  # points without a layout are not drawn
        figures = ((point.devices, point.samples_per_second, point.efficiency) for point in curve)
        present = [
            (devices, rate, efficiency)
            for devices, rate, efficiency in figures
            if rate is not None and efficiency is not None
        ]
        lines[curve[0].strategy] = Line(*zip(*present, strict=True)) if present else Line((), (), ())
    if not any(line.devices for line in lines.values()):
        return [table, values]
    draw_scaling(lines, picture, scaling.title)
    return [table, values, picture]
