"""Bai: minutes of data-parallel strategies on four and eight V100, over the minutes of one V100."""

from __future__ import annotations

from typing import Any

from meshwright.planner.plan.predict import Planner
from validation.case import Finding, Row
from validation.paper import Line, Paper

MINUTES = "minutes"

SYNC = {"baseline": "allreduce", "sps": "server-gradient", "dps": "allreduce", "horovod": "ring"}
"""Bai's names -> ours."""
NOT_MEASURED = ("baseline", "dps")
"""The first gives the scale; the authors say that the second was estimated, and four GPUs are no 6.7 times one."""
PER_DEVICE = 4
"""Sequences a device and step; SPS gets this number in all, and splits the sequences."""


def compare(paper: Paper) -> Finding:
    """Return a row a line.

    The baseline gives the minutes of a predicted second a sequence, since the novel's length is not published.
    """
    lines = paper.tables["bai_10m"]
    each, one = paper.planner(), paper.planner(one_process=True, overlapped=frozenset())
    seconds = [_seconds_per_sequence(paper, line, one if line["processes"] == "1" else each) for line in lines]
    scale = float(lines[0]["minutes"]) / seconds[0]
    rows = [
        Row(
            _label(line),
            MINUTES,
            float(line["minutes"]),
            scale * one,
            counts=line["strategy"] not in NOT_MEASURED,
            fitted=True,
        )
        for line, one in zip(lines, seconds, strict=True)
    ]
    return Finding(tuple(rows))


def _seconds_per_sequence(paper: Paper, line: Line, planner: Planner) -> float:
    strategy, _, apex = line["strategy"].partition("-")
    gpus = int(line["gpus"])
    batch = PER_DEVICE * (1 if strategy == "sps" else gpus)
    changes: dict[str, Any] = {
        "batch": {"global": batch},
        "layout": {"data": {"size": gpus, "sync": SYNC[strategy]}},
    }
    if apex:
        changes["precision"] = {"level": "O2", "dtype": "fp16"}
    return planner.predict(paper.config(changes)).seconds / batch


def _label(line: Line) -> str:
    return f"{line['strategy']}, {line['gpus']} GPUs on {line['nodes']}"
