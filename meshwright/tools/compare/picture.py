"""The picture of a comparison: bars of measured and predicted numbers for each layout, and the runs' losses.

a step | memory | sent        measured is filled, predicted is hatched; the line on a bar is the measured spread
losses | relative differences to the first layout's losses
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.output.drawing import new_figure
from meshwright.ranks.errors import DataError

LINE_COLOURS = ("#2b6cb0", "#d9480f", "#2f9e44", "#9c36b5", "#e0a800", "#0c8599", "#c2255c", "#5c5f66")
"""Colours of layouts, in the order of the lines."""

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _FAINT, _GRID = "#1f2933", "#6b7785", "#e6e9ed"
_BAR, _EXACT = 0.36, 1e-16


@dataclass(frozen=True)
class Bar:
    """A measured number, with the spread `low` to `high` if measured often; and the predicted number, if any."""

    measured: float
    predicted: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Panel:
    """A panel with a bar for each layout. `bars`: by the layout's name."""

    title: str
    unit: str
    bars: Mapping[str, Bar]


def draw_comparison(panels: Sequence[Panel], losses: Mapping[str, Sequence[float]], picture: Path) -> None:
    """Draw a PNG. `losses`: each layout's losses, step by step; the first layout is the reference.

    Raises DataError if there is nothing to draw.
    """
    if not panels or not losses:
        raise DataError(f"no layouts to draw in {picture}")
    names = list(losses)
    colours = {name: LINE_COLOURS[index % len(LINE_COLOURS)] for index, name in enumerate(names)}
    height = 1.5 + 0.52 * len(names)
    figure = new_figure(13, height + 4.1, dpi=130)
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    above, below = figure.subfigures(2, 1, squeeze=False, height_ratios=(height, 4.1))[:, 0]
    for axes, panel in zip(above.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True):
        _draw_bars(axes, panel, colours)
    left, right = below.subplots(1, 2)
    _plain(left, "Losses", "step", "nats")
    for index, (name, values) in enumerate(losses.items()):
        # Lines of equal losses overlap exactly: dashes of different lengths keep every line visible.
        dashes = "solid" if index == 0 else (0, (4, 1.5 * index))
        look = {"color": colours[name], "linewidth": 1.8, "linestyle": dashes, "marker": "o", "markersize": 3}
        left.plot(range(1, len(values) + 1), values, label=name, **look)
    left.legend(frameon=False, fontsize=9)
    left.grid(color=_GRID, linewidth=0.8)
    left.xaxis.set_major_locator(MaxNLocator(integer=True))
    _draw_differences(right, losses, colours)
    if any(bar.predicted is not None for panel in panels for bar in panel.bars.values()):
        kinds = [
            Patch(facecolor=_FAINT, label="measured"),
            Patch(facecolor="white", edgecolor=_FAINT, hatch="////", label="predicted"),
        ]
        above.legend(handles=kinds, loc="outside lower right", ncols=2, frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png", facecolor="white")


def _draw_bars(axes: Axes, panel: Panel, colours: Mapping[str, str]) -> None:
    """Draw a pair of bars for each layout, top to bottom in the given order, with numbers at the ends."""
    from matplotlib.ticker import MaxNLocator

    _plain(axes, panel.title, panel.unit)
    names = list(colours)
    largest = max(
        (value for bar in panel.bars.values() for value in (bar.measured, bar.high, bar.predicted) if value),
        default=1.0,
    )
    for position, name in enumerate(names):
        bar = panel.bars[name]
        # Without a prediction the single bar is centred.
        offset = 0.0 if bar.predicted is None else _BAR / 2
        axes.barh(position - offset, bar.measured, _BAR, color=colours[name], zorder=2)
        end = bar.measured
        if bar.low is not None and bar.high is not None:
            spread = [[bar.measured - bar.low], [bar.high - bar.measured]]
            axes.errorbar(bar.measured, position - offset, xerr=spread, color=_INK, linewidth=1, capsize=2.5, zorder=3)
            end = bar.high
        _write(axes, end, position - offset, f"{bar.measured:,.4g}", largest)
        if bar.predicted is not None:
            axes.barh(
                position + offset, bar.predicted, _BAR, facecolor="white", edgecolor=colours[name], hatch="////",
                linewidth=1, zorder=2,
            )  # fmt: skip
            error = f"  ({bar.predicted / bar.measured - 1:+.1%})" if bar.measured else ""
            error = "  (equal)" if bar.predicted == bar.measured else error
            _write(axes, bar.predicted, position + offset, f"{bar.predicted:,.4g}{error}", largest)
    axes.set_xlim(0, 1.42 * largest)
    axes.set_yticks(range(len(names)), names, fontsize=9.5)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="x", color=_GRID, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(5))


def _write(axes: Axes, x: float, y: float, text: str, largest: float) -> None:
    axes.text(x + 0.015 * largest, y, text, va="center", ha="left", fontsize=8.5, color=_INK, zorder=4)


def _draw_differences(axes: Axes, losses: Mapping[str, Sequence[float]], colours: Mapping[str, str]) -> None:
    """Draw relative differences on a logarithmic axis. Earlier layouts get larger markers, so that none is hidden."""
    from matplotlib.ticker import MaxNLocator

    first, *others = losses.items()
    _plain(axes, f"Losses: relative difference to {first[0]}", "step")
    for index, (name, values) in enumerate(others):
        differences = [
            abs(ours - theirs) / abs(theirs) if theirs else 0.0 for ours, theirs in zip(values, first[1], strict=True)
        ]
        steps = range(1, len(differences) + 1)
        # A logarithmic axis has no zero: equal losses are drawn at the lower edge.
        shown = [max(difference, _EXACT) for difference in differences]
        size = 4 + 2.5 * (len(others) - 1 - index)
        axes.plot(
            steps, shown, color=colours[name], linewidth=0.8, alpha=0.9, marker="o", markersize=size, mfc="white",
            label=name,
        )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylim(bottom=_EXACT / 2)
    if others:
        axes.text(0.995, 0.02, "equal", transform=axes.transAxes, ha="right", fontsize=8.5, color=_FAINT)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if not others:
        axes.text(0.5, 0.5, "one layout only", transform=axes.transAxes, ha="center", color=_FAINT)


def _plain(axes: Axes, title: str, x: str, y: str = "") -> None:
    axes.set_title(title, loc="left", color=_INK, fontsize=11, fontweight="bold")
    axes.set_xlabel(x, color=_FAINT, fontsize=9)
    axes.set_ylabel(y, color=_FAINT, fontsize=9)
    axes.tick_params(colors=_INK, length=0, labelsize=9)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "left")
        spine.set_color(_GRID)
