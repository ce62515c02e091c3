"""The reports of long work: a text, and the share done (0 to 1, None where unknown). The caller draws it."""

from __future__ import annotations

from collections.abc import Callable

ShowProgress = Callable[[str, float | None], None]


def silent(text: str, done: float | None) -> None:
    """Reports nothing."""
