"""Scaling as a table for a terminal, as plain values for a script, and as files: a picture, a CSV, a JSON."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

from meshwright.tools.plan.output import layout_text
from meshwright.tools.plan.predict import Prediction
from meshwright.tools.plan.scale import Curve, Gap, Point, Scaling
from meshwright.tools.report.scaling import Line, draw_scaling

WIDTH = 160
"""Columns, where no terminal says how many there are."""

Row = dict[str, object]


def rows(scaling: Scaling) -> Iterator[Row]:
    """A row a strategy and number of devices; of a gap no figures but its reason."""
    for curve in scaling.curves:
        for point, efficiency in zip(curve.points, curve.efficiencies, strict=True):
            yield {
                "strategy": curve.strategy, "devices": point.devices, "samples": point.samples,
                **_figures(point.found, point.samples_per_second, efficiency),
            }  # fmt: skip


def _figures(found: Prediction | Gap, rate: float | None, efficiency: float | None) -> Row:
    if isinstance(found, Gap):
        return {
            "layout": None, "seconds": None, "samples_per_second": None, "efficiency": None, "memory_bytes": None,
            "reason": found.reason,
        }  # fmt: skip
    return {
        "layout": layout_text(found.config), "seconds": found.seconds, "samples_per_second": rate,
        "efficiency": efficiency, "memory_bytes": found.worst_memory, "reason": None,
    }  # fmt: skip


def as_dict(scaling: Scaling) -> dict[str, object]:
    """For `--json`."""
    return {
        "cluster": scaling.cluster.name,
        "mode": scaling.mode,
        "device_memory_bytes": scaling.cluster.device.memory,
        "rows": list(rows(scaling)),
    }


def render(scaling: Scaling) -> None:
    """A table, a section a strategy."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    room = f"devices of {scaling.cluster.device.memory / 1e9:.1f} GB"
    right = [Column(name, justify="right") for name in ("devices", "samples a step", "seconds a step", "samples/s")]
    table = Table(
        "strategy", *right, Column("efficiency", justify="right"), Column("GB", justify="right"),
        Column("layout, or why there is none", overflow="fold"),
        title=f"{scaling.mode.capitalize()} scaling on {scaling.cluster.name}, predicted ({room})",
    )  # fmt: skip
    for curve in scaling.curves:
        for index, (point, efficiency) in enumerate(zip(curve.points, curve.efficiencies, strict=True)):
            table.add_row("" if index else curve.strategy, *_cells(point, efficiency))
        table.add_section()
    console.print(table)


def _cells(point: Point, efficiency: float | None) -> tuple[str, ...]:
    counts = f"{point.devices:,}", f"{point.samples:,}"
    if isinstance(point.found, Gap):
        return *counts, "-", "-", "-", "-", point.found.reason
    memory = point.found.worst_memory / 1e9
    figures = f"{point.found.seconds:.4g}", f"{point.samples_per_second:,.4g}", f"{efficiency:.1%}", f"{memory:.2f}"
    return *counts, *figures, layout_text(point.found.config)


def write(scaling: Scaling, folder: Path) -> list[Path]:
    """scaling.csv, scaling.json and, where any strategy has a layout, scaling.png. Older ones are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    table, values, picture = (folder / f"scaling.{ending}" for ending in ("csv", "json", "png"))
    made = list(rows(scaling))
    with table.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(made[0]))
        writer.writeheader()
        writer.writerows(made)
    values.write_text(json.dumps(as_dict(scaling), indent=1) + "\n", encoding="utf-8")
    lines = {curve.strategy: _line(curve) for curve in scaling.curves}
    if not any(line.devices for line in lines.values()):
        return [table, values]
    draw_scaling(lines, picture, f"{scaling.mode.capitalize()} scaling on {scaling.cluster.name}, predicted")
    return [table, values, picture]


def _line(curve: Curve) -> Line:
    there = [
        (point.devices, point.samples_per_second, efficiency)
        for point, efficiency in zip(curve.points, curve.efficiencies, strict=True)
        if point.samples_per_second is not None and efficiency is not None
    ]
    return Line(*zip(*there, strict=True)) if there else Line((), (), ())
