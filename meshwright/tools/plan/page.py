"""A search as a page for people: one HTML file (page.html, a Jinja2 template) that needs nothing else, no script.

It begins with the answer; the pictures are bars of what a step's seconds and the fullest rank's memory are made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from meshwright.config import dump_config
from meshwright.errors import ConfigError
from meshwright.tools.plan.answer import seconds_text, verdict
from meshwright.tools.plan.predict import Prediction
from meshwright.tools.plan.report import looked_at, plan_sentences, why
from meshwright.tools.plan.search import SearchResult, layout_text
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PIPELINE

_TASKS, _IDLE, _SUMS = "forward and backward", "idle in the pipeline", "waits for gradients' sums"
_PHASES = {_TASKS: "#4c8bd0", _IDLE: "#dfe5ec", _SUMS: "#e8833a", OPTIMIZER: "#58a868"}
_PARTS = {
    "weights": "#2b6cb0", "gradients": "#e8833a", "states": "#58a868", "activations": "#9c7ac7",
    "temporaries": "#c9a227", "context": "#8a8d91", "cached": "#b8bcc2", "communicators": "#4f7f86",
}  # fmt: skip


@dataclass(frozen=True)
class StackedBar:
    """A layout's numbers in parts. `widths`: of the picture, in percent; `told`: the parts in words."""

    name: str
    widths: Mapping[str, float]
    told: Mapping[str, str]
    total: str
    note: str


@dataclass(frozen=True)
class StackedBars:
    """Bars under one title. `edge`: where a device's memory ends, in percent of the picture."""

    title: str
    colours: Mapping[str, str]
    bars: tuple[StackedBar, ...]
    edge: float | None = None


def write_plan_page(result: SearchResult, path: Path) -> None:
    """Raises ConfigError where it cannot be written."""
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    best, job = result.predictions[0], result.job
    page = templates.get_template("page.html").render(
        cluster=job.cluster,
        devices=job.devices,
        said=plan_sentences(result),
        charts=(_seconds(result.predictions), _memory(result.predictions)),
        losers=[(loser.strategy, layout_text(loser.config), why(loser, best)) for loser in result.losers],
        run=dump_config(best.config),
        looked_at=looked_at(result),
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError.of("--page", path, f"cannot be written ({error.strerror})", "a path that can") from error


def _seconds(predictions: tuple[Prediction, ...]) -> StackedBars:
    most, bars = max(one.seconds for one in predictions), []
    for one in predictions:
        idle = one.idle_share * one.phases[PIPELINE]
        parts = {_TASKS: one.phases[PIPELINE] - idle, _IDLE: idle}
        parts |= {_SUMS: one.phases[DATA_PARALLEL], OPTIMIZER: one.phases[OPTIMIZER]}
        bars.append(_bar(one, parts, most, {name: seconds_text(part) for name, part in parts.items()}))
    return StackedBars("A step's seconds, by part", _PHASES, tuple(bars))


def _memory(predictions: tuple[Prediction, ...]) -> StackedBars:
    device = predictions[0].cluster.device.memory
    bars = []
    for one in predictions:
        parts = one.fullest.parts
        told = {name: f"{size / 1e9:.2f} GB" for name, size in parts.items()}
        total, fullness = f"{one.worst_memory / 1e9:.2f} GB", verdict(one.fullest, one.cluster)
        bars.append(_bar(one, parts, device / 0.97, told, total, fullness))
    return StackedBars("The fullest device's memory, by part", _PARTS, tuple(bars), 97.0)


def _bar(
    one: Prediction, parts: Mapping[str, float], whole: float, told: Mapping[str, str], total: str = "", note: str = ""
) -> StackedBar:
    widths = {name: 100 * part / whole for name, part in parts.items() if part}
    return StackedBar(layout_text(one.config), widths, told, total or seconds_text(one.seconds), note)
