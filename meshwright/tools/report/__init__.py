"""What people look at after a run: pictures drawn from its metrics, tables on a terminal."""

from __future__ import annotations

import sys

from rich.console import Console

_COLUMNS = 140


def table_console() -> Console:
    """A console for wide tables: a terminal's width or, where there is none (a pipe, a log), 140 columns."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else _COLUMNS)
