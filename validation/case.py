"""A comparison with a paper: rows with a number each, claims that hold or do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`published` and `predicted` are in the unit that `quantity` names.

    Attributes:
    counts: Whether the row is part of the paper's mean error. A row used to fix an unpublished number, or without a
        comparable prediction, is shown and does not count.
    fitted: Whether a figure used by the prediction was chosen by the paper's rows.
    """

    label: str
    quantity: str
    published: float
    predicted: float
    counts: bool = True
    fitted: bool = False

    @property
    def error(self) -> float:
        """Return the error relative to the published figure."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Claim:
    """A claim of the paper about an order, and whether the planner finds the order too.

    `found`: the order in the planner's words. `counts`: false for an order that has chosen a fit.
    """

    text: str
    holds: bool
    found: str
    counts: bool = True


@dataclass(frozen=True)
class Finding:
    """The rows and claims of one paper."""

    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()

    @property
    def mean_error(self) -> float:
        """Return the mean of the rows' absolute relative errors."""
        return mean_error(self.rows)

    def by_quantity(self) -> dict[str, float]:
        """Return the mean error of each quantity."""
        names = dict.fromkeys(row.quantity for row in self.rows if row.counts)
        return {name: mean_error([row for row in self.rows if row.quantity == name]) for name in names}


def mean_error(rows: Sequence[Row]) -> float:
    """Return the mean error of the rows that count."""
    errors = [abs(row.error) for row in rows if row.counts]
    assert errors, "no row counts"
    return sum(errors) / len(errors)
