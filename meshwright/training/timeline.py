"""Timelines of pipelines under each other: one row a stage, one box a task, the same time axis for all.

A box's colour is its category (forward, backward, weight, or a phase of the step); the number in it, where it fits, its
microbatch. What is white is idle.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from meshwright.errors import DataError
from meshwright.pipeline.span import Span, Timeline

_INK, _GRID, _IDLE = "#333333", "#e4e4e4", "#f4f4f4"
_TASKS = {"forward": "#4c8bd0", "backward": "#e8833a", "weight": "#58a868"}
_PHASES = ("#9c7ac7", "#c9a227", "#5f9ea0", "#b5651d", "#8a8d91")
_WIDTH_INCHES, _ROW_INCHES, _HEAD_INCHES, _DIGIT_INCHES = 13.0, 0.24, 0.42, 0.062


def draw_timelines(timelines: Mapping[str, Timeline], picture: Path, seconds_name: str = "seconds") -> None:
    """Draw {title: timeline} as a PNG. `seconds_name` is what one second of the time axis stands for.

    Raises DataError where there is nothing to draw.
    """
    empty = [title for title, timeline in timelines.items() if not timeline.spans]
    if empty or not timelines:
        raise DataError(f"no spans to draw in {picture}" + "".join(f"; {title} has none" for title in empty))
    end = max(_length(timeline) for timeline in timelines.values())
    rows = [timeline.num_stages for timeline in timelines.values()]
    inches = [_HEAD_INCHES + _ROW_INCHES * count for count in rows]
    figure = Figure(figsize=(_WIDTH_INCHES, sum(inches) + 0.75), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
    for axes, (title, timeline) in zip(panels, timelines.items(), strict=True):
        _panel(
            axes, f"{title}: {timeline.total_seconds:.4g} {seconds_name}, idle {timeline.idle_share:.1%}", timeline, end
        )
    panels[-1].set_xlabel(seconds_name, color=_INK)
    colours = {name: colour for timeline in timelines.values() for name, colour in _colours(timeline).items()}
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles), frameon=False, fontsize=9)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, format="png")


def _length(timeline: Timeline) -> float:
    """From the first span to the last, phases too."""
    begin, end = _ends(timeline)
    return end - begin


def _ends(timeline: Timeline) -> tuple[float, float]:
    begins, ends = zip(*((span.start_seconds, span.end_seconds) for span in timeline.spans), strict=True)
    return min(begins), max(ends)


def _colours(timeline: Timeline) -> dict[str, str]:
    """The colour of each category that is there: tasks in the order F, B, W, then phases by name."""
    there = {span.category for span in timeline.spans}
    phases = sorted(there - set(_TASKS))
    tasks = {name: colour for name, colour in _TASKS.items() if name in there}
    return tasks | {name: _PHASES[index % len(_PHASES)] for index, name in enumerate(phases)}


def _panel(axes: Axes, title: str, timeline: Timeline, end: float) -> None:
    """One timeline. Phases lie below tasks of the same time in narrower boxes, for they may run under them."""
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
    for stage, (name, colour) in product(range(timeline.num_stages), colours.items()):
        spans = [span for span in timeline.spans if (span.stage, span.category) == (stage, name)]
        boxes = [(span.start_seconds - begin, span.seconds) for span in spans]
        height, layer = (0.84, 2) if name in _TASKS else (0.5, 1)
        place = (stage - height / 2, height)
        axes.broken_barh(boxes, place, facecolor=colour, edgecolor="white", linewidth=0.4, zorder=layer)
    digit = _DIGIT_INCHES * end / (_WIDTH_INCHES - 1.0)  # the seconds that a digit covers
    for span in timeline.spans:
        _number(axes, span, begin, digit)


def _number(axes: Axes, span: Span, begin: float, digit: float) -> None:
    """The microbatch in the middle of its box, where it fits."""
    text = "" if span.microbatch is None else str(span.microbatch)
    if text and span.seconds > 1.15 * digit * len(text):
        middle = (span.start_seconds + span.end_seconds) / 2 - begin
        axes.text(middle, span.stage, text, ha="center", va="center", color="white", fontsize=6.5, zorder=3)
