"""The verdict of `verify --generate` as a table for a terminal and as a dict for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from meshwright.output import terminal
from meshwright.output.tables import print_table
from meshwright.tools.verify.generated import Generated


def as_dict(found: Generated) -> dict[str, Any]:
    """Return the verdict for `--json`: every way, and the notes."""
    ways = [{**asdict(way), "holds": way.holds} for way in found.ways]
    return {**asdict(found), "ways": ways, "holds": found.holds}


def render(found: Generated) -> None:
    """Print a row for each way, the notes and the verdict."""
    title = (
        f"{found.tokens:,} tokens after {found.prompts} prompts, weights of step {found.steps}, grains of {found.grain}"
    )
    right = [Column(name, justify="right") for name in ("tokens", "differ", "largest difference", "tokens/s")]
    table = Table("log-probabilities by", *right, "", title=title)
    for way in found.ways:
        speed = "" if way.seconds is None else f"{way.tokens / way.seconds:,.0f}"
        mark = ("holds" if way.holds else "FAILS") if way.demanded else "not promised"
        table.add_row(way.name, f"{way.tokens:,}", f"{way.differing:,}", f"{way.largest:.1e}", speed, mark)
    console = terminal.console()
    print_table(console, table)
    for note in found.notes:
        console.print(f"left out: {note}")
    console.print("PASS: generation is training's forward pass" if found.holds else "FAIL")
