"""The phases of a step on one rank, one after the other.

| phase | from | to |
|---|---|---|
| passes | the first microbatch's forward pass | the last task of the last backward pass |
| data_parallel | the first wait for gradient sums | all sums are received |
| optimizer | norm, clipping, the step | the new parameters are published |

An optimizer that steps some parameters while other gradients are still reduced alternates between two phases. Between
the phases the next batch is loaded, and the ranks exchange the step report.
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
    """A clock of one step's phases in the device's time. Each phase is also entered in the flight recorder."""

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
        """End the current phase, and begin `phase`; None: no phase begins."""
        now = self._watch.now()
        if self._running is not None:
            self._ended.append((*self._running, now))
            self.ended = now
        self._running = None if phase is None else (phase, now)
        self._recorder.enter(BETWEEN if phase is None else PHASE_WORDS.get(phase, phase))

    def waiting(self, arrivals: Iterable[int]) -> Iterator[int]:
        """Yield the arrivals. Waits for an arrival count as data_parallel, the time between waits as optimizer."""
        rest = iter(arrivals)
        while True:
            self.begin(DATA_PARALLEL)
            index = next(rest, None)
            self.begin(OPTIMIZER)
            if index is None:
                return
            yield index

    def seconds_since(self, before: Moment | None) -> float:
        """Return seconds from `before`, the previous step's end, to this step's end; None: from this step's start."""
        return seconds_between(self._ended[0][1] if before is None else before, self.ended)

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase."""
        totals = dict.fromkeys(PHASES, 0.0)
        for phase, start, end in self._ended:
            totals[phase] += end() - start()
        return totals

    def spans(self, stage: int) -> list[Span]:
        """Return the spans of all phases except passes, which the pipeline's tasks show."""
        return [Span(stage, phase, phase, start(), end()) for phase, start, end in self._ended if phase != PASSES]
