"""The planner's commands: one function each, which cli.py registers; nothing heavy is imported before it is needed."""

from __future__ import annotations

from collections.abc import Callable

COMMANDS: tuple[Callable[..., None], ...] = ()
"""In the order in which the help lists them."""
