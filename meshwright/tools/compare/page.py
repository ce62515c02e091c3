"""A comparison as one HTML page that needs nothing else: the picture is inside, no script, nothing from a network.

A comparison as a picture: its numbers in the panels of report/comparison.py.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

import yaml

from meshwright.config import dump_tree
from meshwright.tools.compare.layouts import OWN
from meshwright.tools.compare.result import Comparison, Pair, Row, all_losses, held_pairs, sent_by_one, sent_pairs
from meshwright.tools.compare.table import agreement, megabytes, milliseconds, pair_text, percent, sentences, why_not
from meshwright.tools.report.comparison import Bar, Panel, draw_comparison
from meshwright.train.phases import PHASES


def draw(made: Comparison, picture: Path) -> None:
    """The layouts that have run."""
    rows = made.measured
    panels = [
        Panel("A step", "milliseconds", {row.name: _step(row) for row in rows}),
        Panel("Memory of the fullest rank", "MB", {row.name: _memory(row) for row in rows}),
        Panel("Sent by a rank in a step", "MB", {row.name: _sent_bar(row) for row in rows}),
    ]
    draw_comparison(panels, all_losses(rows), picture)


def _step(row: Row) -> Bar:
    low, high = row.quartiles
    predicted = 1e3 * row.predicted.seconds if row.predicted is not None else None
    return Bar(1e3 * row.seconds, predicted, 1e3 * low, 1e3 * high)


def _memory(row: Row) -> Bar:
    return Bar(row.peak_bytes / 1e6, row.predicted.peak_bytes / 1e6 if row.predicted is not None else None)


def _sent_bar(row: Row) -> Bar:
    pair = sent_by_one(row)
    return Bar(pair.measured / 1e6, pair.predicted / 1e6 if pair.predicted is not None else None)


BESIDE = ("activations", "temporaries", "framework")
"""Parts of a predicted memory that no rank can tell apart."""

STYLE = """
:root { color-scheme: light; --ink: #1f2933; --faint: #6b7785; --line: #e6e9ed; --blue: #2b6cb0; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 32px 24px 64px; }
h1 { font-size: 28px; margin: 0 0 4px; }
h2 { font-size: 18px; margin: 36px 0 10px; }
p.facts { color: var(--faint); margin: 0 0 20px; }
section, ul.said { background: white; border: 1px solid var(--line); border-radius: 10px; padding: 16px 20px; }
section { overflow-x: auto; }
ul.said { padding-left: 38px; }
ul.said li { margin: 3px 0; }
img { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: right; color: var(--faint); font-weight: 500; font-size: 13px; padding: 4px 12px 8px; }
td { text-align: right; border-top: 1px solid var(--line); padding: 8px 12px; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; white-space: normal; }
small { color: var(--faint); display: block; }
.bar { height: 6px; border-radius: 3px; background: var(--blue); margin-top: 4px; margin-left: auto; }
.fastest td:first-child strong::after { content: " fastest"; color: #2f7d32; font-weight: 500; font-size: 13px; }
.bad { color: #b42318; }
details { margin: 8px 0; } summary { cursor: pointer; }
pre { background: #f6f7f9; border-radius: 6px; padding: 12px; overflow-x: auto; font-size: 13px; }
"""


def write_page(made: Comparison, picture: Path, page: Path) -> None:
    """Write the page, with the picture in it."""
    page.write_text(html_of(made, picture.read_bytes()), encoding="utf-8")


def html_of(made: Comparison, picture: bytes) -> str:
    """The whole page. `picture`: a PNG."""
    title = f"{made.title}: {len(made.rows)} layouts compared"
    names = ", ".join(row.name for row in made.measured)
    source = f"data:image/png;base64,{b64encode(picture).decode()}"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="facts">{escape(_facts(made))}</p>',
        _said(sentences(made)),
        f'<h2>In pictures</h2><section><img alt="Bars and losses of {escape(names)}" src="{source}"></section>',
        f"<h2>Time and memory</h2><section>{_times(made)}</section>",
        f"<h2>Phases of a step, milliseconds on rank 0</h2><section>{_phases(made)}</section>",
        f"<h2>What a rank holds, MB</h2><section>{_held(made)}</section>",
        f"<h2>What a rank sends in a step, MB by axis</h2><section>{_sent(made)}</section>",
        f"<h2>Losses, step by step</h2><section>{_losses(made)}</section>",
        f"<h2>The layouts</h2><section>{''.join(_layout(row) for row in made.rows)}</section>",
        f"<h2>How this was measured</h2>{_said(_method(made))}",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>'
    top = f'<!DOCTYPE html>\n<html lang="en"><head>{head}<style>{STYLE}</style></head>\n'
    return top + "<body><main>\n" + "\n".join(parts) + "\n</main></body></html>\n"


def _facts(made: Comparison) -> str:
    foreseen = f"predicted for {made.cluster}" if made.cluster else "not predicted"
    return f"Measured on {made.device}, {foreseen}; {made.effort}."


def _said(lines: Iterable[str]) -> str:
    return '<ul class="said">' + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _table(head: Sequence[str], rows: Iterable[tuple[str, Sequence[str]]]) -> str:
    """`rows`: a class, and cells that are HTML already."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join(
        f'<tr class="{kind}">' + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>\n" for kind, cells in rows
    )
    return f"<table><thead><tr>{top}</tr></thead>\n<tbody>{body}</tbody></table>"


def _name(row: Row) -> str:
    return f"<strong>{escape(row.name)}</strong><small>{escape(row.entry.config.layout.summary)}</small>"


def _times(made: Comparison) -> str:
    """With bars of the measured steps."""
    slowest = max(row.seconds for row in made.measured)
    head = ["layout", "ranks", "ms a step", "a half between"]
    head += ["predicted", "error"] if made.predicted else []
    head += ["of the fastest", "peak MB"] + (["predicted MB"] if made.predicted else []) + ["losses differ by"]

    def cells(row: Row) -> list[str]:
        first = [_name(row), str(row.entry.config.layout.world_size)]
        if not row.runs:
            return [*first, f'<span class="bad">{why_not(row)}</span>', *[""] * (len(head) - 3)]
        low, high = row.quartiles
        bar = f'<div class="bar" style="width: {100 * row.seconds / slowest:.0f}%"></div>'
        first += [milliseconds(row.seconds) + bar, f"{milliseconds(low)} and {milliseconds(high)}"]
        if made.predicted:
            first += [milliseconds(row.predicted.seconds) if row.predicted else "-", percent(row.error)]
        first += [f"{row.seconds / made.fastest.seconds:.2f}", megabytes(row.peak_bytes)]
        if made.predicted:
            first.append(megabytes(row.predicted.peak_bytes) if row.predicted else "-")
        bad = not made.drops_out and not made.agrees(row)
        return [*first, f'<span class="{"bad" if bad else ""}">{escape(agreement(made, row))}</span>']

    return _table(head, (("fastest" if row is made.fastest else "", cells(row)) for row in made.rows))


def _phases(made: Comparison) -> str:
    """Measured / predicted."""
    rows = []
    for row in made.measured:
        foreseen = row.predicted.phases if row.predicted is not None else {}
        cells = [
            milliseconds(row.phases[phase]) + (f" / {milliseconds(foreseen[phase])}" if phase in foreseen else "")
            for phase in PHASES
        ]
        rows.append(("", [_name(row), *cells]))
    legend = " (measured / predicted)" if made.predicted else ""
    return _table([f"layout{legend}", *(phase.replace("_", " ") for phase in PHASES)], rows)


def _held(made: Comparison) -> str:
    """And what a prediction adds to it, which nothing measures by part."""
    rows = []
    for row in made.measured:
        held = held_pairs(row)
        stage = held["weights"].stage
        cells = [_name(row), f"stage {stage}" if len(row.stages) > 1 else "its first rank"]
        cells += [escape(pair_text(pair)) for pair in held.values()]
        if made.predicted:
            memory = row.predicted.stages[stage].memory if row.predicted is not None else {}
            cells += [megabytes(memory[part]) if part in memory else "-" for part in BESIDE]
        rows.append(("", cells))
    foreseen = [f"{part}, predicted" for part in BESIDE] if made.predicted else []
    return _table(["layout" + _legend(made), "of", "weights", "gradients", "states", *foreseen], rows)


def _sent(made: Comparison) -> str:
    """A column an axis that some layout uses."""
    axes = list(dict.fromkeys(axis for row in made.measured for axis in sent_pairs(row)))
    rows = []
    for row in made.measured:
        pairs = sent_pairs(row) | {"": sent_by_one(row)}
        rows.append(("", [_name(row), *(_sent_cell(pairs.get(axis)) for axis in (*axes, ""))]))
    return _table(["layout" + _legend(made), *axes, "in all"], rows)


def _sent_cell(pair: Pair | None) -> str:
    return "-" if pair is None else escape(pair_text(pair))


def _losses(made: Comparison) -> str:
    """Of each layout's first run, its steps from left to right."""
    rows = (("", [_name(row), *(f"{loss:.6f}" for loss in row.runs[0].losses)]) for row in made.measured)
    return _table(["layout", *(str(step) for step in range(1, made.steps + 1))], rows)


def _legend(made: Comparison) -> str:
    return " (measured / predicted; = to the byte)" if made.predicted else ""


def _layout(row: Row) -> str:
    """What a layout has of its own, as a run file says it."""
    tree = dump_tree(row.entry.config)
    own = {"layout": tree["layout"], "batch": tree["batch"]} | {key: tree[key] for key in OWN if key != "layout"}
    text = escape(yaml.safe_dump(own, sort_keys=False))
    title = f"<strong>{escape(row.name)}</strong>, from {escape(row.entry.origin)}"
    failure = f'<pre class="bad">{escape(row.failure)}</pre>' if row.failure else ""
    return f"<details><summary>{title}</summary>{failure}<pre>{text}</pre></details>"


def _method(made: Comparison) -> list[str]:
    return [
        "Every run starts its own ranks and makes the steps of `meshwright train` on the same samples, from the same "
        "first weights. The layouts take turns; every second round goes backwards.",
        "A step is the median over all rounds, by rank 0's clock, with the optimizer and without checkpoints.",
        "Peak: on a CPU the process's resident memory, with Python and torch in it; on a GPU what torch has allocated.",
        "Weights, gradients and states are the buckets and the optimizer of a stage's first rank, padding too. What is "
        "sent is the ledger of its passes, gradient sums and published weights, without the norm and the step report.",
        f"Losses are held against the first run of {made.measured[0].name}; of all differences the greatest counts.",
    ]
