"""A console for texts from outside: names of files, hosts, layouts and runs are printed unchanged.

rich reads `[red]` in a text as markup and `:rocket:` as a picture, and a terminal obeys escape sequences. Here every
text is printed letter by letter, and a control character as an escape (streams.py). Styles are set by `style=`, never
inside of a text.
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
    """rich's console, without markup, pictures and escape sequences in printed texts."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Make a Text of a string. rich calls this for every printed string and every cell of a table."""
        return super().render_str(visible(text), **{**options, "markup": False, "emoji": False})


def console(file: TextIO | None = None, *, width: int | None = None, quiet: bool = False) -> PlainConsole:
    """Make a console that writes to `file`, by default stdout, and survives a closed pipe."""
    stream = cast(TextIO, PatientStream(sys.stdout if file is None else file))
    return PlainConsole(file=stream, highlight=False, markup=False, emoji=False, width=width, quiet=quiet)


def table_console() -> PlainConsole:
    """Make a console for wide tables: the width of the terminal, or PIPED_COLUMNS if stdout is no terminal."""
    return console(width=None if sys.stdout.isatty() else PIPED_COLUMNS)
