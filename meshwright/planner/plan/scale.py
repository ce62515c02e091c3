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
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.planner.plan.scaling_picture import Line, draw_scaling
from meshwright.planner.plan.search import layout_text, search
from meshwright.ranks.errors import ConfigError

MODES = ("strong", "weak")

KIND, STAGES, SYNC = "layout.tensor.kind", "layout.pipeline.size", "layout.data.sync"

_WIDTH = 160
"""Columns, where no terminal says how many there are."""


@dataclass(frozen=True)
class ScaledStrategy:
    """A strategy fixes these of a layout; the search chooses all else, the sizes of `tensor` too. `staged`: it has
    stages."""

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
        # The smallest size that a kit has on any of 2 to 64 devices stands for its kind.
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
    """A strategy on so many devices, `samples` a step. `best`: the fastest of its layouts that fit, or the reason why
    there is none. `efficiency`: its samples a second and device, relative to those of its first point with a layout."""

    strategy: str
    devices: int
    samples: int
    best: Prediction | str
    efficiency: float | None = None

    @property
    def samples_per_second(self) -> float | None:
        return None if isinstance(self.best, str) else self.samples / self.best.seconds


@dataclass(frozen=True)
class Scaling:
    """A run's curves on a cluster: the points of each strategy, by rising devices."""

    cluster: Cluster
    mode: str
    curves: tuple[tuple[Point, ...], ...]

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


Find = Callable[[Config, int, Collection[str], Keep], Prediction | str]
"""find(config, devices, fixed, keep): the fastest layout that fits of those that are kept, or why there is none."""


def searching(cluster: Cluster, report: ShowProgress = silent) -> Find:
    """The planner's search as a Find. `report` is told how far it is."""
    models = Estimates(Planner(cluster))  # serve every strategy on every number of devices

    def find(config: Config, devices: int, fixed: Collection[str], keep: Keep) -> Prediction | str:
        try:
            result = search(
                config, cluster, devices, 1, fixed=fixed, keep=keep, models=models,
                report=lambda text, done: report(f"{devices:,} devices: {text}", done),
            )  # fmt: skip
        except ConfigError as error:
            first, *others = error.problems
            if first.field != "--devices":
                return str(error)  # says what the closest layout lacks
            return "; ".join(map(str, others)) or f"{devices} devices make no layout of this kind"
        return result.predictions[0]

    return find


def scale(question: ScalingQuestion, find: Find) -> Scaling:
    """Raises ConfigError where a weak batch would be no whole number of samples."""
    runs = {devices: question.run_on(devices) for devices in sorted(question.devices)}
    curves = []
    for name in question.strategies:
        points: list[Point] = []
        first: float | None = None
        for devices, run in runs.items():
            strategy = STRATEGIES[name]
            # A field that the user has set to another value than the strategy's is an answer: no search is needed.
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
    """The curves as plain values for a script: a row a strategy and number of devices."""
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
    """Write scaling.csv, scaling.json and, where any strategy has a layout, scaling.png. Older ones are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    table, values, picture = (folder / f"scaling.{ending}" for ending in ("csv", "json", "png"))
    rows = [_row(point) for curve in scaling.curves for point in curve]
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    values.write_text(json.dumps(as_dict(scaling), indent=1) + "\n", encoding="utf-8")
    lines = {}
    for curve in scaling.curves:  # points without a layout have no place in a picture
        figures = ((point.devices, point.samples_per_second, point.efficiency) for point in curve)
        present = [(devices, rate, part) for devices, rate, part in figures if rate is not None and part is not None]
        lines[curve[0].strategy] = Line(*zip(*present, strict=True)) if present else Line((), (), ())
    if not any(line.devices for line in lines.values()):
        return [table, values]
    draw_scaling(lines, picture, scaling.title)
    return [table, values, picture]
