"""Seconds that the step reports of a thousand ranks cost each rank: python -m benchmarks.step_reports [--ranks N]

Reports are made up and already received; 128 x 8 ranks, of data and tensor parallelism. Every rank reads the losses,
whether to stop, and the next step's counts. Rank 0 also reads every report, makes the line of metrics and judges
stragglers. Processor milliseconds, the median of 30 steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from meshwright.ranks.comm import DONE
from meshwright.ranks.grid import Grid
from meshwright.training.metrics import StepWork, metrics_line
from meshwright.training.step_report import TABLE, StepReports, StragglerWatch, row_of

STEPS = 30


def milliseconds(step: Callable[[], object]) -> float:
    seconds = []
    for _ in range(STEPS):
        begin = time.process_time()
        step()
        seconds.append(time.process_time() - begin)
    return 1e3 * statistics.median(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    ranks = parser.parse_args().ranks
    torch.set_num_threads(1)
    grid = Grid((("data", ranks // 8), ("pipe", 1), ("tensor", 8)))
    report = {
        "loss": 0.5, "stop": False, "next_counts": [8], "busy_seconds": 1.0, "own_seconds": 0.5, "dropped_pairs": 0.0,
        "pipeline_seconds": 2.0, "task_seconds": 3.0, "peak_memory_bytes": 4, "root": [],
        "sent_bytes": tuple(range(len(grid.axis_sets))),
    }  # fmt: skip
    numbers = row_of(TABLE, report)
    rows, peers = numbers.repeat(ranks, 1), grid.group(5, "data")
    watch, work = StragglerWatch(grid), StepWork(10, 1.0, 1.0, None)

    def a_rank() -> StepReports:
        reports = StepReports(TABLE, report, rows, DONE)
        assert reports["loss"][0] == report["loss"]
        assert not reports.reduced("stop")
        counts = reports["next_counts"]
        assert [sum(column) for column in zip(*(counts[rank] for rank in peers), strict=True)] == [8 * len(peers)]
        return reports

    def rank_0() -> None:
        reports = a_rank()
        metrics_line(1.0, work, reports, grid)
        watch.step(reports["own_seconds"])

    print(f"{ranks} ranks, {len(numbers)} numbers each: a rank {milliseconds(a_rank):.2f} ms a step, ", end="")
    print(f"rank 0 {milliseconds(rank_0):.1f} ms")


if __name__ == "__main__":
    main()
