"""The step report: the one small collective a step, in which ranks tell each other what all must know.

It leaves when the backward pass is over, and is read when the last gradient is summed, for which all had to come:
nobody waits for it, and the optimizer has not written yet when it says that a rank's weights are wrong. On a GPU it is
of the step before (record.py), whose numbers the host knows by then.

Stragglers: ranks whose own work takes longer than that of others who do the same, step after step.

A rank's own seconds are those in which it did not wait for others (the flight recorder counts its waits). Ranks of a
stage do the same work on as many tokens; those of different stages need not. One slow step says nothing. On GPUs the
host seldom waits, so that nobody is flagged there.
"""

from __future__ import annotations

import math
import statistics
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from importlib.util import find_spec

import torch

from meshwright.ranks.comm import Work
from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.ranks.grid import PIPE, Grid
from meshwright.ranks.mesh import Mesh

_BEFORE_COUNTS = 8
"""The numbers of a report that stand before its counts."""


@dataclass(frozen=True)
class StepReport:
    """One rank's report: its share of the loss and of the next step's valid labels, and how it fares.

    `pipeline_seconds`: its forward and backward passes, and the waits between them; `task_seconds`: without the waits.
    `own_seconds`: since its last report, without its waits for others. `dropped_pairs`: of a token and an expert.
    `hashes`: of the weights that it shares with others (checks.py), in the steps in which they are compared.
    """

    loss: float
    next_counts: list[int]
    stop: bool
    busy_seconds: float
    pipeline_seconds: float
    task_seconds: float
    peak_memory_bytes: int
    sent_bytes: tuple[int, ...]
    hashes: tuple[int, ...] = ()
    own_seconds: float = 0.0
    dropped_pairs: float = 0.0

    def numbers(self) -> list[float]:
        """All of it as numbers, but for the hashes."""
        loss, counts, stop, busy, pipeline, tasks, peak, sent, _, own, dropped = astuple(self)
        return [float(number) for number in (loss, stop, busy, pipeline, tasks, own, peak, dropped, *counts, *sent)]

    @classmethod
    def of(cls, numbers: Sequence[float], num_labels: int) -> StepReport:
        """The report that said `numbers`, without hashes."""
        loss, stop, busy, pipeline, tasks, own, peak, dropped, *rest = numbers
        counts, sent = list(map(int, rest[:num_labels])), tuple(map(int, rest[num_labels:]))
        return cls(
            loss, counts, bool(stop), busy, pipeline, tasks, int(peak), sent, own_seconds=own, dropped_pairs=dropped
        )


@dataclass(frozen=True)
class StepReports:
    """Every rank's step report, on its way to all: numbers as float64, counts exact to 2^53; then hashes, as int64.

    What all must know is read by column. Each report by itself is for rank 0, who writes the metrics: a thousand ranks
    that all read a thousand reports would spend more on them than on the step's own host work.
    """

    rows: torch.Tensor
    work: Work
    num_labels: int
    num_hashes: int
    _read: list[torch.Tensor] = field(default_factory=list)
    """The numbers, once they were waited for. No cached_property: before Python 3.12 it holds a lock meanwhile, for
    which another rank of the process would wait."""

    @classmethod
    def begin(cls, mesh: Mesh, report: StepReport) -> StepReports:
        """Send this rank's report to all others, without waiting for theirs."""
        numbers = torch.tensor(report.numbers(), dtype=torch.float64)
        hashes = torch.tensor(report.hashes, dtype=torch.int64)
        mine = torch.cat([numbers.view(torch.int64), hashes])
        rows = mine.new_empty(mesh.world.size, mine.numel())
        work = mesh.world.all_gather(rows, mine, wait=False)
        return cls(rows, work, len(report.next_counts), len(report.hashes))

    @property
    def _numbers(self) -> torch.Tensor:
        """Columns in the order of StepReport.numbers. Waits for all ranks."""
        if not self._read:
            self.work.wait()
            numbers = self.rows[:, : self.rows.shape[1] - self.num_hashes]
            self._read.append(numbers.contiguous().view(torch.float64))
        return self._read[0]

    @property
    def losses(self) -> list[float]:
        losses: list[float] = self._numbers[:, 0].tolist()
        return losses

    @property
    def stop(self) -> bool:
        """Whether some rank was asked to stop."""
        return bool(self._numbers[:, 1].any())

    def next_counts(self, ranks: Sequence[int]) -> list[int]:
        """How many elements of each label are valid in the next rows of these ranks."""
        counts = self._numbers[list(ranks), _BEFORE_COUNTS : _BEFORE_COUNTS + self.num_labels]
        return [int(count) for count in counts.sum(0)]

    @property
    def hashes(self) -> list[list[int]]:
        """Each rank's; empty lists in the steps in which weights are not compared."""
        size = len(self._numbers)
        hashes: list[list[int]] = self.rows[:, -self.num_hashes :].tolist() if self.num_hashes else [[]] * size
        return hashes

    def each(self) -> list[StepReport]:
        """All reports, in rank order."""
        return [StepReport.of(row, self.num_labels) for row in self._numbers.tolist()]


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
        self._last = self._now()

    def _now(self) -> tuple[float, float, float]:
        return time.process_time(), time.perf_counter(), self._recorder.waited_seconds

    def lap(self) -> tuple[float, float]:
        """(busy seconds, own seconds) since the last call."""
        now = self._now()
        cpu, wall, waited = (new - old for new, old in zip(now, self._last, strict=True))
        self._last = now
        busy = cpu / torch.get_num_threads()
        if self.device.type == "cuda":
            busy = wall * self._utilisation()
        return busy, max(0.0, wall - waited)

    def _utilisation(self) -> float:
        if self._driver:
            try:
                return torch.cuda.utilization(self.device) / 100
            except Exception:  # NVML's errors are classes of a package that need not be there: none is worth the run
                self._driver = False
        return math.nan


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
        found = [self._straggler(rank) for rank, count in slow.items() if count >= SLOW_STEPS]
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

    def _straggler(self, rank: int) -> Straggler:
        pairs = [step[rank] for step in self._steps]
        factor = statistics.median(mine / max(theirs, 1e-9) for mine, theirs in pairs)
        return Straggler(rank, factor, statistics.median(mine - theirs for mine, theirs in pairs))
