"""Pictures drawn from the metrics of runs, and tables on a terminal."""

from __future__ import annotations

import sys

from meshwright import terminal

LINE_COLOURS = ("#2b6cb0", "#d9480f", "#2f9e44", "#9c36b5", "#e0a800", "#0c8599", "#c2255c", "#5c5f66")
"""Colours of runs, layouts and strategies in pictures, in their order."""

_COLUMNS = 140


def table_console() -> terminal.PlainConsole:
    """A console for wide tables: a terminal's width or, where there is none (a pipe, a log), 140 columns."""
    return terminal.console(width=None if sys.stdout.isatty() else _COLUMNS)
