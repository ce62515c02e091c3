"""The learning rate as a pure function of the step, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from meshwright.config.schema import Schedule


def learning_rate(peak: float, schedule: Schedule, step: int, steps: int) -> float:
    """The rate of step `step` (from 0) of `steps`: linear warm-up to the peak, then the decay to floor · peak."""
    if step < schedule.warmup:
        return peak * (step + 1) / schedule.warmup
    progress = min(1.0, (step - schedule.warmup) / max(1, steps - schedule.warmup))
    match schedule.decay:
        case "constant":
            return peak
        case "linear":
            left = 1 - progress
        case "cosine":
            left = (1 + math.cos(math.pi * progress)) / 2
    return peak * (schedule.floor + (1 - schedule.floor) * left)
