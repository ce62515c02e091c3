"""Stages of two chunks by the virtual clock: message-driven, interleaved 1F1B and ZB-V, 8 stages.

    python -m benchmarks.pipeline_chunks [--microbatches 16 64] [--rounds N] [--json FILE]

The durations, latencies and troubles of benchmarks/pipeline.py: a forward pass of a stage takes 1, of one of two chunks
a half, B and W the same, a message 0.1. Totals are means over the rounds, with other troubles in each. `memory`: the
most microbatches in flight on a stage, once per holding chunk. `bound`: a lower bound of every schedule of these
chunks, since each stage must wait for the first activation and then do all the work. A bubble is the total minus a
stage's work without troubles.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.interleave import write_json
from benchmarks.paced import CHUNKED, CONDITIONS, LATENCY, Run
from meshwright.strategies.pipeline.span import Timeline
from meshwright.strategies.pipeline.task import Task, TaskKind

NUM_STAGES = 8
INTERLEAVED, ZB_V = "interleaved 1f1b", "zb-v"
OF_INTERLEAVED, OF_BUBBLE = 0.90, 0.95
"""Targets: a total divided by interleaved 1F1B's, a v's bubble divided by ZB-V's at equal memory."""


@dataclass(frozen=True)
class Row:
    """A schedule in a cell: the total, in forward passes of a stage, and the least possible total."""

    num_microbatches: int
    condition: str
    schedule: str
    memory: int
    total: float
    bound: float
    of_interleaved: float
    bound_of_interleaved: float
    of_bubble: float


def cell(num_microbatches: int, condition: str, rounds: int) -> list[Row]:
    """Simulate all schedules with two chunks under the same troubles."""
    runs = {
        name: [Run(name, condition, NUM_STAGES, num_microbatches, seed) for seed in range(rounds)] for name in CHUNKED
    }
    timelines = {name: [run.simulated() for run in draws] for name, draws in runs.items()}
    totals = {name: statistics.mean(x.total_seconds for x in draws) for name, draws in timelines.items()}
    bound = statistics.mean(map(least_seconds, runs[ZB_V]))
    work = 3 * num_microbatches
    return [
        Row(
            num_microbatches, condition, name, max(map(most_in_flight, timelines[name])), total, bound,
            total / totals[INTERLEAVED], bound / totals[INTERLEAVED], (total - work) / (totals[ZB_V] - work),
        )
        for name, total in totals.items()
    ]  # fmt: skip


def least_seconds(run: Run) -> float:
    """Return the most seconds of a stage: until the first activation can arrive, and for all the work."""
    chunks, kinds = range(run.placement.num_chunks), run.rule.kinds
    arrives, longest = 0.0, 0.0
    for stage in range(run.num_stages):
        tasks = (Task(work, index, chunk) for work, index, chunk in product(kinds, range(run.num_microbatches), chunks))
        longest = max(longest, arrives + sum(run.costs(stage, task) for task in tasks))
        first = (Task(TaskKind.FORWARD, index) for index in range(run.num_microbatches))
        arrives += min(run.costs(stage, task) for task in first) + LATENCY
    return longest


def most_in_flight(timeline: Timeline) -> int:
    """Return the most microbatches in flight on the fullest stage. An unsplit one ends with the backward pass."""
    ends = "weight" if any(span.category == "weight" for span in timeline.spans) else "backward"
    most = 0
    for stage in range(timeline.num_stages):
        held = 0
        for span in timeline.tasks:  # in the order in which they begin
            if span.stage == stage:
                held += (span.category == "forward") - (span.category == ends)
                most = max(most, held)
    return most


def show(rows: Sequence[Row]) -> None:
    table = Table(title=f"{NUM_STAGES} stages of 2 chunks, virtual clock")
    for head in ("cell", "schedule"):
        table.add_column(head)
    for head in ("memory", "total", "bound", "/interleaved", "its bound", "target", "bubble/ZB-V", "target"):
        table.add_column(head, justify="right")
    known = None
    for row in rows:
        if known not in (None, (row.num_microbatches, row.condition)):
            table.add_section()
        first = known != (row.num_microbatches, row.condition)
        known = (row.num_microbatches, row.condition)
        ours = row.schedule.startswith("message-driven")
        table.add_row(
            f"{row.num_microbatches}, {row.condition}" if first else "", row.schedule, str(row.memory),
            f"{row.total:.1f}", f"{row.bound:.1f}", f"{row.of_interleaved:.3f}", f"{row.bound_of_interleaved:.3f}",
            f"{OF_INTERLEAVED:.2f}" if ours else "", f"{row.of_bubble:.2f}",
            f"{OF_BUBBLE:.2f}" if ours and CHUNKED[row.schedule] == "v" else "",
        )  # fmt: skip
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Stages of two chunks by the virtual clock.")
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--rounds", type=int, default=5, help="draws of the troubles")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    arguments = parser.parse_args()
    cells = product(arguments.microbatches, arguments.conditions)
    rows = [row for size, condition in cells for row in cell(size, condition, arguments.rounds)]
    show(rows)
    write_json(arguments.json, {"virtual clock": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
