"""Schedules in simulation under random delays of tasks: 8 stages, each task takes 1 - d to 1 + d forward passes.

    python -m benchmarks.jitter [--microbatches 16 64] [--delays 0 0.1 0.3] [--rounds N]

Tasks F, B and W take 1 each, a message 0.1. Each round draws the delays of all tasks, equal for all schedules. `of
1F1B`: a schedule's mean time divided by the time of 1F1B under the same delays. `slowed`: the mean time divided by the
same schedule's time without delays. `memory`: the largest number of microbatches in flight on a stage, in microbatches
of a whole stage.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.paced import Run
from benchmarks.pipeline_chunks import NUM_STAGES, most_in_flight

SCHEDULES = (
    "1f1b", "axonn", "message-driven, limit 8", "message-driven, limit 12", "interleaved 1f1b", "zb-v",
    "message-driven, v, limit 16",
)  # fmt: skip


def timed(schedule: str, num_microbatches: int, delay: float, rounds: int) -> tuple[float, float]:
    """Return (mean time of a step in forward passes, microbatches in flight)."""
    condition, seeds = ("jitter", range(rounds)) if delay else ("no jitter", range(1))
    runs = [Run(schedule, condition, NUM_STAGES, num_microbatches, seed, delay) for seed in seeds]
    lines = [run.simulated() for run in runs]
    share = runs[0].placement.num_chunks
    return statistics.mean(line.total_seconds for line in lines), max(most_in_flight(line) for line in lines) / share


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.1, 0.3])
    parser.add_argument("--rounds", type=int, default=20)
    asked = parser.parse_args(arguments)
    table = Table("microbatches", "schedule", "memory", *(f"{d:.0%}: of 1F1B, slowed" for d in asked.delays))
    for count in asked.microbatches:
        still = {name: timed(name, count, 0.0, 1)[0] for name in SCHEDULES}
        found = {d: {name: timed(name, count, d, asked.rounds) for name in SCHEDULES} for d in asked.delays}
        for name in SCHEDULES:
            cells = [f"{row[name][0] / row['1f1b'][0]:.3f}, {row[name][0] / still[name]:.3f}" for row in found.values()]
            memory = max(row[name][1] for row in found.values())
            table.add_row(str(count), name, f"{memory:g}", *cells)
    Console(width=150).print(table)


if __name__ == "__main__":
    main()
