"""The trace of a step that was run: what each stage of the first replica did, as JSON and as a picture.

Stages on different machines are shown as their clocks are set.

Each rank sends its spans along its pipe axis, at the traced steps only: one all-gather of their length, one of their
text, as long as the longest. Rank 0 keeps what it gets.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.ranks.grid import PIPE

if TYPE_CHECKING:  # the launcher reads --trace, and starts its ranks without torch
    from meshwright.pipeline.span import Span
    from meshwright.ranks.mesh import Mesh


def traced_steps(words: Sequence[str], config: Config) -> tuple[int, ...]:
    """The steps that `--trace` names. Raises ConfigError where one is no step of the run."""
    for word in words:
        if not (word.isdecimal() and 1 <= int(word) <= config.steps):
            valid = f"1 to {config.steps}; with --explain a file, such as trace.json"
            raise ConfigError.of("--trace", word, "is not a step of the run", valid)
    return tuple(sorted({int(word) for word in words}))


def planned_trace(words: Sequence[str]) -> Path | None:
    """The file that `--explain --trace` names, if any. Raises ConfigError where it is none."""
    if not words:
        return None
    if len(words) > 1 or not words[0].endswith(".json"):
        named = ", ".join(words)
        raise ConfigError.of("--trace", named, "is not one file for the trace of a plan", "trace.json")
    return Path(words[0])


def write_step(spans: Sequence[Span], mesh: Mesh, step: int, folder: Path) -> None:
    """Gather the spans that every rank has of a step; rank 0 writes trace-step-N.json and trace-step-N.png."""
    gathered = _gathered(spans, mesh)
    if mesh.rank == 0:
        from meshwright.pipeline.span import Timeline
        from meshwright.pipeline.trace import write_trace
        from meshwright.training.timeline import draw_timelines  # matplotlib: only a traced step needs it

        timeline = Timeline(mesh.size(PIPE), gathered)
        path = folder / f"trace-step-{step}.json"
        write_trace(timeline, path)
        draw_timelines({f"step {step}": timeline}, path.with_suffix(".png"))


def _gathered(spans: Sequence[Span], mesh: Mesh) -> tuple[Span, ...]:
    """The spans of all stages."""
    from meshwright.pipeline.span import Span
    from meshwright.ranks.agreement import all_texts

    texts = all_texts(json.dumps([astuple(span) for span in spans]), mesh.comm(PIPE), mesh.device)
    return tuple(Span(*fields) for row in texts for fields in json.loads(row))
