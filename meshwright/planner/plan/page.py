"""A search as one HTML file (page.html, a Jinja2 template) without other files. Its one script copies the answer's
words.

The page begins with the question and the answer. One picture has memory against time for all predicted layouts. Two bar
charts have the parts of a step's seconds and of the fullest rank's memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from meshwright.config import dump_config
from meshwright.planner.plan.answer import duration_text, seconds_text
from meshwright.planner.plan.memory import bytes_text, verdict
from meshwright.planner.plan.predict import Prediction
from meshwright.planner.plan.report import (
    NOT_LOOKED_AT,
    STOPPED,
    figures_of,
    looked_at,
    plan_sentences,
    strategy_text,
    why,
    words_to_paste,
)
from meshwright.planner.plan.search import SearchResult, layout_text
from meshwright.ranks.errors import ConfigError
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PASSES

_TASKS, _IDLE, _SUMS = "forward and backward", "idle in the pipeline", "waits for gradients' sums"
_PHASES = {_TASKS: "#4c8bd0", _IDLE: "#dfe5ec", _SUMS: "#e8833a", OPTIMIZER: "#58a868"}
_PARTS = {
    "weights": "#2b6cb0", "gradients": "#e8833a", "states": "#58a868", "activations": "#9c7ac7",
    "temporaries": "#c9a227", "context": "#8a8d91", "cached": "#b8bcc2", "communicators": "#4f7f86",
}  # fmt: skip


WORDS = {
    "layout": "how a training lies over its devices: replicas (data), stages (pipe), cut layers (tensor, branch, row, "
    "col), cut sequences (context)",
    "micro": "samples of a replica that go through the model together",
    "zero1, zero2, zero3": "replicas hold slices of the optimizer's states; of gradients too; of weights too, as FSDP",
    "recompute": "activations that are not kept, and computed again backward: attention's (selective), or those of as "
    "many layers at a time as take the least memory (auto); with offload the layers' inputs are in host memory",
    "offload": "the optimizer's states in the host's memory",
    "of peak": "the model's floating-point operations in those that the devices could do at most (MFU)",
    "fits, tight": "tight is what would not fit if a process held as much more than is predicted as was measured",
    "temporaries": "the most that a task needs beside what is kept: a recomputed group of layers, gathered weights",
    "cached": "what the allocator holds beyond tensors",
}
"""The page's words, with explanations."""


@dataclass(frozen=True)
class StackedBar:
    """A layout's numbers in parts. `widths`: percent of the picture; `told`: the parts in words."""

    name: str
    widths: Mapping[str, float]
    told: Mapping[str, str]
    total: str
    note: str


@dataclass(frozen=True)
class StackedBars:
    """Bars under one title. `edge`: the end of a device's memory, in percent of the picture."""

    title: str
    colours: Mapping[str, str]
    bars: tuple[StackedBar, ...]
    edge: float | None = None


@dataclass(frozen=True)
class Dot:
    """A predicted layout in the picture of memory against time: its position in pixels, its verdict, its words."""

    x: float
    y: float
    fullness: str
    told: str


@dataclass(frozen=True)
class Scatter:
    """Memory against time. `across`, `up`: positions and words of the axes; `edge`: the height of a device's memory."""

    dots: tuple[Dot, ...]
    across: tuple[tuple[float, str], ...]
    up: tuple[tuple[float, str], ...]
    edge: float
    width: int = 1000
    height: int = 360


def write_plan_page(result: SearchResult, path: Path, name: str = "") -> None:
    """Write the page. `name`: the run or its model, for the title. Raises ConfigError if the file cannot be written."""
    # Values are escaped, since names of runs and clusters are the user's.
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    best, job, run = result.predictions[0], result.job, result.job.run
    model = run.model
    losers = [
        (strategy_text(runner_up.strategy), layout_text(runner_up.config), why(runner_up, best))
        for runner_up in result.runner_ups
    ]
    shown = (*result.predictions, *result.tight)
    page = templates.get_template("page.html").render(
        title=f"{name}: " * bool(name) + f"layouts for {job.devices:,} devices of {job.cluster.name}",
        cluster=job.cluster,
        about={
            "model": f"{model.family}, {model.num_blocks} layers of hidden {model.hidden:,}",
            "sequence": f"{run.data.lengths.source:,} tokens" if run.data.lengths.source else "none",
            "batch": f"{run.batch.global_:,} samples a step",
            "precision": f"{run.precision.level} {run.precision.dtype}",
            "devices": f"{job.devices:,} of {job.cluster.name}",
            "planned": date.today().isoformat(),
        },
        stopped=STOPPED if result.stopped else "",
        said=[line for line in plan_sentences(result) if line != STOPPED],
        rows=[_row(prediction, result) for prediction in shown],
        charts=(_seconds(shown), _memory(shown)),
        scatter=_scatter(result),
        losers=[*losers, *((strategy_text(strategy), "", NOT_LOOKED_AT) for strategy in result.not_reached)],
        paste=words_to_paste(best.config, run),
        run=dump_config(best.config),
        looked_at=looked_at(result),
        words=WORDS,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError.of("--page", path, f"cannot be written ({error.strerror})", "a path that can") from error


def _row(prediction: Prediction, result: SearchResult) -> tuple[str, ...]:
    """Return the cells of a layout: step, tokens a second, MFU, memory, days and dollars."""
    figures, training = figures_of(prediction), result.training
    seconds, dollars = training.seconds(prediction), training.dollars(prediction)
    return (
        layout_text(prediction.config), seconds_text(prediction.seconds), f"{figures['tokens_per_second']:,.0f}",
        f"{figures['peak_share']:.1%}", bytes_text(prediction.worst_memory), figures["verdict"],
        "" if seconds is None else duration_text(seconds), "" if dollars is None else f"${dollars:,.0f}",
    )  # fmt: skip


def _scatter(result: SearchResult) -> Scatter:
    """Place all predicted layouts: seconds from left to right, memory from bottom to top."""
    device, width, height = result.job.cluster.device.memory_bytes, Scatter.width, Scatter.height
    slowest = max(prediction.seconds for prediction in result.predicted)
    fastest = min(prediction.seconds for prediction in result.predicted)
    # The axis has at least a twentieth of the slowest, so nearly equal layouts do not look far apart.
    span, room = max(slowest - fastest, 0.05 * slowest), device * 1.05

    def point(seconds: float, size: float) -> tuple[float, float]:
        return 80 + (width - 120) * (seconds - fastest) / span, 15 + (height - 55) * (1 - size / room)

    dots = []
    for prediction in result.predicted:
        x, y = point(prediction.seconds, prediction.worst_memory)
        figures = f"{seconds_text(prediction.seconds)}, {bytes_text(prediction.worst_memory)}"
        told = f"{layout_text(prediction.config)}: {figures}"
        dots.append(Dot(x, y, verdict(prediction.fullest, prediction.cluster), told))
    across = [fastest + share * span for share in (0, 0.25, 0.5, 0.75, 1)]
    up = [share * device for share in (0, 0.25, 0.5, 0.75, 1)]
    return Scatter(
        tuple(dots),
        tuple((point(seconds, 0)[0], seconds_text(seconds)) for seconds in across),
        tuple((point(fastest, size)[1], bytes_text(size)) for size in up),
        point(fastest, device)[1],
    )


def _seconds(predictions: tuple[Prediction, ...]) -> StackedBars:
    most, bars = max(prediction.seconds for prediction in predictions), []
    for prediction in predictions:
        idle = prediction.idle_share * prediction.phases[PASSES]
        parts = {_TASKS: prediction.phases[PASSES] - idle, _IDLE: idle}
        parts |= {_SUMS: prediction.phases[DATA_PARALLEL], OPTIMIZER: prediction.phases[OPTIMIZER]}
        bars.append(_bar(prediction, parts, most, {name: seconds_text(seconds) for name, seconds in parts.items()}))
    return StackedBars("A step's seconds, by part", _PHASES, tuple(bars))


def _memory(predictions: tuple[Prediction, ...]) -> StackedBars:
    device = predictions[0].cluster.device.memory_bytes
    bars = []
    for prediction in predictions:
        parts = prediction.fullest.parts
        told = {name: bytes_text(size) for name, size in parts.items()}
        total, fullness = bytes_text(prediction.worst_memory), verdict(prediction.fullest, prediction.cluster)
        # The device's edge is inside the picture, so a tight bar visibly ends before the edge.
        bars.append(_bar(prediction, parts, device / 0.97, told, total, fullness))
    return StackedBars("The fullest device's memory, by part", _PARTS, tuple(bars), 97.0)


def _bar(
    prediction: Prediction,
    parts: Mapping[str, float],
    whole: float,
    told: Mapping[str, str],
    total: str = "",
    note: str = "",
) -> StackedBar:
    widths = {name: 100 * size / whole for name, size in parts.items() if size}
    return StackedBar(layout_text(prediction.config), widths, told, total or seconds_text(prediction.seconds), note)
