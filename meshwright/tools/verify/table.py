"""A verdict as a table for a terminal and as a dict for scripts."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Column, Table

from meshwright.output import terminal
from meshwright.output.tables import print_table
from meshwright.tools.verify.job import Verdict

MOST_FAILURES = 20
LABELS = {
    "initial": "initial weights",
    "loss": "losses",
    "norm": "gradient norms",
    "gradient": "gradients",
    "weight": "weights",
    "state": "optimizer states",
    "bits": "bits, in the run's precision",
}
"""The kinds of comparisons, as named in the table."""


def as_dict(verdict: Verdict) -> dict[str, Any]:
    """Return the verdict for `--json`: every comparison, and the parameters with zero gradients."""
    rows = [{**asdict(row), "holds": row.holds} for row in verdict.rows]
    return {
        "holds": verdict.holds,
        "steps": verdict.steps,
        "comparisons": rows,
        "zero_gradients": list(verdict.zero_gradients),
        "hint": verdict.hint,
        "finding": None if verdict.finding is None else asdict(verdict.finding),
    }


def render(verdict: Verdict) -> None:
    """Print the worst comparison of each kind, and the failed comparisons."""
    config = verdict.config
    precision = f"{config.precision.level} {config.precision.dtype}" + " with fp8" * config.precision.in_fp8
    title = f"{config.layout.summary} against plain torch: relative errors in {precision}, {verdict.steps} steps"
    name = Column("furthest off", overflow="fold")
    table = Table("compared", Column("of", justify="right"), name, "error", "allowed", "", title=title)
    for row_kind, label in LABELS.items():
        rows = [row for row in verdict.rows if row.kind == row_kind]
        if not rows:  # plain SGD has no states
            continue
        worst = verdict.worst(row_kind)
        mark = "holds" if all(row.holds for row in rows) else "FAILS"
        table.add_row(label, str(len(rows)), worst.name, f"{worst.error:.1e}", f"{worst.allowed:.0e}", mark)
    console = terminal.console()
    print_table(console, table)
    for row in verdict.failed[:MOST_FAILURES]:
        # Bits are equal or not: the size of the error has no meaning.
        if row.kind == "bits":
            console.print(f"{row.name}: not the bits of one device")
            continue
        console.print(f"{row.kind} of {row.name}: relative error {row.error:.2e} > {row.allowed:.0e}")
    if len(verdict.failed) > MOST_FAILURES:
        console.print(f"... and {len(verdict.failed) - MOST_FAILURES} more (--json lists all)")
