"""Tables at 80 columns: every word of a name is whole on some line, and no text is markup."""

from __future__ import annotations

import ast
import random
import re
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Column, Table
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.output import terminal
from meshwright.output.tables import WORDS, broken, print_table
from meshwright.ranks.flight_recorder import Whereabouts
from meshwright.ranks.hang import Record
from meshwright.training import status
from meshwright.training.status import RunStatus
from tests.tools.compare.runs import comparison, contender, rank, run

PACKAGE = Path(__file__).resolve().parents[2] / "meshwright"
WIDTH = 80
NAMES = (
    "exp_avg of blocks.1.feed_forward_norm.weight",
    "embeddings.word_embeddings.weight",
    "allreduce",
    "/shared/projects/first-of-many/checkpoints/step-1200",
    "[red]",
    "a [/x] b",
    "gradients of all replicas, summed over data",
)


def words_of(text: str) -> list[str]:
    return [word.strip() for word in WORDS.findall(text) if word.strip()]


def printed(table: Table, width: int) -> str:
    console = Console(width=width, highlight=False, record=True, file=StringIO())
    print_table(console, table)
    return console.export_text()


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("width", [24, 40, 60, WIDTH, 140])
def test_words_are_whole_at_every_width(width: int, seed: int) -> None:
    draw = random.Random(seed)
    count = draw.randint(1, 9)
    headers = draw.choices(["last sign of life", "rank", "checkpoint", "", "over"], k=count)
    table = Table(*(Column(name, justify="right") for name in headers), title="a long title " * 9)
    rows = [draw.choices(NAMES, k=count) for _ in range(4)]
    for row in rows:
        table.add_row(*row)
    text = printed(table, width)
    lines = text.splitlines()
    for word in {word for row in (headers, *rows) for cell in row for word in words_of(cell)}:
        assert any(word in line for line in lines), (word, text)
    if "━" in text or "──" in text:  # a list's lines have the length of the texts
        assert max(map(len, lines)) <= width


def test_a_text_without_words_to_break_at_stays_as_it_is() -> None:
    assert broken("exp_avg of blocks.1.weight", 12) == "exp_avg of\nblocks.1.\nweight"
    assert broken("", 4) == ""
    assert broken("feed_forward_norm", 4) == "feed_forward_norm"


def test_all_tables_are_printed_by_one_function() -> None:
    """rich's print breaks names. The doctor's table has no frame, and breaks texts by `broken`."""
    for path in PACKAGE.rglob("*.py"):
        names = {
            (node.module, alias.name)
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        if ("rich.table", "Table") in names and path.name != "tables.py":
            assert {("meshwright.output.tables", "print_table"), ("meshwright.output.tables", "broken")} & names, path


def test_the_status_of_a_run_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    where = Whereabouts(step=1200, phase="gradient_sync", task="W12", waiting=(), begun={})
    records = tuple(Record(n, 2, 0, f"node-{n}[x]", 123456 + n, "running", 0.0, 0.0, where) for n in range(2))
    status.render(RunStatus("alive", Path("out/first"), records, frozenset({0, 1}), None, 2000))
    text = capsys.readouterr().out
    for word in ("gradient_sync", "node-0[x]", "node-1[x]", "123457", "process", "sign"):
        assert word in text, text


def test_a_comparison_at_80_columns(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from meshwright.tools.compare import report

    monkeypatch.setattr(report, "table_console", lambda: terminal.console(width=WIDTH))
    fine = run((1, 1, 0.5, 0.5), (5.0, 4.0, 3.0, 2.0), [rank(0)])
    names = ("message-driven-experts", "zero3[/x]")
    report.render(comparison(*(report.Measurement(contender(name), (fine,)) for name in names)))
    text = capsys.readouterr().out
    assert all(name in text for name in names), text


@pytest.mark.parametrize(
    "words, names",
    [
        (
            ["explain", "quickstart", "layout.pipeline=2", "layout.tensor=megatron", "layout.tensor.size=2"],
            ["feed_forward_norm.", "message-driven", "microbatches"],
        ),
        (["doctor"], ["machine", "version"]),
    ],
)
def test_commands_at_80_columns(words: list[str], names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    ran = CliRunner().invoke(app, words)
    assert ran.exit_code == 0, ran.output
    for name in names:
        assert name in ran.output, ran.output
    # No line of a cell ends inside of a word: the column's next line would begin with the rest.
    tables = [line for line in ran.output.splitlines() if line.startswith("│")]
    for cell in (cell for line in tables for cell in line.strip("│").split("│")):
        assert not re.search(r"\w_$", cell.rstrip()), cell
