"""Foreign texts on a stream or a terminal: each letter is printed, no escape sequence acts, no text ends the run."""

from __future__ import annotations

import ast
import io
import re
from functools import cache
from pathlib import Path
from typing import TextIO, cast

import pytest
from rich.table import Table

from meshwright.output import terminal
from meshwright.ranks.streams import PatientStream, say, visible

PACKAGE = Path(__file__).resolve().parents[2] / "meshwright"

CONTROLS = {
    "\x1b[2J\x1b[31mred": r"\x1b[2J\x1b[31mred",
    "\x07bell\x08back": r"\x07bell\x08back",
    "over\rwritten": r"over\rwritten",
    "\x9b31m": r"\x9b31m",  # C1's escape sequence
    "\x7fdelete": r"\x7fdelete",
    "\u202egpj.exe": r"\u202egpj.exe",
    "\u2066isolated\u2069": r"\u2066isolated\u2069",
    "a\u2028b": r"a\u2028b",
    "é 字 🚀\ta\nb": "é 字 🚀\ta\nb",
    "": "",
}


@pytest.mark.parametrize("text", CONTROLS, ids=repr)
def test_control_characters_are_seen(text: str) -> None:
    assert visible(text) == CONTROLS[text]
    written = io.StringIO()
    say(text, file=written)
    assert written.getvalue() == CONTROLS[text] + "\n"


def ascii_stream() -> tuple[io.BytesIO, TextIO]:
    held = io.BytesIO()
    return held, io.TextIOWrapper(held, encoding="ascii", errors="strict")


def test_a_character_that_the_encoding_lacks_is_its_escape() -> None:
    held, stream = ascii_stream()
    say("out_ü 字 \udce9", file=stream)
    stream.flush()
    assert held.getvalue() == rb"out_\xfc \u5b57 \udce9" + b"\n"


def test_a_bar_and_a_table_are_drawn_in_ascii() -> None:
    held, stream = ascii_stream()
    table = Table("ü", title="é")
    table.add_row("字")
    terminal.console(stream).print(table)
    stream.flush()
    assert b"+" in held.getvalue()
    assert rb"\u5b57" in held.getvalue()


NAMES = [
    "o4[/x]",
    "o3[red]",
    "[bold]b[/bold]",
    "[link=http://x]y[/link]",
    ":rocket:",
    r"a\[b",
    "[",
    "[/]",
    "\x1b[31mx",
    "\u202ex",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_shown_whole(name: str) -> None:
    """A name is printed unchanged in a print, a cell, a head and a title: as no markup, picture or escape sequence."""
    for forced in (False, True):
        written = io.StringIO()
        console = terminal.PlainConsole(file=cast(TextIO, PatientStream(written)), force_terminal=forced, width=200)
        table = Table(f"head {name}", title=f"title {name}")
        table.add_row(f"cell {name}", style="bold")
        console.print(table)
        console.print(f"print {name}", soft_wrap=True)
        plain = re.sub("\x1b\\[[0-9;]*m", "", written.getvalue())
        for place in ("head", "title", "cell", "print"):
            assert f"{place} {visible(name)}" in plain


@cache
def calls() -> list[tuple[str, ast.Call]]:
    return [
        (str(path.relative_to(PACKAGE)), node)
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]


def test_one_console_is_made_for_all_texts() -> None:
    made = {
        path for path, call in calls() if ast.unparse(call.func) in ("Console", "rich.console.Console", "rich.print")
    }
    assert made == set()
    marked = [
        (path, ast.unparse(call)) for path, call in calls()
        if ast.unparse(call.func).endswith("TextColumn") and "markup=False" not in ast.unparse(call)
    ]  # fmt: skip
    assert marked == []
    assert [path for path, call in calls() if ast.unparse(call.func) in ("Text.from_markup", "Text.from_ansi")] == []


SILENT = {
    "ranks/streams.py": "`say` itself",
    "cli/weights.py": "JSON, and a generated text, by whether it goes to a terminal",
    "tools/submit/ray_ranks.py": "an actor's numbers",
}


def test_prints_are_of_texts_that_are_escaped() -> None:
    """`print` writes JSON and fixed texts; a text that may be foreign is written by `say`."""
    mistakes = [
        f"{path}:{call.lineno} {ast.unparse(call)[:80]}" for path, call in calls()
        if ast.unparse(call.func) == "print" and path not in SILENT
        and not (call.args and ast.unparse(call.args[0]).startswith("json.dumps"))
    ]  # fmt: skip
    assert [mistake for mistake in mistakes if "__version__" not in mistake] == []
