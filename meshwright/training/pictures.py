"""Pictures of a run: losses by step, and timelines of the pipeline's stages in a step.

A loss curve is read from a metrics.jsonl. A line of the file is one step: `step` and `loss`, in some lines
`validation_loss`; other fields are not read here. A last line cut short by a kill is skipped; any other line that is
not a step is an error.

A timeline has one row a stage and one box a task; all timelines of a picture share one time axis. A box's colour is the
category (forward, backward, weight, or a phase of the step). The number in a box, if there is room, is the microbatch.
White is idle time. A traced step is also written as JSON (pipeline/trace.py): each rank sends the step's spans along
the pipe axis, at traced steps only, and rank 0 writes the first replica's spans. Times of stages on different machines
are not corrected for differences between clocks.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwright.output.drawing import new_figure
from meshwright.ranks.agreement import all_texts
from meshwright.ranks.errors import DataError
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.pipeline.span import Span, Timeline
from meshwright.strategies.pipeline.trace import write_trace
from meshwright.training.follow import read_history

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INK, _GRID, _IDLE = "#333333", "#e4e4e4", "#f4f4f4"
_TRAIN, _VALIDATION = "#2b6cb0", "#d9480f"
_SMOOTHED_FROM = 60
"""Curves of fewer points are not smoothed."""


_LATER_CHUNKS = 0.6
"""Opacity of tasks of a stage's second and later chunks."""
_TASKS = {"forward": "#4c8bd0", "backward": "#e8833a", "weight": "#58a868"}
_TITLES = {"weight": "weight gradient"}
_PHASES = ("#9c7ac7", "#c9a227", "#5f9ea0", "#b5651d", "#8a8d91")
_WIDTH_INCHES, _ROW_INCHES, _HEAD_INCHES, _DIGIT_INCHES = 13.0, 0.24, 0.42, 0.062


@dataclass(frozen=True)
class LossCurve:
    """The losses of one run, in nats per token, by step. `validation` has only the validated steps."""

    losses: dict[int, float]
    validation: dict[int, float]


def read_curve(metrics_file: Path) -> LossCurve:
    """Read a metrics.jsonl. If a resumed run wrote a step twice, the later line counts.

    Raises:
        DataError: the file is missing, damaged or without a step.
    """
    steps = read_history(metrics_file)
    if not steps:
        raise DataError(f"{metrics_file} holds no step yet")
    held_out = {line["step"]: float(line["validation_loss"]) for line in steps if "validation_loss" in line}
    return LossCurve({line["step"]: line["loss"] for line in steps}, held_out)


def draw_loss(metrics_file: Path, picture: Path) -> None:
    """Draw a run's training loss (a thin line; a thick smoothed one for long runs), validation points and last values.

    The title is the name of the run's folder.

    Raises:
        DataError: as read_curve.
        PictureError: matplotlib is not installed.
    """
    curve = read_curve(metrics_file)
    steps, losses = list(curve.losses), list(curve.losses.values())
    figure = new_figure(8, 4.5, dpi=150)
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_subplot()
    axes.set_title(
        f"Loss of {metrics_file.absolute().parent.name}", loc="left", color=_INK, fontsize=13, fontweight="bold"
    )
    axes.set_xlabel("step", color=_INK)
    axes.set_ylabel("loss [nats per token]", color=_INK)
    axes.tick_params(colors=_INK, length=0)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for name, spine in axes.spines.items():
        spine.set_visible(name == "bottom")
        spine.set_color(_INK)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    trend = smoothed(losses)
    if len(steps) >= _SMOOTHED_FROM:
        axes.plot(steps, losses, color=_TRAIN, alpha=0.28, linewidth=0.8)
    marker = "o" if len(steps) <= 20 else ""  # without a marker a single point would be invisible
    axes.plot(steps, trend, color=_TRAIN, linewidth=2, label="training", marker=marker, markersize=5)
    ends = [(steps[-1], float(trend[-1]), _TRAIN)]
    if curve.validation:
        points = list(curve.validation.items())
        axes.plot(*zip(*points, strict=True), "o-", color=_VALIDATION, lw=1, ms=6, mec="white", label="validation")
        ends.append((*points[-1], _VALIDATION))
        axes.legend(frameon=False, loc="upper right")
    _set_limits(axes, curve)
    _annotate(axes, ends)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png")


def smoothed(losses: Sequence[float]) -> np.ndarray:
    """Smooth losses: fit a line to each step's window, a fortieth of the run to either side, and return its values.

    A mean would be above a falling curve, and wrong at the run's two ends; a line is not. Values that are not finite
    (steps that overflowed) are ignored; a window without finite values gives NaN.
    """
    values = np.asarray(losses, dtype=np.float64)
    if len(values) < _SMOOTHED_FROM:
        return values
    steps, finite = np.arange(len(values)), np.isfinite(values)
    first = np.maximum(0, steps - len(values) // 40)
    after = np.minimum(len(values), steps + len(values) // 40 + 1)

    def window_sum(terms: np.ndarray) -> np.ndarray:
        sums = np.concatenate(([0.0], np.cumsum(np.where(finite, terms, 0.0))))
        return sums[after] - sums[first]

    # Least squares by running sums: a window of any length costs two look-ups.
    count = np.maximum(window_sum(np.ones_like(values)), 1e-300)
    middle, mean = window_sum(steps) / count, window_sum(values) / count
    spread = window_sum(steps**2) - count * middle**2
    slope = (window_sum(steps * values) - count * middle * mean) / np.maximum(spread, 1.0)
    return np.where(count >= 1, mean + slope * (steps - middle), np.nan)


def _set_limits(axes: Axes, curve: LossCurve) -> None:
    """Set the axes' limits: some margin, and a vertical range that a single spike does not widen."""
    first, last = min(curve.losses), max(curve.losses)
    axes.set_xlim(first - 0.01 * (last - first) - 0.5, last + 0.01 * (last - first) + 0.5)
    values = np.asarray([*curve.losses.values(), *curve.validation.values()])
    finite = values[np.isfinite(values)]
    if not len(finite):
        return
    low, high, start = float(finite.min()), float(finite.max()), curve.losses[first]
    # The first loss stays in the picture, since a reader compares later losses with it.
    usual = max(float(np.percentile(finite, 99)), start if math.isfinite(start) else low)
    high = min(high, usual + 0.5 * (usual - low)) if usual > low else high
    margin = 0.06 * (high - low) or 0.5
    axes.set_ylim(low - margin, high + margin)


def _annotate(axes: Axes, ends: Sequence[tuple[float, float, str]]) -> None:
    """Write the last values, (step, value, colour), to the right of the frame, moved so that texts do not overlap."""
    low, high = axes.get_ylim()
    gap = 0.055 * (high - low)
    previous = -math.inf
    for step, value, colour in sorted(ends, key=lambda end: end[1]):
        if not math.isfinite(value):
            continue
        height = previous = max(min(value, high), previous + gap)
        axes.annotate(
            f"{value:.3f}",
            xy=(step, value),
            xytext=(1.01, (height - low) / (high - low)),
            textcoords="axes fraction",
            color=colour,
            fontweight="bold",
            verticalalignment="center",
            annotation_clip=False,
        )


def draw_timelines(timelines: Mapping[str, Timeline], picture: Path, seconds_name: str = "seconds") -> None:
    """Draw timelines as a PNG.

    Args:
        timelines: each timeline by title.
        picture: the path of the PNG.
        seconds_name: the unit of the time axis.

    Raises:
        DataError: there is nothing to draw.
        PictureError: matplotlib is not installed.
    """
    empty = [title for title, timeline in timelines.items() if not timeline.spans]
    if empty or not timelines:
        raise DataError(f"no spans to draw in {picture}" + "".join(f"; {title} has none" for title in empty))
    end = max(end - begin for begin, end in map(_ends, timelines.values()))
    rows = [timeline.num_stages for timeline in timelines.values()]
    inches = [_HEAD_INCHES + _ROW_INCHES * count for count in rows]
    figure = new_figure(_WIDTH_INCHES, sum(inches) + 0.75, dpi=130)
    from matplotlib.patches import Patch

    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        facts = f"{timeline.total_seconds:.4g} {seconds_name}, idle {timeline.idle_share:.1%}"
        _panel(axes, f"{title}: {facts}", timeline, end)
    panels[-1].set_xlabel(seconds_name, color=_INK)
    colours = {name: colour for timeline in timelines.values() for name, colour in _colours(timeline).items()}
    handles = [Patch(color=colour, label=_TITLES.get(name, name)) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png")


def _ends(timeline: Timeline) -> tuple[float, float]:
    """Return the start of the first span and the end of the last, phases included."""
    begins, ends = zip(*((span.start_seconds, span.end_seconds) for span in timeline.spans), strict=True)
    return min(begins), max(ends)


def _colours(timeline: Timeline) -> dict[str, str]:
    """Return the colour of each category in the timeline: tasks in the order F, B, W, then phases by name."""
    there = {span.category for span in timeline.spans}
    phases = sorted(there - set(_TASKS))
    tasks = {name: colour for name, colour in _TASKS.items() if name in there}
    return tasks | {name: _PHASES[index % len(_PHASES)] for index, name in enumerate(phases)}


def _panel(axes: Axes, title: str, timeline: Timeline, end: float) -> None:
    """Draw one timeline. Phases may overlap tasks in time, and are drawn underneath, in narrower boxes."""
    from matplotlib.colors import to_rgba

    colours, (begin, _) = _colours(timeline), _ends(timeline)
    axes.set_title(title, loc="left", color=_INK, fontsize=10, fontweight="bold")
    axes.set_xlim(0, end)
    axes.set_ylim(timeline.num_stages - 0.5, -0.5)
    axes.set_yticks(range(timeline.num_stages), [f"stage {stage}" for stage in range(timeline.num_stages)], fontsize=8)
    axes.tick_params(colors=_INK, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    for stage in range(timeline.num_stages):
        axes.axhspan(stage - 0.42, stage + 0.42, color=_IDLE, zorder=0, linewidth=0)
    chunks = sorted({span.chunk for span in timeline.spans})
    for stage, (name, colour), chunk in product(range(timeline.num_stages), colours.items(), chunks):
        spans = [x for x in timeline.spans if (x.stage, x.category, x.chunk) == (stage, name, chunk)]
        boxes = [(span.start_seconds - begin, span.seconds) for span in spans]
        height, layer = (0.84, 2) if name in _TASKS else (0.5, 1)
        y_range = (stage - height / 2, height)
        shade = colour if chunk == 0 else to_rgba(colour, _LATER_CHUNKS)
        axes.broken_barh(boxes, y_range, facecolor=shade, edgecolor="white", linewidth=0.4, zorder=layer)
    digit = _DIGIT_INCHES * end / (_WIDTH_INCHES - 1.0)  # the seconds that a digit covers
    for span in timeline.spans:
        text = "" if span.microbatch is None else str(span.microbatch)
        if text and span.seconds > 1.15 * digit * len(text):  # if there is room
            middle = (span.start_seconds + span.end_seconds) / 2 - begin
            axes.text(middle, span.stage, text, ha="center", va="center", color="white", fontsize=6.5, zorder=3)


def write_step(spans: Sequence[Span], mesh: Mesh, step: int, folder: Path) -> None:
    """Gather every rank's spans of a step; rank 0 writes trace-step-N.json and trace-step-N.png."""
    texts = all_texts(json.dumps(spans), mesh.comm(PIPE))
    if mesh.rank == 0:
        timeline = Timeline(mesh.size(PIPE), tuple(Span(*fields) for text in texts for fields in json.loads(text)))
        path = folder / f"trace-step-{step}.json"
        write_trace(timeline, path)
        draw_timelines({f"step {step}": timeline}, path.with_suffix(".png"))
