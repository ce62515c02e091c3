"""A comparison in tables for a terminal, in sentences, and as plain values for a script."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Column, Table

from meshwright.tools.compare.result import WARMUP_STEPS, Comparison, Pair, Row, held_pairs, sent_by_one, sent_pairs

WIDTH = 140
"""Columns, where no terminal says how many there are."""


def as_dict(made: Comparison) -> dict[str, Any]:
    """For `--json`, and for comparison.json. Seconds, bytes; null where nothing was predicted."""
    return {
        "run": made.title,
        "device": made.device,
        "cluster": made.cluster or None,
        "steps": made.steps,
        "untimed_steps": WARMUP_STEPS,
        "rounds": made.rounds,
        "interrupted": made.interrupted or None,
        "unpredicted": made.unpredicted or None,
        "fastest": made.fastest.name if made.measured else None,
        "predicted_fastest": made.foreseen_fastest.name if made.foreseen_fastest is not None else None,
        "mean_error": made.mean_error,
        "layouts": [_row_dict(made, row) for row in made.rows],
    }


def _row_dict(made: Comparison, row: Row) -> dict[str, Any]:
    config = row.entry.config
    facts: dict[str, Any] = {
        "name": row.name,
        "origin": row.entry.origin,
        "layout": config.layout.summary,
        "ranks": config.layout.world_size,
        "threads": row.threads,
        "micro": config.micro,
        "failure": row.failure or None,
        "unpredicted": row.unpredicted or None,
        "rounds": len(row.runs),
        "predicted": asdict(row.predicted) | {"peak_bytes": row.predicted.peak_bytes} if row.predicted else None,
        "measured": None,
    }
    if row.runs:
        difference = made.difference(row)
        facts["error"] = row.error
        facts["losses"] = {
            "difference": difference if math.isfinite(difference) else str(difference),
            "allowed": made.allowed(row),
            "agree": made.agrees(row),
            "dropout": made.drops_out,
        }
        facts["measured"] = _measured_dict(row)
    return facts


def _measured_dict(row: Row) -> dict[str, Any]:
    return {
        "seconds": row.seconds,
        "quartiles": list(row.quartiles),
        "step_seconds": [list(run.seconds) for run in row.runs],
        "losses": [[_plain(loss) for loss in run.losses] for run in row.runs],
        "phases": row.phases,
        "peak_bytes": row.peak_bytes,
        "stages": [
            {
                "rank": facts.rank,
                "held": asdict(facts.held),
                "peak_bytes": facts.peak_bytes,
                "sent": [
                    {"axis": axis, "verb": verb, "calls": calls, "bytes": sent_bytes}
                    for (axis, verb), (calls, sent_bytes) in facts.sent.items()
                ],
            }
            for facts in row.stages
        ],
    }


def _plain(loss: float) -> float | str:
    """JSON has no word for what is no number."""
    return loss if math.isfinite(loss) else str(loss)


def render(made: Comparison) -> None:
    """Times, memory and losses; bytes by part and by axis; and what follows from them."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)
    console.print(_times(made))
    console.print(_bytes(made))
    for sentence in sentences(made):
        console.print(sentence, markup=False)


def _times(made: Comparison) -> Table:
    foreseen = bool(made.predicted)
    title = f"{made.title}, on {made.device}: {made.effort}"
    table = Table(Column("layout", overflow="fold"), "ranks", "ms a step", title=title)
    for name in ("predicted", "error") if foreseen else ():
        table.add_column(name)
    for name in ("of the fastest", "peak MB"):
        table.add_column(name)
    if foreseen:
        table.add_column("predicted MB")
    table.add_column("losses differ by")
    for row in made.rows:
        cells = [f"{row.name}: {row.entry.config.layout.summary}", str(row.entry.config.layout.world_size)]
        table.add_row(*cells, *(_time_cells(made, row, foreseen) if row.runs else [why_not(row)]))
    return table


def _time_cells(made: Comparison, row: Row, foreseen: bool) -> list[str]:
    low, high = row.quartiles
    cells = [f"{milliseconds(row.seconds)} ({milliseconds(low)} to {milliseconds(high)})"]
    if foreseen:
        cells += [milliseconds(row.predicted.seconds) if row.predicted else "-", percent(row.error)]
    cells += [f"{row.seconds / made.fastest.seconds:.2f}", megabytes(row.peak_bytes)]
    if foreseen:
        cells.append(megabytes(row.predicted.peak_bytes) if row.predicted else "-")
    return [*cells, agreement(made, row)]


def _bytes(made: Comparison) -> Table:
    title = "MB on a rank by part, and sent in a step by axis" + (": measured / predicted" if made.predicted else "")
    parts = ("weights", "gradients", "states")
    table = Table(Column("layout", overflow="fold"), *parts, "sent", Column("by axis", overflow="fold"), title=title)
    for row in made.measured:
        held, sent = held_pairs(row), sent_pairs(row)
        by_axis = ", ".join(f"{axis} {pair_text(pair)}" for axis, pair in sent.items())
        table.add_row(row.name, *(pair_text(held[part]) for part in parts), pair_text(sent_by_one(row)), by_axis or "-")
    return table


def sentences(made: Comparison) -> list[str]:
    """What follows from the numbers."""
    said = []
    rows = made.measured
    if len(rows) > 1:
        slowest = max(rows, key=lambda row: row.seconds)
        ratio = slowest.seconds / made.fastest.seconds
        said.append(f"The fastest is {made.fastest.name}; {slowest.name} takes {ratio:.2f} times as long.")
    if (foreseen := made.foreseen_fastest) is not None:
        right = "and it is" if foreseen is made.fastest else "but it is not"
        said.append(f"{foreseen.name} was predicted to be the fastest, {right}.")
    if made.mean_error is not None:
        said.append(f"Predicted steps ({made.cluster}) are off by {made.mean_error:.1%} on average.")
    said += [made.unpredicted] if made.unpredicted else _unpredicted(made)
    wide = [row.name for row in made.predicted if row.threads > 1]
    if wide:
        said.append(
            f"A rank of {', '.join(wide)} has several threads, and was predicted on one core; threads=1 is alike."
        )
    if len(rows) > 1:
        said.append(_losses_sentence(made))
    said += [f"{row.name} failed: {row.failure.splitlines()[0]}" for row in made.rows if row.failure]
    return [*said, made.interrupted] if made.interrupted else said


def _unpredicted(made: Comparison) -> list[str]:
    return [f"{row.name} was not predicted: {row.unpredicted}" for row in made.rows if row.unpredicted]


def _losses_sentence(made: Comparison) -> str:
    first, *others = made.measured
    worst = max(others, key=made.difference)
    if made.drops_out:
        return "Losses need not agree: model.dropout is on, and no two layouts share its masks."
    apart = [row.name for row in others if not made.agrees(row)]
    if apart:
        names = ", ".join(apart)
        return f"Losses of {names} differ from those of {first.name} by more than rounding: see `meshwright verify`."
    return f"All losses agree with those of {first.name} to {made.difference(worst):.1e}, step by step."


def why_not(row: Row) -> str:
    """Of a layout that has no run to its end."""
    return "failed" if row.failure else "not run"


def agreement(made: Comparison, row: Row) -> str:
    if row is made.measured[0]:
        return "(the reference)"
    text = f"{made.difference(row):.1e}"
    if made.drops_out:
        return f"{text} (dropout)"
    return text if made.agrees(row) else f"{text}: MORE THAN ROUNDING"


def pair_text(pair: Pair) -> str:
    """In MB; `=` stands for a prediction that is right to the byte."""
    if pair.predicted is None:
        return megabytes(pair.measured)
    return f"{megabytes(pair.measured)} / {'=' if pair.predicted == pair.measured else megabytes(pair.predicted)}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def percent(part: float | None) -> str:
    return "-" if part is None else f"{part:+.1%}"
