"""Other estimators on the same public rows: python -m validation.beside [SET ...]

| estimator                 | how the estimator is run                                                                 |
|---------------------------|------------------------------------------------------------------------------------------|
| Megatron's memory formula | the formulas of theoretical_memory_usage.py (Megatron-LM; NeMo's tron, the origin of     |
|                           | Megatron-Bridge), written anew below, on each row with a measured memory                 |
| SimuMax                   | SimuMax's figures and SimuMax's runs, as printed on the page (the rows' notes)           |

The formula covers weights, optimizer and activations under sequence parallelism and selective recomputation. The
formula covers neither context parallelism nor experts on separate ranks, and no seconds. Rows with these, rows that
recompute whole layers, and rows with sizes in a job's arguments alone are left out.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from validation.paper import Line, read_table
from validation.public import FOLDER, PublicRow, RowSet, judge, load_sets

SIZES = ("ffn", "vocab", "seq", "micro", "batch")
"""The columns that the formula needs in addition to layers, width, heads and the layout."""

_SIMUMAX = re.compile(r"SimuMax itself: time ([+-]?[\d.]+)%, memory ([+-]?[\d.]+)%")


@dataclass(frozen=True)
class Beside:
    """An estimator on a set's rows that estimator and planner both cover: errors, predicted over measured less 1."""

    set_name: str
    quantity: str
    estimator: str
    errors: tuple[float, ...]
    ours: tuple[float, ...]


def formula_bytes(line: Line) -> float:
    """Return bytes of weights, optimizer and activations of the most loaded rank, by Megatron's formulas."""
    size = {name: int(line[name] or 1) for name in ("gpus", "tp", "pp", "vpp", "cp", "layers", "hidden", "heads")}
    size |= {name: int(line[name]) for name in SIZES}
    hidden, layers, groups = size["hidden"], size["layers"], int(line["kv_heads"] or line["heads"])
    replicas = size["gpus"] // (size["tp"] * size["pp"] * size["cp"])
    attention = 1 + groups / size["heads"]
    gated = 3 / 2  # SwiGLU, as in all of these rows
    inner = size["ffn"] / hidden
    norms = 2 / hidden + 1 / (layers * hidden)
    in_layers = 2 * layers * hidden**2 * (attention + inner * gated + norms)
    table = hidden * size["vocab"]
    most = (in_layers / size["pp"] + table * (2 if size["pp"] == 1 else 1)) / size["tp"]
    states = most * (6 + 12 / replicas if line["sharding"].startswith("zero1") else 18)
    tokens = size["seq"] * size["micro"]
    kept = tokens * hidden * (18 + 4 * inner) * layers + (8 + hidden) * tokens * size["pp"]
    count = max(1, size["batch"] // (size["micro"] * replicas))
    if size["vpp"] > 1:
        kept *= 1 + (size["pp"] - 1) / (size["pp"] * size["vpp"])
    elif size["pp"] > 1:
        kept *= min(1, count / size["pp"])
    if size["pp"] == 1:
        kept += tokens * hidden * 4 * (1 + size["vocab"] / hidden)
    return states + kept / size["tp"]


def by_formula(name: str, lines: Sequence[Line], rows: Sequence[PublicRow]) -> Beside:
    """Run Megatron's formulas on rows of dense models with a measured memory that keep the layers' activations."""
    own, ours = [], []
    for line, row in zip(lines, rows, strict=True):
        known = int(line["ep"] or 1) == int(line["cp"] or 1) == 1 and not row.missing and all(map(line.get, SIZES))
        if row.measured_bytes and row.bytes and known and line["recompute"] in ("", "none", "selective"):
            own.append(formula_bytes(line) / row.measured_bytes - 1)
            ours.append(row.bytes / row.measured_bytes - 1)
    return Beside(name, "memory", "Megatron's formula", tuple(own), tuple(ours))


def by_simumax(name: str, lines: Sequence[Line], rows: Sequence[PublicRow]) -> list[Beside]:
    """Return SimuMax's errors of seconds and of memory, for rows with both in the note."""
    seconds: list[tuple[float, float]] = []
    memory: list[tuple[float, float]] = []
    for line, row in zip(lines, rows, strict=True):
        if (told := _SIMUMAX.search(line["note"])) and row.seconds and row.bytes and row.measured_bytes:
            seconds.append((float(told[1]) / 100, row.seconds_error))
            memory.append((float(told[2]) / 100, row.bytes / row.measured_bytes - 1))
    return [
        Beside(name, quantity, "SimuMax", tuple(own for own, _ in pairs), tuple(ours for _, ours in pairs))
        for quantity, pairs in (("seconds", seconds), ("memory", memory))
    ]


def compare(name: str, rows_set: RowSet) -> list[Beside]:
    """Return all estimators that cover at least one row of a set."""
    lines, rows = list(read_table(FOLDER / f"{name}.csv")), judge(name, rows_set).rows
    found = [by_formula(name, lines, rows), *by_simumax(name, lines, rows)]
    return [one for one in found if one.errors]


def mean(errors: Sequence[float]) -> float:
    return math.fsum(map(abs, errors)) / len(errors)


def main() -> None:
    sets: Mapping[str, RowSet] = load_sets()
    parser = argparse.ArgumentParser(description="Other estimators beside the planner, on the same rows.")
    parser.add_argument("names", nargs="*", metavar="SET", choices=[*sets, []], help="; all of them")
    names = parser.parse_args().names or sets
    table = Table("set", "of", "rows", "estimator", "its mean error", "signed", "the planner's", "signed")
    for name in names:
        for one in compare(name, sets[name]):
            rows, figures = len(one.errors), (one.errors, one.ours)
            cells = [f"{told}" for each in figures for told in (f"{mean(each):.1%}", f"{math.fsum(each) / rows:+.1%}")]
            table.add_row(name, one.quantity, str(rows), one.estimator, *cells)
    Console(highlight=False, width=120).print(table)


if __name__ == "__main__":
    main()
