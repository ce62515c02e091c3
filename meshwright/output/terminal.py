"""A console for texts that are not ours: names of files, hosts, layouts and runs are shown as they are.

rich reads `[red]` in a text as markup, `:rocket:` as a picture, and a terminal obeys the escape sequences in it. Here
every text is printed letter by letter, and a control character as its escape (streams.py). Styles are given by words
of ours (`style=`), never within a text.
"""

from __future__ import annotations

import sys
from typing import Any, TextIO, cast

from rich.console import Console
from rich.text import Text

from meshwright.ranks.streams import PatientStream, visible

PIPED_COLUMNS = 140
"""Columns of a wide table if stdout is a pipe or a file."""


class PlainConsole(Console):
    """rich's console without markup, pictures and escape sequences of a printed text's own."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a text of a string, as every string in a print or a table's cell is made."""
        return super().render_str(visible(text), **{**options, "markup": False, "emoji": False})


def console(file: TextIO | None = None, *, width: int | None = None, quiet: bool = False) -> PlainConsole:
    """Make a console that writes to `file`, by default stdout, and outlives its reader."""
    stream = cast(TextIO, PatientStream(sys.stdout if file is None else file))
    return PlainConsole(file=stream, highlight=False, markup=False, emoji=False, width=width, quiet=quiet)


def table_console() -> PlainConsole:
    """Make a console for wide tables: as wide as the terminal, or PIPED_COLUMNS wide if stdout is none."""
    return console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
