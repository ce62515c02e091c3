"""A comparison as tables (for terminal and page), sentences, a picture, and plain values.

The page is one HTML file (page.html, a Jinja2 template) that needs nothing else: the picture is inside, no script,
nothing from a network.
"""

from __future__ import annotations

import math
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from rich.table import Column
from rich.table import Table as RichTable

from meshwright.config import dump_tree
from meshwright.config.yaml_text import yaml_text
from meshwright.output.tables import print_table
from meshwright.output.terminal import table_console
from meshwright.parity.report import as_marks
from meshwright.tools.compare.layouts import OWN
from meshwright.tools.compare.picture import Bar, Panel, draw_comparison
from meshwright.tools.compare.result import WARMUP_STEPS, Comparison, Measurement, StageBytes
from meshwright.training.phases import PHASES

BESIDE = ("activations", "temporaries", "context", "cached", "communicators", "read")
"""Parts of the predicted memory that a rank cannot measure separately."""

EXACT = " (measured / predicted; = to the byte)"


@dataclass(frozen=True)
class Cell:
    """A table cell."""

    text: str
    note: str = ""
    """A smaller text below `text`."""
    bar: float | None = None
    """Length of a bar in percent."""
    bad: bool = False
    """Whether the text is red."""


@dataclass(frozen=True)
class Table:
    """A table with one line for each layout, which the first cell names. `best`: the line of the fastest layout."""

    title: str
    columns: Sequence[str]
    lines: list[list[Cell]] = field(default_factory=list)
    best: int | None = None

    def add(self, row: Measurement, *cells: str | Cell) -> None:
        """Append the line of a layout."""
        name = Cell(row.name, row.contender.config.layout.summary)
        self.lines.append([name, *(cell if isinstance(cell, Cell) else Cell(cell) for cell in cells)])


def times_table(comparison: Comparison) -> Table:
    """Build the table of step times, memory and losses. A layout that has not run has no numbers."""
    predicted = bool(comparison.predicted)
    columns = ["layout", "ranks", "ms a step", "a half between", *["predicted", "error"] * predicted]
    columns += ["of the fastest", "peak MB", *["predicted MB"] * predicted, "losses differ by"]
    best = None if comparison.clear_fastest is None else comparison.rows.index(comparison.clear_fastest)
    table = Table("Time and memory", columns, best=best)
    slowest = max((row.seconds for row in comparison.measured), default=0.0)
    for row in comparison.rows:
        ranks = str(row.contender.config.layout.world_size)
        if not row.runs:
            table.add(row, ranks, Cell("failed" if row.failure else "not run", bad=True), *[""] * (len(columns) - 3))
            continue
        step = Cell(milliseconds(row.seconds), bar=100 * row.seconds / slowest)
        cells: list[str | Cell] = [ranks, step, " and ".join(map(milliseconds, row.quartiles))]
        error = "-" if row.error is None else f"{row.error:+.1%}"
        cells += [milliseconds(row.predicted.seconds) if row.predicted else "-", error] * predicted
        cells += [f"{row.seconds / comparison.fastest.seconds:.2f}", megabytes(row.peak_bytes)]
        cells += [megabytes(row.predicted.measured_memory) if row.predicted else "-"] * predicted
        # Losses of one task are equal but for rounding, unless dropout draws other masks in each layout.
        if row is comparison.measured[0]:
            losses = Cell("(the reference)")
        elif comparison.agrees(row):
            losses = Cell(f"{comparison.difference(row):.1e}")
        elif comparison.drops_out:
            losses = Cell(f"{comparison.difference(row):.1e} (dropout)")
        else:
            wrong = "MORE THAN ROUNDING" if comparison.allowed(row) else "NOT EQUAL"
            losses = Cell(f"{comparison.difference(row):.1e}: {wrong}", bad=True)
        table.add(row, *cells, losses)
    return table


def phases_table(comparison: Comparison) -> Table:
    """Build the table of milliseconds by phase, measured / predicted."""
    legend = " (measured / predicted)" if comparison.predicted else ""
    columns = [f"layout{legend}", *(phase.replace("_", " ") for phase in PHASES)]
    table = Table("Phases of a step, milliseconds on rank 0", columns)
    for row in comparison.measured:
        phases = row.predicted.phases if row.predicted is not None else {}
        predicted = {phase: f" / {milliseconds(seconds)}" for phase, seconds in phases.items()}
        table.add(row, *(milliseconds(row.phases[phase]) + predicted.get(phase, "") for phase in PHASES))
    return table


def held_table(comparison: Comparison) -> Table:
    """Build the table of weights, gradients and states, and of the parts that are only predicted."""
    # A rank can measure weights, gradients and states; other memory of the process cannot be divided by part.
    beside = [f"{category}, predicted" for category in BESIDE] if comparison.predicted else []
    columns = ["layout" + EXACT * bool(comparison.predicted), "of", "weights", "gradients", "states", *beside]
    table = Table("What a rank holds, MB", columns)
    for row in comparison.measured:
        stage = row.held["weights"].stage
        memory = asdict(row.predicted.memory[stage]) if row.predicted is not None else {}
        cells = [megabytes(memory[category]) if category in memory else "-" for category in BESIDE if beside]
        of = f"stage {stage}" if len(row.stages) > 1 else "its first rank"
        table.add(row, of, *map(_pair_text, row.held.values()), *cells)
    return table


def sent_table(comparison: Comparison) -> Table:
    """Build the table of bytes sent, with a column for each axis that some layout uses."""
    axes = list(dict.fromkeys(axis for row in comparison.measured for axis in row.sent))
    columns = ["layout" + EXACT * bool(comparison.predicted), *axes, "in all"]
    table = Table("What a rank sends in a step, MB by axis", columns)
    for row in comparison.measured:
        by_axis = (_pair_text(row.sent[axis]) if axis in row.sent else "-" for axis in axes)
        table.add(row, *by_axis, _pair_text(row.sent_in_all))
    return table


def losses_table(comparison: Comparison) -> Table:
    """Build the table of losses of each layout's first run, with a column for each step."""
    table = Table("Losses, step by step", ["layout", *map(str, range(1, comparison.steps + 1))])
    for row in comparison.measured:
        table.add(row, *(f"{loss:.6f}" for loss in row.runs[0].losses))
    return table


def _pair_text(pair: StageBytes) -> str:
    """Format a pair as `1.20 / 1.30` in MB; `=` for a prediction exact to the byte."""
    if pair.predicted is None:
        return megabytes(pair.measured)
    return f"{megabytes(pair.measured)} / {'=' if pair.predicted == pair.measured else megabytes(pair.predicted)}"


def milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f}"


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.2f}"


def sentences(comparison: Comparison) -> list[str]:
    """Return the conclusions from the numbers, a sentence each."""
    said = []
    rows = comparison.measured
    if len(rows) > 1:
        said.append(order_sentence(comparison))
    if (predicted := comparison.predicted_fastest) is not None:
        near = comparison.within_noise
        unsure = "and no other is faster by more than the noise" if predicted in near else "but it is not"
        right = "and it is" if predicted is comparison.clear_fastest else unsure
        said.append(f"{predicted.name} was predicted to be the fastest, {right}.")
    if comparison.mean_error is not None:
        said.append(f"Predicted steps ({comparison.cluster}) are off by {comparison.mean_error:.1%} on average.")
    if comparison.unpredicted:
        said.append(comparison.unpredicted)
    else:
        said += [f"{row.name} was not predicted: {row.unpredicted}" for row in comparison.rows if row.unpredicted]
    # A calibrated device is one core. A rank with several threads uses several, which a cluster file cannot express.
    if wide := ", ".join(row.name for row in comparison.predicted if row.threads > 1):
        said.append(f"A rank of {wide} has several threads, and was predicted on one core; threads=1 is alike.")
    if len(rows) > 1:
        first, *others = rows
        names = ", ".join(row.name for row in others if not comparison.agrees(row))
        if names and comparison.drops_out:
            why = "model.dropout is on, and layouts may draw other masks"
            said.append(f"Losses of {names} differ from those of {first.name}, as they may: {why}.")
        elif names and comparison.layout_free:
            text = "and bits=layout-free promises equal bits in one precision"
            said.append(f"Losses of {names} are not those of {first.name}, {text}: see `meshwright diff`.")
        elif names:
            said.append(
                f"Losses of {names} differ from those of {first.name} by more than rounding: see `meshwright verify`."
            )
        elif not any(map(comparison.allowed, others)):
            said.append(f"All losses are those of {first.name} to the bit, step by step, as bits=layout-free promises.")
        else:
            worst = max(map(comparison.difference, others))
            said.append(f"All losses agree with those of {first.name} to {worst:.1e}, step by step.")
    # Only the first line of a failure: the command's error has the whole text (job.require_all).
    said += [f"{row.name} failed: {row.failure.splitlines()[0]}" for row in comparison.rows if row.failure]
    return [*said, comparison.interrupted] if comparison.interrupted else said


def order_sentence(comparison: Comparison) -> str:
    """Name the fastest of several layouts, or the layouts that do not differ by more than the noise."""
    near, slowest = comparison.within_noise, max(comparison.measured, key=lambda row: row.seconds)
    ratio = slowest.seconds / comparison.fastest.seconds
    if len(near) == 1:
        return f"The fastest is {near[0].name}; {slowest.name} takes {ratio:.2f} times as long."
    names = ", ".join(row.name for row in near)
    said = f"No difference above the noise between {names}: the middle halves of their steps overlap"
    return f"{said}." if slowest in near else f"{said}; {slowest.name} takes {ratio:.2f} times as long."


def render(comparison: Comparison) -> None:
    """Print times, memory and losses; bytes by part and by axis; and the conclusions."""
    console = table_console()
    console.print(f"{comparison.title}, on {comparison.device}: {comparison.effort}")
    for index, table in enumerate((times_table(comparison), held_table(comparison), sent_table(comparison))):
        first, *others = table.columns
        shown = RichTable(Column(first, overflow="fold"), *others, title=table.title)
        for name, *cells in table.lines:
            first = name.text if index else f"{name.text}: {name.note}"  # the note in the first table only
            shown.add_row(first, *(cell.text for cell in cells))
        print_table(console, shown)
    for sentence in sentences(comparison):
        console.print(sentence)


def html_of(comparison: Comparison, picture: bytes, command: str = "") -> str:
    """Return the whole page. `picture`: a PNG; `command`: the command line, if the comparison was asked for by one."""
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    templates.filters["marks"] = as_marks
    table_makers = (times_table, phases_table, held_table, sent_table, losses_table)
    layouts = []
    for row in comparison.rows:
        tree = dump_tree(row.contender.config)
        layout_fields = {key: tree[key] for key in ("layout", "batch", *OWN[1:])}
        layouts.append((row, yaml_text(layout_fields)))
    return templates.get_template("page.html").render(
        comparison=comparison,
        command=command,
        date=datetime.now().astimezone().strftime("%-d %B %Y, %H:%M %Z"),
        tables=[make_table(comparison) for make_table in table_makers],
        said=sentences(comparison),
        layouts=layouts,
        # Embedded, so that the page is a single file.
        picture=b64encode(picture).decode(),
    )


def draw(comparison: Comparison, picture: Path) -> None:
    """Draw the layouts that have run: a step's time, the fullest rank's memory, bytes sent, and losses."""
    steps, memory, sent = {}, {}, {}
    for row in comparison.measured:
        low, high = row.quartiles
        predicted = row.predicted
        steps[row.name] = Bar(1e3 * row.seconds, 1e3 * predicted.seconds if predicted else None, 1e3 * low, 1e3 * high)
        memory[row.name] = Bar(row.peak_bytes / 1e6, predicted.measured_memory / 1e6 if predicted else None)
        pair = row.sent_in_all
        sent[row.name] = Bar(pair.measured / 1e6, pair.predicted / 1e6 if pair.predicted is not None else None)
    panels = [
        Panel("A step", "milliseconds", steps),
        Panel("Memory of the fullest rank", "MB", memory),
        Panel("Sent by a rank in a step", "MB", sent),
    ]
    draw_comparison(panels, {row.name: row.runs[0].losses for row in comparison.measured}, picture)


def as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison for `--json` and comparison.json, in seconds and bytes; null if nothing was predicted."""
    return {
        "run": comparison.title,
        "device": comparison.device,
        "cluster": comparison.cluster or None,
        "steps": comparison.steps,
        "untimed_steps": WARMUP_STEPS,
        "rounds": comparison.rounds,
        "interrupted": comparison.interrupted or None,
        "unpredicted": comparison.unpredicted or None,
        "fastest": None if comparison.clear_fastest is None else comparison.clear_fastest.name,
        "within_noise": [row.name for row in comparison.within_noise] if comparison.measured else [],
        "predicted_fastest": comparison.predicted_fastest.name if comparison.predicted_fastest is not None else None,
        "mean_error": comparison.mean_error,
        "layouts": [_row_dict(comparison, row) for row in comparison.rows],
    }


def _row_dict(comparison: Comparison, row: Measurement) -> dict[str, Any]:
    config, predicted = row.contender.config, None
    if (prediction := row.predicted) is not None:
        stages = zip(prediction.memory, row.predicted_sent, strict=True)
        predicted = {
            "seconds": prediction.seconds,
            "phases": prediction.phases,
            "stages": [{"memory": asdict(memory), "sent": sent} for memory, sent in stages],
            "peak_bytes": prediction.measured_memory,
        }
    facts: dict[str, Any] = {
        "name": row.name,
        "origin": row.contender.origin,
        "layout": config.layout.summary,
        "ranks": config.layout.world_size,
        "threads": row.threads,
        "micro": config.micro,
        "failure": row.failure or None,
        "unpredicted": row.unpredicted or None,
        "rounds": len(row.runs),
        "predicted": predicted,
        "measured": None,
    }
    if row.runs:
        facts["error"] = row.error
        facts["losses"] = {
            "difference": _plain(comparison.difference(row)),
            "allowed": comparison.allowed(row),
            "agree": comparison.agrees(row),
            "dropout": comparison.drops_out,
            "layout_free": comparison.layout_free,
        }
        facts["measured"] = {
            "seconds": row.seconds,
            "quartiles": list(row.quartiles),
            "step_seconds": [list(run.seconds) for run in row.runs],
            "losses": [[_plain(loss) for loss in run.losses] for run in row.runs],
            "phases": row.phases,
            "peak_bytes": row.peak_bytes,
            "stages": [asdict(facts) for facts in row.stages],
        }
    return facts


def _plain(value: float) -> float | str:
    """Return the number; nan and infinity as text, since JSON has neither."""
    return value if math.isfinite(value) else str(value)
