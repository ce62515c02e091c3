"""Traces: valid JSON with every span, equal from both clocks, and read back."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from meshwright.ranks.errors import DataError, MeshwrightError
from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.schedule import MESSAGE_DRIVEN
from meshwright.strategies.pipeline.span import Span, Timeline, task_span
from meshwright.strategies.pipeline.task import Task, TaskKind
from meshwright.strategies.pipeline.trace import read_trace, write_trace


def step() -> Timeline:
    """Return three stages of a pipeline, and then two phases that overlap."""
    timeline = simulate(3, 4, MESSAGE_DRIVEN, lambda stage, task: 1.0 + stage / 8, lambda a, b, message: 0.25)
    end = timeline.total_seconds
    phases = [
        span
        for stage in range(3)
        for span in (
            Span(stage, "data-parallel", "data-parallel", end, end + 2.0),
            Span(stage, "optimizer", "optimizer", end + 1.0, end + 3.0),
        )
    ]
    return Timeline(3, (*timeline.spans, *phases))


def events_of(path: Path, phase: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == phase]


def test_every_span_is_an_event(tmp_path: Path) -> None:
    timeline = step()
    write_trace(timeline, tmp_path / "new" / "trace.json")
    events = events_of(tmp_path / "new" / "trace.json")
    assert Counter((event["pid"], event["name"], event["ts"], event["dur"]) for event in events) == Counter(
        (span.stage, span.name, span.start_seconds * 1e6, span.seconds * 1e6) for span in timeline.spans
    )
    third = next(event for event in events if event["name"] == "W3")
    assert (third["cat"], third["args"]) == ("weight", {"microbatch": 3, "chunk": 0})
    assert next(event for event in events if event["name"] == "optimizer")["args"] == {"microbatch": None, "chunk": 0}


def test_a_process_a_stage_and_a_row_a_phase(tmp_path: Path) -> None:
    write_trace(step(), tmp_path / "trace.json")
    names = events_of(tmp_path / "trace.json", "M")
    processes = [(event["pid"], event["args"]["name"]) for event in names if event["name"] == "process_name"]
    assert processes == [(0, "stage 0"), (1, "stage 1"), (2, "stage 2")]
    rows = {event["tid"]: event["args"]["name"] for event in names if event["name"] == "thread_name"}
    assert rows == {0: "tasks", 1: "data-parallel", 2: "optimizer"}
    for event in events_of(tmp_path / "trace.json"):
        assert rows[event["tid"]] == ("tasks" if event["args"]["microbatch"] is not None else event["name"])


def test_times_count_from_the_first_span(tmp_path: Path) -> None:
    """A real clock counts from the machine's start."""
    late = tuple(task_span(0, Task(kind, 0), 9e5 + index, 9e5 + index + 0.5) for index, kind in enumerate(TaskKind))
    write_trace(Timeline(1, late), tmp_path / "trace.json")
    assert [event["ts"] for event in events_of(tmp_path / "trace.json")] == [0, 1e6, 2e6]


def test_there_and_back(tmp_path: Path) -> None:
    timeline = step()
    write_trace(timeline, tmp_path / "trace.json")
    again = read_trace(tmp_path / "trace.json")
    assert again.num_stages == 3
    assert [(span.stage, span.name, span.category, span.microbatch) for span in again.spans] == [
        (span.stage, span.name, span.category, span.microbatch) for span in timeline.spans
    ]
    assert again.total_seconds == pytest.approx(timeline.total_seconds, abs=1e-6)
    assert again.idle_shares == pytest.approx(timeline.idle_shares, abs=1e-6)


def test_an_empty_step(tmp_path: Path) -> None:
    write_trace(Timeline(2, ()), tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json") == Timeline(2, ())
    assert Timeline(2, ()).idle_shares == (0.0, 0.0)


def test_idle_shares_are_of_the_pipeline_phase() -> None:
    """Stage 0 works 3 of 4 seconds, stage 1 two; the time after the pipeline is no idleness of the pipeline."""
    tasks = [(0, TaskKind.FORWARD, 0.0, 1.0), (1, TaskKind.FORWARD, 1.0, 2.0), (1, TaskKind.BACKWARD, 2.0, 3.0)]
    spans = [task_span(stage, Task(kind, 0), start, end) for stage, kind, start, end in tasks]
    last = task_span(0, Task(TaskKind.BACKWARD, 0), 2.0, 4.0)
    timeline = Timeline(2, (*spans, last, Span(0, "optimizer", "optimizer", 4.0, 9.0)))
    assert timeline.total_seconds == 4.0
    assert timeline.idle_shares == (0.25, 0.5)
    assert timeline.idle_share == 0.375


def test_spans_of_stages_that_are_not_there() -> None:
    with pytest.raises(AssertionError, match="spans of stages beyond the 1"):
        Timeline(1, (Span(1, "F0", "forward", 0.0, 1.0, 0),))


def test_a_trace_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MeshwrightError, match=r"the trace .*file/trace.json cannot be written: "):
        write_trace(step(), tmp_path / "file" / "trace.json")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}', '{"traceEvents": ["X"]}',
        '{"traceEvents": [{"ph": "X", "name": "F0", "cat": "forward", "pid": 0, "ts": 0, "dur": 1, "args": {}}]}',
        '{"traceEvents": [{"ph": "X", "name": "F0", "cat": "forward", "pid": 0, "ts": 0, "dur": 1, "args": []}]}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_trace(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    with pytest.raises(DataError, match=r"trace.json is no trace of a step"):
        read_trace(tmp_path / "trace.json")


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the trace .*trace.json cannot be read: No such file"):
        read_trace(tmp_path / "trace.json")
