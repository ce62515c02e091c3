"""The step report: one small all-gather a step, with the numbers that all ranks must know.

The report is sent after the backward pass, and read after the last gradient reduction. That reduction needs all ranks,
so reading the report costs no further wait. The optimizer has not written yet when the report shows wrong weights on a
rank. On a GPU the report is about the previous step (record.py), since the host knows only that step's numbers. TABLE
declares each number once.

A straggler is a rank that needs more seconds for its own work, step after step, than other ranks need for equal work.

A rank's own seconds exclude waits for others (the flight recorder counts waits). Ranks of a stage do equal work on
equal numbers of tokens; ranks of different stages may not. One slow step proves nothing. On GPUs the host seldom
waits, so no rank is flagged.
"""

from __future__ import annotations

import math
import statistics
import struct
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from meshwright.compute.models.preferences import rewards_of
from meshwright.compute.tensor.experts import dropped_pairs
from meshwright.config.registry import entries, load_entry
from meshwright.ranks.comm import DONE, Work
from meshwright.ranks.errors import PluginError
from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.ranks.grid import PIPE, Grid
from meshwright.ranks.machine import peak_resident_bytes
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.pipeline.span import Moment
from meshwright.strategies.pipeline.task import Task
from meshwright.training.checks import hashes_due, root_due
from meshwright.training.metric import KEYS, Metric
from meshwright.training.phases import PASSES

TABLE: Mapping[str, Metric] = {
    "loss": Metric("sum", lambda step: step.loss, shown=False),  # a rank's share; the sum is in the line of every rank
    "stop": Metric("any", dtype="bool", shown=False),  # one rank was asked to stop: all must stop together
    "next_counts": Metric("each", dtype="int64", shown=False),  # valid elements of each label in the next step's rows
    "busy_seconds": Metric("each", lambda step: step.lap.busy_seconds, shown=False),
    "own_seconds": Metric("each", lambda step: step.lap.own_seconds),
    "pipeline_seconds": Metric("max", lambda step: lambda: step.phases.seconds()[PASSES], shown=False),
    "task_seconds": Metric("each", lambda step: partial(task_seconds, step.parts.pipeline.done), shown=False),
    "peak_memory_bytes": Metric("max", lambda step: peak_memory_bytes(step.parts.mesh.device), "int64"),
    "dropped_pairs": Metric("sum", lambda step: dropped_pairs(step.parts.model, step.loss.device), shown=False),
    "rewards": Metric("sum", lambda step: rewards_of(step.parts.model, step.loss.device), shown=False),
    "sent_bytes": Metric("max", lambda step: step.lap.sent_bytes, "int64", shown=False),  # by the grid's sets of axes
    "root": Metric("each", lambda step: root_due(step.parts, step.number), "int64", shown=False),
    "hashes": Metric("each", lambda step: hashes_due(step.parts, step.number), "int64", shown=False),
}
"""All numbers of the step report. A further number is a line here, or another package's entry (docs/extending.md), and
is written to metrics.jsonl. Sums are computed in rank order."""


def all_metrics() -> dict[str, Metric]:
    """Return TABLE and other packages' metrics. Raises PluginError if a metric has the name of ours or of a line's
    key."""
    others = entries("metrics")
    if taken := sorted(others.keys() & (KEYS | TABLE.keys())):
        raise PluginError(f"the metric {taken[0]} of another package has the name of a number that a step has already")
    loaded = {name: replace(metric, measure=load_entry(metric.measure)) for name, metric in others.items()}
    return {**TABLE, **loaded}


def peak_memory_bytes(device: torch.device) -> int:
    """Return this rank's peak memory: the allocator's on a GPU, the process's resident set on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


@dataclass(frozen=True)
class Lap:
    """A rank's work since the rank's last report. `own_seconds`: without waits for others. `sent_bytes`: over each of
    the grid's sets of axes."""

    busy_seconds: float = 0.0
    own_seconds: float = 0.0
    sent_bytes: tuple[int, ...] = ()


def task_seconds(tasks: Sequence[tuple[Task, Moment, Moment]]) -> float:
    """Sum the seconds of a rank's forward and backward passes, without the waits between tasks."""
    return sum(end() - start() for _, start, end in tasks)


class StepReports:
    """All ranks' reports of a step, still in an all-gather: one row of int64 a rank, floats stored as bits.

    Numbers are read by name, one column at a time. With 1,000 ranks, objects for 1,000 reports on each rank would cost
    more than the step's other host work.
    """

    def __init__(self, table: Mapping[str, Metric], values: Mapping[str, Any], rows: Tensor, work: Work) -> None:
        """Compute the columns of each number from this rank's `values`, which have equal lengths on all ranks.

        `rows` [ranks, numbers] are complete when `work` ends. `places`: by name, the first column, the column after the
        last, and whether the value is a single number.
        """
        self.table = table
        self._rows, self._work = rows, work
        self.places: dict[str, tuple[int, int, bool]] = {}
        stop = 0
        for name, value in values.items():
            single = not isinstance(value, Sequence)
            start, stop = stop, stop + (1 if single else len(value))
            self.places[name] = start, stop, single

    @classmethod
    def begin(cls, mesh: Mesh, table: Mapping[str, Metric], values: Mapping[str, Any]) -> StepReports:
        """Send this rank's numbers to all ranks, without a wait for the other ranks' numbers."""
        mine = row_of(table, values)
        rows = mine.new_empty(mesh.world.size, mine.numel())
        return cls(table, values, rows, mesh.world.all_gather(rows, mine, wait=False))

    def __getitem__(self, name: str) -> list[Any]:
        """Wait for all ranks; return each rank's number, or list of numbers, in rank order."""
        work, self._work = self._work, DONE
        work.wait()
        start, stop, single = self.places[name]
        column = self._rows[:, start:stop].contiguous()
        if self.table[name].dtype == "float64":
            column = column.view(torch.float64)
        values: list[Any] = column.flatten().tolist() if single else column.tolist()
        return values

    def reduced(self, name: str) -> Any:
        """Reduce all ranks' values to one, as the table declares."""
        return self.table[name].reduced(self[name])


def row_of(table: Mapping[str, Metric], values: Mapping[str, Any]) -> Tensor:
    """Pack a rank's numbers in a row of int64, floats as bits."""
    form, numbers = "=", list[Any]()
    for name, value in values.items():
        some = value if isinstance(value, Sequence) else (value,)
        form += f"{len(some)}{'d' if table[name].dtype == 'float64' else 'q'}"
        numbers += some
    return torch.frombuffer(bytearray(struct.pack(form, *numbers)), dtype=torch.int64)


STEPS = 10
"""Number of last steps that a straggler is judged by."""

SLOW_STEPS = 8
"""Number of these steps that must be slow."""

_FACTOR = 1.5
LEAST_SECONDS = 0.02
"""The least cost of a straggler in a step, in seconds; a lower bound would flag rank 0 for writing metrics."""


class RankClock:
    """A clock of this rank's work since the last call: busy seconds of the device, and own seconds without waits.

    Busy seconds on a CPU: the process's CPU time over the number of threads; a rank that spins in a wait (MPI) counts
    as busy. On a GPU: from the driver's utilisation, sampled once a step. NaN without nvidia-ml-py, which torch uses to
    ask the driver, and after the first question without an answer (MIG, a lost permission).
    """

    def __init__(self, device: torch.device, recorder: FlightRecorder) -> None:
        self.device = device
        self._recorder = recorder
        self._driver = device.type == "cuda" and find_spec("pynvml") is not None
        self._last = (time.process_time(), time.perf_counter(), recorder.waited_seconds)

    def lap(self) -> tuple[float, float]:
        """Return (busy seconds, own seconds) since the last call."""
        now = (time.process_time(), time.perf_counter(), self._recorder.waited_seconds)
        cpu, wall, waited = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        busy = cpu / torch.get_num_threads()
        if self.device.type == "cuda":
            busy = math.nan
        if self._driver:
            try:
                busy = wall * torch.cuda.utilization(self.device) / 100
            except Exception:  # NVML's error classes are in an optional package; no such error should end the run
                self._driver = False
        return busy, max(0.0, wall - waited)


@dataclass(frozen=True)
class Straggler:
    """A rank `factor` times as slow as the rank's peers, at a cost of `seconds` a step; both are medians."""

    rank: int
    factor: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds the others up: its own work takes {self.factor:.1f} times theirs, "
            f"{self.seconds:.2f} s more a step in most of the last {STEPS} steps"
        )


class StragglerWatch:
    """A detector of stragglers, from every rank's own seconds in each step."""

    def __init__(self, grid: Grid) -> None:
        self._stages: list[list[int]] = [[] for _ in range(grid.size(PIPE))]
        for rank in range(grid.world_size):
            self._stages[grid.coordinates(rank)[PIPE]].append(rank)
        self._steps: deque[list[tuple[float, float]]] = deque(maxlen=STEPS)

    def step(self, own_seconds: Sequence[float]) -> Straggler | None:
        """Add a step's seconds; return the worst straggler of the last steps, or None."""
        self._steps.append(self.beside_peers(own_seconds))
        if len(self._steps) < STEPS:
            return None
        slow = Counter(
            rank
            for pairs in self._steps
            for rank, (mine, theirs) in enumerate(pairs)
            if mine > _FACTOR * theirs and mine - theirs > LEAST_SECONDS
        )
        found = []
        for rank in (rank for rank, count in slow.items() if count >= SLOW_STEPS):
            pairs = [step[rank] for step in self._steps]
            factor = statistics.median(mine / max(theirs, 1e-9) for mine, theirs in pairs)
            found.append(Straggler(rank, factor, statistics.median(mine - theirs for mine, theirs in pairs)))
        return max(found, key=lambda straggler: straggler.seconds, default=None)

    def beside_peers(self, own_seconds: Sequence[float]) -> list[tuple[float, float]]:
        """Return each rank's own seconds and the median of the other ranks of the stage (infinity if there are none).

        A stage is sorted once for all ranks: one sort a rank would take most of a second at 1,000 ranks.
        """
        pairs = [(seconds, math.inf) for seconds in own_seconds]
        for ranks in self._stages:
            ordered = sorted(own_seconds[rank] for rank in ranks)
            lower, upper = (len(ranks) - 2) // 2, (len(ranks) - 1) // 2  # the middle without one rank
            for rank in ranks if len(ranks) > 1 else ():
                position = bisect_left(ordered, own_seconds[rank])
                middle = ordered[lower + (lower >= position)], ordered[upper + (upper >= position)]
                pairs[rank] = own_seconds[rank], sum(middle) / 2
        return pairs
