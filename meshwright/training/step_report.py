"""The step report: the one small collective a step, in which ranks tell each other what all must know.

It leaves when the backward pass is over, and is read when the last gradient is summed, for which all had to come:
nobody waits for it, and the optimizer has not written yet when it says that a rank's weights are wrong. On a GPU it is
of the step before (record.py), whose numbers the host knows by then. TABLE declares its numbers, each once.

Stragglers: ranks whose own work takes longer than that of others who do the same, step after step.

A rank's own seconds are those in which it did not wait for others (the flight recorder counts its waits). Ranks of a
stage do the same work on as many tokens; those of different stages need not. One slow step says nothing. On GPUs the
host seldom waits, so that nobody is flagged there.
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
    "stop": Metric("any", dtype="bool", shown=False),  # one rank was asked to stop, and all must stop together
    "next_counts": Metric("each", dtype="int64", shown=False),  # valid elements of each label in the next step's rows
    "busy_seconds": Metric("each", lambda step: step.lap.busy_seconds, shown=False),
    "own_seconds": Metric("each", lambda step: step.lap.own_seconds),
    "pipeline_seconds": Metric("max", lambda step: lambda: step.phases.seconds()[PASSES], shown=False),
    "task_seconds": Metric("each", lambda step: partial(task_seconds, step.parts.pipeline.done), shown=False),
    "peak_memory_bytes": Metric("max", lambda step: peak_memory_bytes(step.parts.mesh.device), "int64"),
    "dropped_pairs": Metric("sum", lambda step: dropped_pairs(step.parts.model, step.loss.device), shown=False),
    "sent_bytes": Metric("max", lambda step: step.lap.sent_bytes, "int64", shown=False),  # by the grid's sets of axes
    "root": Metric("each", lambda step: root_due(step.parts, step.number), "int64", shown=False),
    "hashes": Metric("each", lambda step: hashes_due(step.parts, step.number), "int64", shown=False),
}
"""All that the ranks tell each other of a step. A number more is a line here, or another package's (docs/extending.md),
and metrics.jsonl has it. Sums are added up in rank order."""


def all_metrics() -> dict[str, Metric]:
    """The table with other packages' metrics. Raises PluginError where one has the name of ours or of a line's key."""
    others = entries("metrics")
    if taken := sorted(others.keys() & (KEYS | TABLE.keys())):
        raise PluginError(f"the metric {taken[0]} of another package has the name of a number that a step has already")
    loaded = {name: replace(metric, measure=load_entry(metric.measure)) for name, metric in others.items()}
    return {**TABLE, **loaded}


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this rank has held: the allocator's on a GPU, the process's resident set on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else peak_resident_bytes()


@dataclass(frozen=True)
class Lap:
    """A rank's work since its last report. `own_seconds`: without its waits for others; `sent_bytes`: over each of
    the grid's sets of axes."""

    busy_seconds: float = 0.0
    own_seconds: float = 0.0
    sent_bytes: tuple[int, ...] = ()


def task_seconds(tasks: Sequence[tuple[Task, Moment, Moment]]) -> float:
    """Seconds of a rank's forward and backward passes, without the waits between them."""
    return sum(end() - start() for _, start, end in tasks)


class StepReports:
    """Every rank's report of a step, on its way to all: a row of int64 by rank, in which a float lies as its bits.

    What all must know is read by name, a column at a time: a thousand ranks that all made objects of a thousand
    reports would spend more on them than on the step's own host work.
    """

    def __init__(self, table: Mapping[str, Metric], values: Mapping[str, Any], rows: Tensor, work: Work) -> None:
        """`values`: this rank's, whose lengths all ranks' have. `rows` [ranks, numbers] are there when `work` ends.

        `places`: by name, where its columns begin and end, and whether it is a single number.
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
        """Send this rank's numbers to all others, without waiting for theirs."""
        mine = row_of(table, values)
        rows = mine.new_empty(mesh.world.size, mine.numel())
        return cls(table, values, rows, mesh.world.all_gather(rows, mine, wait=False))

    def __getitem__(self, name: str) -> list[Any]:
        """Each rank's number, or list of numbers, in rank order. Waits for all ranks."""
        work, self._work = self._work, DONE
        work.wait()
        start, stop, single = self.places[name]
        column = self._rows[:, start:stop].contiguous()
        if self.table[name].dtype == "float64":
            column = column.view(torch.float64)
        values: list[Any] = column.flatten().tolist() if single else column.tolist()
        return values

    def reduced(self, name: str) -> Any:
        """One value of all ranks', as the table says."""
        return self.table[name].reduced(self[name])


def row_of(table: Mapping[str, Metric], values: Mapping[str, Any]) -> Tensor:
    """A rank's numbers as a row of int64, in which a float lies as its bits."""
    form, numbers = "=", list[Any]()
    for name, value in values.items():
        some = value if isinstance(value, Sequence) else (value,)
        form += f"{len(some)}{'d' if table[name].dtype == 'float64' else 'q'}"
        numbers += some
    return torch.frombuffer(bytearray(struct.pack(form, *numbers)), dtype=torch.int64)


STEPS = 10
"""Steps that are looked at together."""

SLOW_STEPS = 8
"""How many of them must be slow."""

_FACTOR = 1.5
LEAST_SECONDS = 0.02
"""The least that a straggler costs in a step; below, rank 0's writing of metrics would count."""


class RankClock:
    """How long this rank has worked since the last call: its device, and the rank without its waits for others.

    Busy on a CPU: the process's CPU time over its threads; a rank that spins while it waits (MPI) counts as busy. On a
    GPU: the driver's utilisation, sampled once a step; not a number where nvidia-ml-py, through which torch asks the
    driver, is not installed, and from the first question on that the driver does not answer (MIG, a lost permission).
    """

    def __init__(self, device: torch.device, recorder: FlightRecorder) -> None:
        self.device = device
        self._recorder = recorder
        self._driver = device.type == "cuda" and find_spec("pynvml") is not None
        self._last = (time.process_time(), time.perf_counter(), recorder.waited_seconds)

    def lap(self) -> tuple[float, float]:
        """(busy seconds, own seconds) since the last call."""
        now = (time.process_time(), time.perf_counter(), self._recorder.waited_seconds)
        cpu, wall, waited = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        busy = cpu / torch.get_num_threads()
        if self.device.type == "cuda":
            busy = math.nan
        if self._driver:
            try:
                busy = wall * torch.cuda.utilization(self.device) / 100
            except Exception:  # NVML's errors are classes of a package that need not be there: none is worth the run
                self._driver = False
        return busy, max(0.0, wall - waited)


@dataclass(frozen=True)
class Straggler:
    """A rank that is `factor` times as slow as its peers, which costs `seconds` a step; medians."""

    rank: int
    factor: float
    seconds: float

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds the others up: its own work takes {self.factor:.1f} times theirs, "
            f"{self.seconds:.2f} s more a step in most of the last {STEPS} steps"
        )


class StragglerWatch:
    """A judge of stragglers, told every rank's own seconds step by step."""

    def __init__(self, grid: Grid) -> None:
        self._stages: list[list[int]] = [[] for _ in range(grid.size(PIPE))]
        for rank in range(grid.world_size):
            self._stages[grid.coordinates(rank)[PIPE]].append(rank)
        self._steps: deque[list[tuple[float, float]]] = deque(maxlen=STEPS)

    def step(self, own_seconds: Sequence[float]) -> Straggler | None:
        """The worst straggler as of this step, if there is one."""
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
        """Each rank's own seconds and the median of its stage's others; infinity where there are none.

        A stage is sorted once for all of its ranks: one by one they would take most of a second at 1,000 ranks.
        """
        pairs = [(seconds, math.inf) for seconds in own_seconds]
        for ranks in self._stages:
            ordered = sorted(own_seconds[rank] for rank in ranks)
            lower, upper = (len(ranks) - 2) // 2, (len(ranks) - 1) // 2  # the middle of the others, when one is out
            for rank in ranks if len(ranks) > 1 else ():
                place = bisect_left(ordered, own_seconds[rank])
                middle = ordered[lower + (lower >= place)], ordered[upper + (upper >= place)]
                pairs[rank] = own_seconds[rank], sum(middle) / 2
        return pairs
