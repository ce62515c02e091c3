"""A picture of scaling curves in the form of papers: samples a second over devices on logarithmic axes, and efficiency.

A dashed line is ideal scaling from the strategy's first point.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.output.drawing import new_figure
from meshwright.ranks.errors import DataError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GRID = "#333333", "#e4e4e4"
_MARKS = "osD^vPX*"


@dataclass(frozen=True)
class Line:
    """A strategy's points by ascending devices: samples a second, and the efficiency relative to the first point."""

    devices: tuple[int, ...]
    rates: tuple[float, ...]
    efficiencies: tuple[float, ...]


def draw_scaling(lines: Mapping[str, Line], picture: Path, title: str) -> None:
    """Draw {strategy: line} as a PNG. The legend names strategies without points. Strategies with equal points share
    one line, with all names.

    Raises:
        DataError: No strategy has a point.
    """
    everywhere = sorted({count for line in lines.values() for count in line.devices})
    if not everywhere:
        raise DataError(f"no point to draw in {picture}")
    figure = new_figure(11.5, 4.5, dpi=150)
    from matplotlib import colormaps
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator, PercentFormatter

    speed, efficiency = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(title, x=0.01, ha="left", color=_INK, fontsize=12, fontweight="bold")
    _frame(speed, everywhere, "samples a second")
    _frame(efficiency, everywhere, "efficiency")
    speed.set_yscale("log")
    speed.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    speed.yaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:,.6g}"))
    speed.yaxis.set_minor_locator(NullLocator())
    together: dict[Line, list[str]] = {}
    for name, line in lines.items():
        # Strategies with equal layouts would hide each other: they share one line with all names.
        together.setdefault(line, []).append(name)
    for index, (line, names) in enumerate(together.items()):
        colour, mark = colormaps["tab10"](index), _MARKS[index % len(_MARKS)]
        label = " = ".join(names) if line.devices else f"{', '.join(names)} (none)"
        look = {"color": colour, "marker": mark, "linewidth": 1.8, "markersize": 6, "mec": "white"}
        speed.plot(line.devices, line.rates, label=label, **look)
        efficiency.plot(line.devices, line.efficiencies, **look)
        if line.devices:
            ideal = [line.rates[0] * count / line.devices[0] for count in line.devices]
            speed.plot(line.devices, ideal, color=colour, linewidth=0.8, linestyle=(0, (4, 3)), alpha=0.6)
    values = [value for line in lines.values() for value in line.efficiencies]
    # The axis includes 1, so a drop of a percent does not look large.
    low, high = min(values), max(1.0, *values)
    margin = max(0.01, 0.08 * (high - low))
    efficiency.set_ylim(max(0.0, low - margin), high + margin)
    efficiency.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=None))
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png")


def _frame(axes: Axes, devices: list[int], what: str) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator, ScalarFormatter

    axes.set_title(what, loc="left", color=_INK, fontsize=10)
    axes.set_xlabel("devices", color=_INK)
    axes.set_xscale("log", base=2)
    axes.set_xticks(devices)
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(colors=_INK, length=0, labelsize=8)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(_INK)
