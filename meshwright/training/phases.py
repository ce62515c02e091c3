"""The phases of a step on one rank, one after the other.

| phase | from | to |
|---|---|---|
| passes | the first microbatch's forward pass | the last task of the last backward pass |
| data_parallel | then, waits for the gradients' sums | until all are there |
| optimizer | norm, clipping, the step | the new parameters are published |

An optimizer that steps some parameters while it waits for the others' gradients is in two phases in turn. Between the
phases the next batch is loaded, and the ranks tell each other how they fare.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from meshwright.ranks.flight_recorder import FlightRecorder
from meshwright.strategies.pipeline.span import Moment, Span, Watch, seconds_between

PASSES, DATA_PARALLEL, OPTIMIZER = PHASES = ("passes", "data_parallel", "optimizer")
PHASE_WORDS = {PASSES: "forward and backward", DATA_PARALLEL: "sums of gradients", OPTIMIZER: "optimizer"}
"""The words for people."""
BETWEEN = "between phases"


class PhaseClock:
    """A clock of one step's phases, by the device's time, which tells the flight recorder of each."""

    def __init__(self, device: torch.device, recorder: FlightRecorder) -> None:
        self.device = device
        self._recorder = recorder
        self._watch = Watch(device)
        self._watch.start()
        self._ended: list[tuple[str, Moment, Moment]] = []
        self._running: tuple[str, Moment] | None = None
        self.ended = self._watch.now()
        """The end of the step's last phase."""

    def begin(self, phase: str | None) -> None:
        """End the phase that the step is in, and begin this one; None: it is in none then."""
        now = self._watch.now()
        if self._running is not None:
            self._ended.append((*self._running, now))
            self.ended = now
        self._running = None if phase is None else (phase, now)
        self._recorder.enter(BETWEEN if phase is None else PHASE_WORDS.get(phase, phase))

    def waiting(self, arrivals: Iterable[int]) -> Iterator[int]:
        """Pass on the arrivals. Waits for them are the data-parallel phase, the time between is the optimizer's."""
        rest = iter(arrivals)
        while True:
            self.begin(DATA_PARALLEL)
            index = next(rest, None)
            self.begin(OPTIMIZER)
            if index is None:
                return
            yield index

    def seconds_since(self, before: Moment | None) -> float:
        """Seconds from `before`, the end of the step before, to the end of this one. None: from its own beginning."""
        return seconds_between(self._ended[0][1] if before is None else before, self.ended)

    def seconds(self) -> dict[str, float]:
        """Seconds that the step was in each phase."""
        totals = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in self._ended:
            totals[phase] += end() - start()
        return totals

    def spans(self, stage: int) -> list[Span]:
        """Every time that the step was in a phase, but for the passes, which the pipeline's tasks show."""
        return [Span(stage, phase, phase, start(), end()) for phase, start, end in self._ended if phase != PASSES]
