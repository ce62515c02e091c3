"""A step as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing: Chrome's trace event format, JSON.

Each stage is one process, named `stage 0`, with one row for tasks and one for each phase of the step. Phases may
overlap tasks and each other. Complete events (`"ph": "X"`), times in microseconds from the first span.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from meshwright.ranks.errors import DataError, MeshwrightError
from meshwright.ranks.foreign import parse_json, read_named
from meshwright.strategies.pipeline.span import Span, Timeline

TASK_ROW = "tasks"


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write the spans of one step. Raises MeshwrightError with the path if writing fails."""
    # A stage's rows, from the top: tasks, then phases in the order of their first spans.
    spans = sorted(timeline.spans, key=lambda span: span.start_seconds)
    phases = dict.fromkeys(span.category for span in spans if span.microbatch is None)
    rows = {name: row for row, name in enumerate([TASK_ROW, *phases])}
    events: list[dict[str, Any]] = []
    for stage in range(timeline.num_stages):
        events.append({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}})
        # Viewers sort processes by this index.
        events.append({"ph": "M", "name": "process_sort_index", "pid": stage, "args": {"sort_index": stage}})
        for name, row in rows.items():
            events.append({"ph": "M", "name": "thread_name", "pid": stage, "tid": row, "args": {"name": name}})
    events += _events(timeline, rows)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n")
    except OSError as error:
        raise MeshwrightError(f"the trace {path} cannot be written: {error.strerror}") from error


def read_trace(path: Path) -> Timeline:
    """Return the timeline of a file written by `write_trace`, rounded to microseconds.

    Raises DataError if the file cannot be read or is no such trace.
    """
    try:
        events = parse_json(read_named(path))["traceEvents"]
        # Names are counted, since a stage without any span still has a name.
        num_stages = sum(event["name"] == "process_name" for event in events)
        spans = tuple(
            Span(
                event["pid"], event["name"], event["cat"], event["ts"] / 1e6, event["ts"] / 1e6 + event["dur"] / 1e6,
                event["args"]["microbatch"], event["args"].get("chunk", 0),
            )
            for event in events if event["ph"] == "X"
        )  # fmt: skip
    except OSError as error:
        raise DataError(f"the trace {path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is no trace of a step: {type(error).__name__} {error}") from error
    if any(not 0 <= span.stage < num_stages for span in spans):
        raise DataError(f"{path} is no trace of a step: it names {num_stages} stages, and has spans of others")
    return Timeline(num_stages, spans)


def _events(timeline: Timeline, rows: Mapping[str, int]) -> list[dict[str, Any]]:
    # Relative to the first span: in float64, microseconds since the epoch are rounded to 0.25.
    begin = min((span.start_seconds for span in timeline.spans), default=0.0)
    return [
        {
            "ph": "X",
            "name": span.name,
            "cat": span.category,
            "pid": span.stage,
            "tid": rows[span.category if span.microbatch is None else TASK_ROW],
            "ts": (span.start_seconds - begin) * 1e6,
            "dur": span.seconds * 1e6,
            "args": {"microbatch": span.microbatch, "chunk": span.chunk},
        }
        for span in timeline.spans
    ]
