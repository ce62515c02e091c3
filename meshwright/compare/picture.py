"""A comparison as a picture: its numbers in the panels of report/comparison.py."""

from __future__ import annotations

from pathlib import Path

from meshwright.compare.result import Comparison, Row, all_losses, sent_by_one
from meshwright.report.comparison import Bar, Panel, draw_comparison


def draw(made: Comparison, picture: Path) -> None:
    """The layouts that have run."""
    rows = made.measured
    panels = [
        Panel("A step", "milliseconds", {row.name: _step(row) for row in rows}),
        Panel("Memory of the fullest rank", "MB", {row.name: _memory(row) for row in rows}),
        Panel("Sent by a rank in a step", "MB", {row.name: _sent(row) for row in rows}),
    ]
    draw_comparison(panels, all_losses(rows), picture)


def _step(row: Row) -> Bar:
    low, high = row.quartiles
    predicted = 1e3 * row.predicted.seconds if row.predicted is not None else None
    return Bar(1e3 * row.seconds, predicted, 1e3 * low, 1e3 * high)


def _memory(row: Row) -> Bar:
    return Bar(row.peak_bytes / 1e6, row.predicted.peak_bytes / 1e6 if row.predicted is not None else None)


def _sent(row: Row) -> Bar:
    pair = sent_by_one(row)
    return Bar(pair.measured / 1e6, pair.predicted / 1e6 if pair.predicted is not None else None)
