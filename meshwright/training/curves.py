"""The loss of one run, or of several in one picture, drawn from their metrics.jsonl.

A line of the file is one step: `step` and `loss`, now and then `validation_loss`; other fields are not read here. A
last line that was cut short by a kill is left out; any other line that is no step is an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from meshwright.errors import DataError

_INK, _GRID = "#333333", "#e4e4e4"
_TRAIN, _VALIDATION = "#2b6cb0", "#d9480f"
_RUN_COLOURS = ("#2b6cb0", "#d9480f", "#2f9e44", "#9c36b5", "#e0a800", "#0c8599", "#c2255c", "#5c5f66")
_SMOOTHED_FROM = 60
"""Runs of fewer points are drawn as they are."""


@dataclass(frozen=True)
class LossCurve:
    """The losses of one run, in nats per token, by step. Validation was measured at some of the steps."""

    steps: tuple[int, ...]
    losses: tuple[float, ...]
    validation_steps: tuple[int, ...]
    validation_losses: tuple[float, ...]


def read_curve(metrics_file: Path) -> LossCurve:
    """Read a metrics.jsonl. A step that is there twice (the run was resumed) counts as written last.

    Raises DataError where the file is missing, damaged or without a step.
    """
    try:
        lines = metrics_file.read_text(encoding="utf-8").splitlines(keepends=True)
    except OSError as error:
        raise DataError(f"{metrics_file} cannot be read: {error.strerror}") from error
    losses: dict[int, float] = {}
    validation: dict[int, float] = {}
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            step, loss = int(record["step"]), float(record["loss"])
            held_out = record.get("validation_loss")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines) and not line.endswith("\n"):
                break  # the writer was killed in the middle of it
            raise DataError(f"{metrics_file}, line {number} is not a step with a loss: {line.strip()[:80]}") from error
        losses[step] = loss
        if held_out is not None:
            validation[step] = float(held_out)
    if not losses:
        raise DataError(f"{metrics_file} holds no step yet")
    steps, held_out_steps = sorted(losses), sorted(validation)
    return LossCurve(
        steps=tuple(steps),
        losses=tuple(losses[step] for step in steps),
        validation_steps=tuple(held_out_steps),
        validation_losses=tuple(validation[step] for step in held_out_steps),
    )


def draw_loss(metrics_file: Path, picture: Path) -> None:
    """Draw one run: training loss (thin as it is, thick smoothed where the run is long), validation points, last
    values.

    Raises DataError as read_curve does.
    """
    curve = read_curve(metrics_file)
    figure, axes = _canvas("Loss")
    trend = _smoothed(curve.losses)
    if len(curve.steps) >= _SMOOTHED_FROM:
        axes.plot(curve.steps, curve.losses, color=_TRAIN, alpha=0.28, linewidth=0.8)
    axes.plot(
        curve.steps, trend, color=_TRAIN, linewidth=2, label="training", marker=_marker(curve.steps), markersize=5
    )
    ends = [(curve.steps[-1], float(trend[-1]), f"{trend[-1]:.3f}", _TRAIN)]
    if curve.validation_steps:
        steps, losses = curve.validation_steps, curve.validation_losses
        axes.plot(steps, losses, "o-", color=_VALIDATION, linewidth=1, markersize=6, mec="white", label="validation")
        ends.append((steps[-1], losses[-1], f"{losses[-1]:.3f}", _VALIDATION))
        axes.legend(frameon=False, loc="upper right")
    _frame(axes, [curve])
    _annotate(axes, ends)
    _save(figure, picture)


def draw_curves(runs: Mapping[str, Path], picture: Path) -> None:
    """Draw the training losses of several runs, {label: metrics file}, over each other.

    Raises DataError as read_curve does, and where no run is given.
    """
    if not runs:
        raise DataError(f"no run to draw in {picture}")
    curves = {label: read_curve(path) for label, path in runs.items()}
    figure, axes = _canvas("Training loss")
    ends = []
    for index, (label, curve) in enumerate(curves.items()):
        colour, trend = _RUN_COLOURS[index % len(_RUN_COLOURS)], _smoothed(curve.losses)
        # Runs that agree lie exactly over each other: dashes of other lengths leave every one visible.
        dashes = "solid" if index == 0 else (0, (4, 1.5 * index))
        axes.plot(curve.steps, trend, color=colour, linewidth=1.8, linestyle=dashes, label=label)
        ends.append((curve.steps[-1], float(trend[-1]), f"{label} {trend[-1]:.3f}", colour))
    axes.legend(frameon=False, loc="upper right")
    _frame(axes, list(curves.values()))
    _annotate(axes, ends)
    _save(figure, picture)


def _canvas(title: str) -> tuple[Figure, Axes]:
    """A figure of its own: no state is shared with another drawing, nor with a notebook."""
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", color=_INK, fontsize=13, fontweight="bold")
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss [nats per token]", color=_INK)
    axes.tick_params(colors=_INK, length=0)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure, axes


def _smoothed(losses: Sequence[float]) -> np.ndarray:
    """An average over past steps, of a window that grows with the run, free of the pull towards its first value.

    Values that are not finite (an overflow's step) are passed over.
    """
    values = np.asarray(losses, dtype=np.float64)
    if len(values) < _SMOOTHED_FROM:
        return values
    keep = 1 - 1 / max(2.0, len(values) / 40)
    trend, total, weight = np.empty_like(values), 0.0, 0.0
    for index, value in enumerate(values):
        if math.isfinite(value):
            total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        trend[index] = total / weight if weight else np.nan
    return trend


def _marker(steps: Sequence[int]) -> str:
    """A line through few points shows them; one point is nothing but its mark."""
    return "o" if len(steps) <= 20 else ""


def _frame(axes: Axes, curves: Sequence[LossCurve]) -> None:
    """Leave room for the last values at the right, and let a single spike not flatten all the rest."""
    first, last = min(curve.steps[0] for curve in curves), max(curve.steps[-1] for curve in curves)
    axes.set_xlim(first - 0.01 * (last - first) - 0.5, last + 0.01 * (last - first) + 0.5)
    values = np.concatenate([np.asarray([*curve.losses, *curve.validation_losses]) for curve in curves])
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    low, high = float(finite.min()), float(finite.max())
    start = max(float(np.nanmax([*curve.losses[:1], finite.min()])) for curve in curves)
    usual = max(float(np.percentile(finite, 99)), start if math.isfinite(start) else low)
    high = min(high, usual + 0.5 * (usual - low)) if usual > low else high
    margin = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)


def _annotate(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write each curve's last value to the right of the frame; labels that would overlap are moved apart."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    previous = -math.inf
    for step, value, text, colour in sorted(ends, key=lambda end: end[1]):
        if not math.isfinite(value):
            continue
        place = max(min(value, high), previous + gap)
        previous = place
        axes.annotate(
            text,
            xy=(step, value),
            xytext=(1.01, (place - low) / (high - low)),
            textcoords="axes fraction",
            color=colour,
            fontweight="bold",
            verticalalignment="center",
            annotation_clip=False,
        )


def _save(figure: Figure, picture: Path) -> None:
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png")
