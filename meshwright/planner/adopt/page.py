"""The page of an adopted script: one HTML file that loads nothing from a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from meshwright.planner.adopt.job import Answer
from meshwright.planner.adopt.lanes import StepTime
from meshwright.planner.adopt.report import facts_line
from meshwright.planner.plan.memory import bytes_text

COLOURS = ("#8ecae6", "#ffb703", "#b7e4c7", "#f4a6a6", "#cdb4db", "#e9c46a", "#a3b18a", "#d4d4d4", "#ffd6a5", "#bde0fe")
_PHASES = {"forward": "#4895ef", "backward": "#f3722c", "recompute": "#f9c74f", "optimizer": "#43aa8b"}
WIDTH, LEFT = 1000.0, 90.0
MOST_MODULES = 400


def write_page(answer: Answer, path: Path) -> Path:
    """Write the page and return its path."""
    loader = FileSystemLoader(Path(__file__).parent)
    templates = Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=StrictUndefined)
    planned, first = answer.planned, answer.first
    parts = list(dict.fromkeys(category for sizes in planned.memory.values() for category in sizes))
    text = templates.get_template("page.html").render(
        title=f"{first.script} {' '.join(first.words)}".strip(), facts=facts_line(first),
        unseen=[*((n.where, n.text, times) for n, times in first.unseen), *(("plan", x, "") for x in planned.assumed)],
        cluster=answer.question.cluster.name, devices=answer.question.ranks,
        seconds=f"{planned.seconds:.4g}", utilisation=f"{100 * planned.utilisation:.1f}", fits=planned.fits,
        room=bytes_text(planned.device_bytes),
        memory=[
            (n, bytes_text(sizes["total"]), bar(sizes, planned.device_bytes)) for n, sizes in planned.memory.items()
        ],
        timelines=[(rank, *timeline(step)) for rank, step in planned.steps.items()],
        collectives=[
            (c.verb, " ".join(map(str, c.ranks[:16])) + (" ..." if len(c.ranks) > 16 else ""), c.phase, c.calls,
             bytes_text(c.payload_bytes), bytes_text(c.sent_bytes), ", ".join(filter(None, c.modules)))
            for c in first.collectives
        ],
        held=[
            (category, [bytes_text(sizes.get(category, 0)) for sizes in planned.memory.values()]) for category in parts
        ],
        modules=[
            (m.path or m.kind, m.kind, m.kernels, *(f"{flops / 1e9:.4g}" for flops in
             (m.forward_flops, m.backward_flops, m.recomputed_flops)), bytes_text(m.kept_bytes),
             bytes_text(m.sent_bytes))
            for m in first.modules[:MOST_MODULES]
        ],
        edits=[
            (candidate.edit.title, edit_text(candidate.planned, candidate.failure), candidate.edit.diff)
            for candidate in answer.tried
        ],
    )  # fmt: skip
    path.write_text(text, encoding="utf-8")
    return path


def edit_text(planned: Any, failure: str) -> str:
    """Return an edit's figures, or the reason for none."""
    if planned is None:
        return f"not run: {failure}"
    fullest = max(sizes["total"] for sizes in planned.memory.values())
    fits = "fits" if planned.fits else "does not fit"
    return f"{planned.seconds:.4g} s a step of {planned.samples} rows, {bytes_text(fullest)}, {fits}"


def bar(sizes: dict[str, int], room: int) -> list[tuple[str, str, float, str]]:
    """Return (part, bytes, share in percent, colour) of each part."""
    whole = max(room, sizes["total"])
    parts = [(category, size) for category, size in sizes.items() if category != "total" and size]
    return [
        (category, bytes_text(size), round(100 * size / whole, 2), COLOURS[n % len(COLOURS)])
        for n, (category, size) in enumerate(parts)
    ]


def timeline(step: StepTime) -> tuple[list[tuple[str, int, list[tuple[float, float, str, str]]]], int]:
    """Return the lanes of a rank with rectangles, and the picture's height."""
    scale = WIDTH / max(step.seconds, 1e-9)
    lanes = []
    for n, lane in enumerate(dict.fromkeys(span.lane for span in step.spans)):
        spans = [
            (round(LEFT + span.begin * scale, 2), max(0.3, round((span.end - span.begin) * scale, 2)),
             f"{span.label}: {1e3 * (span.end - span.begin):.3g} ms from {1e3 * span.begin:.4g} ms",
             _PHASES.get(span.label.split()[0], "#9d4edd" if lane == "sends" else "#adb5bd"))
            for span in step.spans if span.lane == lane
        ]  # fmt: skip
        lanes.append((lane, 24 * n, spans))
    return lanes, 24 * len(lanes) + 4
