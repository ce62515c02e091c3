"""A step as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open: Chrome's trace event format, JSON.

One process a stage, named `stage 0`; in it one row for the tasks of the pipeline and one for each phase of the step,
since phases may run under tasks and under each other. Complete events (`"ph": "X"`), times in microseconds from the
first span.
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
    """Write the spans of one step. Raises MeshwrightError with the path where it cannot be written."""
    # A stage's rows, top down: tasks, then phases in the order in which they first begin.
    spans = sorted(timeline.spans, key=lambda span: span.start_seconds)
    phases = dict.fromkeys(span.category for span in spans if span.microbatch is None)
    rows = {name: row for row, name in enumerate([TASK_ROW, *phases])}
    events: list[dict[str, Any]] = []
    for stage in range(timeline.num_stages):
        events.append({"ph": "M", "name": "process_name", "pid": stage, "args": {"name": f"stage {stage}"}})
        # So that viewers keep the stages in their order.
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
    """The timeline of a file that write_trace wrote, to the microsecond's rounding.

    Raises DataError where the file cannot be read, or is no such trace.
    """
    try:
        events = parse_json(read_named(path))["traceEvents"]
        # A stage that did nothing has a name and no span, so the names are what is counted.
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
    # From zero on: a float64 of microseconds since the epoch would end at a quarter of one.
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
