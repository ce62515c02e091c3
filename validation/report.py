"""Findings as tables on the terminal."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from validation.case import Finding
from validation.paper import Paper

_CONSOLE = Console(highlight=False, width=120)


def show(paper: Paper, finding: Finding) -> None:
    """A row each; the claims; what was assumed."""
    table = Table("", "", "published", "predicted", "error", title=f"{paper.title} ({paper.cluster.name})")
    for row in finding.rows:
        error = f"{row.error:+.1%}" if row.counts else "taken"
        table.add_row(row.label, row.quantity, f"{row.published:,.4g}", f"{row.predicted:,.4g}", error)
    _CONSOLE.print(table)
    for name, mean in finding.by_quantity().items():
        _CONSOLE.print(f"  mean error of {name}: {mean:.1%}")
    for claim in finding.claims:
        _CONSOLE.print(f"  {'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.text} (found: {claim.found})")
    for sentence in paper.assumed:
        _CONSOLE.print(f"  assumed: {sentence}")
    _CONSOLE.print()


def summary(found: Mapping[str, Finding]) -> None:
    """The mean absolute percentage error of each paper."""
    table = Table("paper", "rows", "mean error", "claims that hold")
    for name, finding in found.items():
        rows = sum(row.counts for row in finding.rows)
        held = sum(claim.holds for claim in finding.claims)
        table.add_row(name, str(rows), f"{finding.mean_error:.1%}", f"{held} of {len(finding.claims)}")
    _CONSOLE.print(table)
