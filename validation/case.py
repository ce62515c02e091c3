"""A comparison with a paper: rows with a number each, claims that hold or do not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """`published` and `predicted`: in the unit that `quantity` names. `counts`: whether it is part of the paper's mean
    error; a row that was taken to fix an unpublished number, or that cannot be compared, is shown and does not.
    `fitted`: whether a figure behind the prediction was chosen by the paper's rows."""

    label: str
    quantity: str
    published: float
    predicted: float
    counts: bool = True
    fitted: bool = False

    @property
    def error(self) -> float:
        """Relative to what was published."""
        return self.predicted / self.published - 1


@dataclass(frozen=True)
class Claim:
    """A claim of the paper about an order, which the planner makes too or does not. `found`: in the planner's words.
    `counts`: false for an order by which a fit was chosen."""

    text: str
    holds: bool
    found: str
    counts: bool = True


@dataclass(frozen=True)
class Finding:
    """All of one paper."""

    rows: tuple[Row, ...]
    claims: tuple[Claim, ...] = ()

    @property
    def mean_error(self) -> float:
        """The mean of the rows' absolute relative errors."""
        return mean_error(self.rows)

    def by_quantity(self) -> dict[str, float]:
        """The same for each quantity."""
        names = dict.fromkeys(row.quantity for row in self.rows if row.counts)
        return {name: mean_error([row for row in self.rows if row.quantity == name]) for name in names}


def mean_error(rows: Sequence[Row]) -> float:
    """The mean error of the rows that count."""
    errors = [abs(row.error) for row in rows if row.counts]
    assert errors, "no row counts"
    return sum(errors) / len(errors)
