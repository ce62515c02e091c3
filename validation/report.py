"""Findings as tables on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from validation.case import Finding
from validation.paper import Paper
from validation.public import Judged
from validation.scatter import sentence


@dataclass(frozen=True)
class Result:
    """A paper and its findings. `unfitted`: the mean error with the unchanged cluster, if the paper has a fit."""

    paper: Paper
    finding: Finding
    unfitted: float | None

    @property
    def holds(self) -> bool:
        """Return whether the result is within docs/validation.md's limits."""
        return self.finding.mean_error <= self.paper.limit and all(
            claim.holds for claim in self.finding.claims if claim.counts
        )


def show(result: Result) -> None:
    """Print each row, predicted or fitted; the claims; the assumptions. An error in brackets does not count."""
    console, paper, finding = _console(), result.paper, result.finding
    table = Table("", "", "published", "planner", "error", "", title=f"{paper.title} ({paper.cluster.name})")
    for row in finding.rows:
        error = f"{row.error:+.1%}" if row.counts else f"({row.error:+.1%})"
        kind = "fitted" if row.fitted else "predicted"
        table.add_row(row.label, row.quantity, f"{row.published:,.4g}", f"{row.predicted:,.4g}", error, kind)
    console.print(table)
    for name, mean in finding.by_quantity().items():
        console.print(f"  mean error, {name}: {mean:.1%}")
    for claim in finding.claims:
        verdict = "holds" if claim.holds else "DOES NOT HOLD"
        verdict = verdict if claim.counts else f"no claim, since a fit was chosen by it ({verdict})"
        console.print(f"  {verdict}: {claim.text}; found: {claim.found}")
    for taken in paper.assumed:
        console.print(f"  assumed: {taken}")
    console.print()


def summary(results: Sequence[Result]) -> None:
    """Print the mean absolute percentage error of each paper."""
    table = Table("paper", "rows", "mean error", "admitted", "by the cluster's file", "claims that hold")
    for result in results:
        finding = result.finding
        rows = sum(row.counts for row in finding.rows)
        claims = [claim.holds for claim in finding.claims if claim.counts]
        held = f"{sum(claims)} of {len(claims)}" if claims else "-"
        unfitted = "the same" if result.unfitted is None else f"{result.unfitted:.1%}"
        admitted = f"{result.paper.limit:.0%}"
        table.add_row(result.paper.name, str(rows), f"{finding.mean_error:.1%}", admitted, unfitted, held)
    _console().print(table)


def show_sets(judged: Sequence[Judged], *, rows: bool) -> None:
    """Print a line a set of public rows, and the missing facts; `rows`: every row as well."""
    console = _console()
    for each in judged:
        console.print(f"{each.rows_set.title}: {sentence(each)}")
        for fact, number in each.said.most_common():
            console.print(f"  not said of {number}: {fact}")
        for told in each.rows_set.assumed:
            console.print(f"  assumed: {told}")
        for row in each.rows if rows else ():
            words = [row.missing or row.doubtful or row.fits]
            if row.seconds is not None and row.measured_seconds is not None:
                words.append(f"{row.measured_seconds:.4g} s, predicted {row.seconds:.4g} ({row.seconds_error:+.1%})")
            if row.bytes is not None and row.measured_bytes is not None:
                words.append(f"memory {row.bytes / row.measured_bytes - 1:+.1%}")
            console.print(f"    {row.label}: {'; '.join(words)}")
    timed = [row for each in judged for row in each.timed]
    if timed:
        mean = sum(abs(row.seconds_error) for row in timed) / len(timed)
        signed = sum(row.seconds_error for row in timed) / len(timed)
        all_rows = sum(len(each.rows) for each in judged)
        console.print(f"All {len(timed)} of {all_rows} public rows: {mean:.1%} off on average, {signed:+.1%} signed")


def _console() -> Console:
    return Console(highlight=False, markup=False, width=120)
