"""Tables on a terminal of any width: a name is broken at its dots and slashes, never inside of a word.

rich breaks a word that is wider than the column. `print_table` gives every column at least the width of its longest
word. If the terminal is too narrow for these widths, each row becomes a list with a line for each column.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rich.box import HEAVY_HEAD, SIMPLE_HEAD, Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright.ranks.streams import visible

WORDS = re.compile(r"\s+|[^\s./,:]+[./,:]*|[./,:]+")
"""Blanks, or a word with the separators after the word. A line may be broken after each match."""


@dataclass(frozen=True)
class Form:
    """A frame of a table. `edge`: columns of the left and right side; `between`: columns between two cells."""

    box: Box
    edge: int
    between: int


FORMS = (Form(HEAVY_HEAD, 4, 3), Form(SIMPLE_HEAD, 2, 2))
"""A form with a frame; a form without one, for narrow terminals."""


def print_table(console: Console, table: Table) -> None:
    """Print a table of texts in the first form that fits the console: with a frame, without one, or a list a row.

    Markup in cells is printed as text.
    """
    columns = [[plain(column.header), *map(plain, column.cells)] for column in table.columns]
    least = [max((cell_len(word) for cell in cells for word in WORDS.findall(cell)), default=0) for cells in columns]
    natural = [max(cell_len(line) for cell in cells for line in cell.split("\n")) for cells in columns]
    for form in FORMS:
        room = console.width - form.edge - form.between * (len(columns) - 1)
        if sum(least) <= room:
            console.print(framed(table, columns, shares_of(natural, least, room), form))
            return
    print_lists(console, table, columns)


def plain(cell: object) -> str:
    """Return a cell's text with visible control characters."""
    return visible(cell.plain if isinstance(cell, Text) else str(cell))


def shares_of(natural: Sequence[int], least: Sequence[int], room: int) -> list[int]:
    """Choose the widths of columns: from the natural widths, the widest column shrinks until all fit into `room`.

    No column becomes narrower than `least`.
    """
    widths = list(natural)
    while sum(widths) > room:
        widest = max((at for at, width in enumerate(widths) if width > least[at]), key=lambda at: widths[at])
        widths[widest] -= 1
    return widths


def framed(table: Table, columns: Sequence[Sequence[str]], widths: Sequence[int], form: Form) -> Table:
    """Make a copy of the table with columns of these widths, and line breaks inserted in the cells."""
    edge = form.edge // 4  # a frame has a blank on the inside
    made = Table(
        title=None if table.title is None else Text(plain(table.title), style="table.title"), box=form.box,
        show_header=table.show_header, pad_edge=bool(edge), padding=(0, 1) if edge else (0, 0),
    )  # fmt: skip
    for column, cells, width in zip(table.columns, columns, widths, strict=True):
        header = Text(broken(cells[0], width))
        made.add_column(header, justify=column.justify, width=width, no_wrap=True)
    for row, cells in zip(table.rows, zip(*(cells[1:] for cells in columns), strict=True), strict=True):
        texts = (Text(broken(cell, width)) for cell, width in zip(cells, widths, strict=True))
        made.add_row(*texts, end_section=row.end_section)
    return made


def broken(cell: str, width: int) -> str:
    """Break a text between words into lines of at most `width` columns."""
    lines = []
    for text in cell.split("\n"):
        line = ""
        for word in WORDS.findall(text):
            if line and cell_len(line + word.rstrip()) > width:
                lines.append(line.rstrip())
                line = ""
            line += word if line or word.strip() else ""
        lines.append(line.rstrip())
    return "\n".join(lines)


def print_lists(console: Console, table: Table, columns: Sequence[Sequence[str]]) -> None:
    """Print each row as a list: the first cell, then a line for each other column with a text."""
    if table.title is not None:
        console.print(Text(plain(table.title), style="table.title"), soft_wrap=True)
    headers = [cells[0].replace("\n", " ") for cells in columns]
    for first, *others in zip(*(cells[1:] for cells in columns), strict=True):
        head = f"{headers[0]} {first}" if headers[0] else first
        console.print(Text(head, style="bold"), soft_wrap=True)
        for header, cell in zip(headers[1:], others, strict=True):
            if cell:
                console.print(Text(f"  {header}: {cell}" if header else f"  {cell}"), soft_wrap=True)
