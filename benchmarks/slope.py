"""Growth of a figure with a size, in words: a power fitted to measured points, and the size of a bend.

| power of the size | word            |
|-------------------|-----------------|
| below -0.1        | falls           |
| to 0.1            | flat            |
| to 0.9            | below linear    |
| to 1.1            | linear          |
| to 1.9            | above linear    |
| to 2.1            | quadratic       |
| above             | above quadratic |
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

WORDS = {
    -0.1: "falls", 0.1: "flat", 0.9: "below linear", 1.1: "linear", 1.9: "above linear", 2.1: "quadratic",
    math.inf: "above quadratic",
}  # fmt: skip
BEND = 0.3
"""The least difference of two powers that counts as a bend."""


@dataclass(frozen=True)
class Slope:
    """value ~ size ** power over all points."""

    power: float
    last: float
    """The power over the last two points."""
    before: float
    """The power below the bend."""
    after: float
    """The power above the bend."""
    bend: float | None
    """A size, or None."""

    @property
    def words(self) -> str:
        """Return a text such as: linear, x 2.04 a doubling (1.02 of linear), x 2.01 the last."""
        said = f"{word_of(self.power)}, {_doubling(self.power)}, x {2**self.last:.2f} the last"
        if self.bend is None:
            return said
        sides = f"x {2**self.before:.2f} a doubling before, x {2**self.after:.2f} after"
        return f"{said}; bends at {self.bend:,g}: {sides}"


def word_of(power: float) -> str:
    """Return the word of a power."""
    return next(word for most, word in WORDS.items() if power <= most)


def _doubling(power: float) -> str:
    said = f"x {2**power:.2f} a doubling"
    return said if power < 0.5 else f"{said} ({2 ** (power - 1):.2f} of linear)"


def fit(sizes: Sequence[float], values: Sequence[float]) -> Slope:
    """Fit the power by least squares of log value against log size, and a bend at the point with the least error.

    Each side of a bend has at least two points, with the point of the bend on both.

    Raises:
        ValueError: There are fewer than two points.
    """
    if len(sizes) < 2:
        raise ValueError(f"{len(sizes)} points have no slope: measure two sizes and more")
    x, y = [math.log2(size) for size in sizes], [math.log2(value) for value in values]
    power, _ = _line(x, y)
    last = (y[-1] - y[-2]) / (x[-1] - x[-2])
    sides = {at: (_line(x[: at + 1], y[: at + 1]), _line(x[at:], y[at:])) for at in range(1, len(x) - 1)}
    if sides:
        at = min(sides, key=lambda position: sides[position][0][1] + sides[position][1][1])
        (before, _), (after, _) = sides[at]
        if abs(after - before) >= BEND:
            return Slope(power, last, before, after, sizes[at])
    return Slope(power, last, power, power, None)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Return the slope of a line through points, and the sum of squared residuals."""
    slope, start = statistics.linear_regression(x, y)
    return slope, sum((value - start - slope * position) ** 2 for position, value in zip(x, y, strict=True))
