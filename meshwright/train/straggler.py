"""Stragglers: ranks whose own work takes longer than that of others who do the same, step after step.

A rank's own seconds are those in which it did not wait for others (the flight recorder counts its waits). Ranks of a
stage do the same work on as many tokens; those of different stages need not. One slow step says nothing. On GPUs the
host seldom waits, so that nobody is flagged there.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.flight_recorder import FlightRecorder
from meshwright.grid import PIPE, Grid

STEPS = 10
"""Steps that are looked at together."""

SLOW_STEPS = 8
"""How many of them must be slow."""

FACTOR = 1.5
LEAST_SECONDS = 0.02
"""What a straggler costs in a step; below, rank 0's writing of metrics would count."""


class OwnClock:
    """How long a rank has worked since the last call, its waits for others left out."""

    def __init__(self, recorder: FlightRecorder) -> None:
        self._recorder = recorder
        self._wall, self._waited = time.perf_counter(), recorder.waited_seconds

    def lap(self) -> float:
        wall, waited = time.perf_counter(), self._recorder.waited_seconds
        own = (wall - self._wall) - (waited - self._waited)
        self._wall, self._waited = wall, waited
        return max(0.0, own)


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
    """Is told every rank's own seconds, step by step."""

    def __init__(self, grid: Grid) -> None:
        stages = [grid.index(rank, PIPE) for rank in range(grid.world_size)]
        self._peers = [
            [peer for peer, stage in enumerate(stages) if stage == mine and peer != rank]
            for rank, mine in enumerate(stages)
        ]
        self._steps: deque[Sequence[float]] = deque(maxlen=STEPS)

    def step(self, own_seconds: Sequence[float]) -> Straggler | None:
        """The worst straggler as of this step, if there is one."""
        self._steps.append(own_seconds)
        if len(self._steps) < STEPS:
            return None
        found = [straggler for rank in range(len(own_seconds)) if (straggler := self._judged(rank))]
        return max(found, key=lambda straggler: straggler.seconds, default=None)

    def _judged(self, rank: int) -> Straggler | None:
        if not self._peers[rank]:
            return None
        pairs = [(own[rank], statistics.median(own[peer] for peer in self._peers[rank])) for own in self._steps]
        slow = [mine > FACTOR * theirs and mine - theirs > LEAST_SECONDS for mine, theirs in pairs]
        if sum(slow) < SLOW_STEPS:
            return None
        factor = statistics.median(mine / max(theirs, 1e-9) for mine, theirs in pairs)
        return Straggler(rank, factor, statistics.median(mine - theirs for mine, theirs in pairs))
