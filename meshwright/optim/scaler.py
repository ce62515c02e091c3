"""Dynamic loss scaling (Micikevicius et al., arXiv 1710.03740): fp16 gradients are kept out of the underflow."""

from __future__ import annotations

from dataclasses import dataclass

SMALLEST = 2.0**-24
"""fp16's own smallest step: at this scale nothing overflows that is a number."""


@dataclass
class LossScaler:
    """`scale` multiplies the loss. It is halved on an overflow and doubled after `interval` good steps in a row.

    `max_skips`: so many overflows in a row are no matter of scale any more, and end the run.

    Pure bookkeeping on numbers that every rank knows, so that all ranks stay agreed without a message.
    """

    scale: float
    interval: int
    dynamic: bool
    max_skips: int = 1
    good_steps: int = 0
    skips: int = 0
    """Overflows in a row, up to now."""

    @property
    def may_skip(self) -> bool:
        """Whether another overflow may still be a matter of scale."""
        return self.dynamic and self.scale > SMALLEST and self.skips + 1 < self.max_skips

    def update(self, *, overflow: bool) -> None:
        """Take note of a step."""
        if not self.dynamic:
            return
        if overflow:
            self.scale /= 2
            self.good_steps = 0
            self.skips += 1
            return
        self.skips = 0
        self.good_steps += 1
        if self.good_steps == self.interval:
            self.scale *= 2
            self.good_steps = 0
