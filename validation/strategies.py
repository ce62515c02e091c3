"""Errors by strategy: python -m validation.strategies [SET ...]

A strategy is a row's first cut of these: experts, stages, context, tensor; else data. A line a strategy: rows, the
signed errors of seconds and of memory, rows of memory within 5 and 10 %, and the share beyond the prediction that 95 %
of the rows do not exceed. A layout is tight by this share (configs/software, memory.by).

A second table has the rows with experts on several ranks, by model and by how rows are sent to experts: signed and
mean errors of seconds, the least and the greatest, and the rows within 12 %.

A third table counts the rows that ran and "do not fit" in a plan, by the memory that their recipes spare and no plan
knows (`spared` in sets.yaml, each with a source).
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from validation.paper import Line, read_table
from validation.public import FOLDER, PublicRow, RowSet, judge, load_sets

CUTS = (("ep", "experts"), ("pp", "stages"), ("cp", "context"), ("tp", "tensor"))
QUANTILE = 0.95
NEAR = 0.12


def strategy(line: Line) -> str:
    """Return `experts` for a row with cut experts, else `stages` for a row with stages, and so on, at last `data`."""
    return next((name for column, name in CUTS if line[column] not in ("", "1")), "data")


def quantile(values: Sequence[float]) -> float:
    """Return the least of the values that QUANTILE of the values do not exceed."""
    return sorted(values)[math.ceil(QUANTILE * len(values)) - 1]


def by_strategy(lines: Sequence[Line], rows: Sequence[PublicRow]) -> dict[tuple[str, str], list[PublicRow]]:
    """Return rows with a prediction, by device and strategy."""
    found: dict[tuple[str, str], list[PublicRow]] = defaultdict(list)
    for line, row in zip(lines, rows, strict=True):
        if row.seconds is not None:
            found[line["device"], strategy(line)].append(row)
    return dict(sorted(found.items()))


def by_dispatcher(lines: Sequence[Line], rows: Sequence[PublicRow]) -> dict[tuple[str, str], list[PublicRow]]:
    """Return rows with predicted and measured seconds, by model and dispatcher; and by dispatcher alone."""
    found: dict[tuple[str, str], list[PublicRow]] = defaultdict(list)
    for line, row in zip(lines, rows, strict=True):
        if row.dispatch and row.seconds is not None and row.measured_seconds is not None:
            found[line["model"], row.dispatch].append(row)
            found["all", row.dispatch].append(row)
    return dict(sorted(found.items(), key=lambda item: (item[0][0] == "all", item[0])))


def not_fitting(lines: Sequence[Line], rows: Sequence[PublicRow], rows_set: RowSet) -> dict[str, list[PublicRow]]:
    """Return rows that ran and do not fit in a plan, by the memory in the first recipe of `spared`, or `not known`."""
    found: dict[str, list[PublicRow]] = defaultdict(list)
    for line, row in zip(lines, rows, strict=True):
        if row.fits == "does not fit" and not row.ran_out:
            found[next((recipe.held for recipe in rows_set.spared if recipe.fits(line)), "not known")].append(row)
    return dict(found)


def beyond(rows: Sequence[PublicRow]) -> list[float]:
    """Return the shares by which rows exceed their predictions, 0 for rows below the prediction."""
    return [max(0.0, row.measured_bytes / row.bytes - 1) for row in rows if row.bytes and row.measured_bytes]


def main() -> None:
    sets = load_sets()
    parser = argparse.ArgumentParser(description="Signed errors by strategy.")
    parser.add_argument("names", nargs="*", metavar="SET", choices=[*sets, []], help="; all of them")
    table = Table("set", "device", "strategy", "rows", "seconds", "memory", "within 5, 10 %", "95 % hold at most")
    sent = Table("set", "model", "rows to experts", "rows", "signed", "mean", "from", "to", "within 12 %")
    lacking = Table("set", "rows that ran and do not fit", "spared by their recipes, in no plan")
    for name in parser.parse_args().names or sets:
        lines = list(read_table(FOLDER / f"{name}.csv"))
        judged = judge(name, sets[name]).rows
        groups = by_strategy(lines, judged)
        for told in dict.fromkeys(each for _, each in groups):
            every = [row for (_, kind), rows in groups.items() if kind == told for row in rows]
            groups["all", told] = every
        for (device, told), rows in groups.items():
            timed = [row.seconds_error for row in rows if row.measured_seconds is not None]
            errors = [row.bytes / row.measured_bytes - 1 for row in rows if row.bytes and row.measured_bytes]
            near = ", ".join(str(sum(abs(error) <= most for error in errors)) for most in (0.05, 0.1))
            means = [f"{math.fsum(each) / len(each):+.1%}" if each else "" for each in (timed, errors)]
            most = f"{quantile(beyond(rows)):.1%}" if errors else ""
            table.add_row(name, device, told, str(len(rows)), *means, near if errors else "", most)
        for held, rows in not_fitting(lines, judged, sets[name]).items():
            lacking.add_row(name, str(len(rows)), held)
        for (model, dispatch), rows in by_dispatcher(lines, judged).items():
            errors = [row.seconds_error for row in rows]
            means = [math.fsum(each) / len(rows) for each in (errors, map(abs, errors))]
            figures = f"{means[0]:+.1%}", f"{means[1]:.1%}", f"{min(errors):+.1%}", f"{max(errors):+.1%}"
            near = str(sum(abs(error) <= NEAR for error in errors))
            sent.add_row(name, model, dispatch, str(len(rows)), *figures, near)
    console = Console(highlight=False, width=120)
    console.print(table)
    for other in (sent, lacking):
        if other.row_count:
            console.print(other)


if __name__ == "__main__":
    main()
