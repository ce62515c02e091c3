"""A measure's result for a reader: as plain facts for JSON, and as a table of lines."""

from __future__ import annotations

import math
from typing import Protocol

Fact = str | int | float | None


class Result(Protocol):
    """What a measure found."""

    @property
    def facts(self) -> dict[str, str | int | float]:
        """By name, in the order in which they are shown."""


def facts_of(result: Result) -> dict[str, Fact]:
    """The result by name. What is not finite is None: JSON has no word for it."""
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in result.facts.items()
    }


def table_of(facts: dict[str, Fact]) -> str:
    """One fact a line."""
    width = max(map(len, facts))
    return "\n".join(f"{key.replace('_', ' '):<{width}}  {_shown(value)}" for key, value in facts.items())


def _shown(value: Fact) -> str:
    if value is None:
        return "not finite"
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value
