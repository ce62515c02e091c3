"""The public rows as a page: a scatter a set, predicted against measured, and the missing facts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from validation.public import Judged, PublicRow

SIDE, EDGE = 300, 34
"""Pixels of a picture, and of the margin around the picture."""

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#1d2733}"
    "section{display:flex;gap:2rem;flex-wrap:wrap;border-top:1px solid #dfe5ec;padding:1rem 0}"
    "svg text{font-size:11px;fill:#5c6773}td,th{text-align:left;padding:.1rem .8rem .1rem 0;vertical-align:top}"
)


def write_page(judged: Sequence[Judged], path: Path) -> None:
    """Write the page: one HTML file without other files."""
    sections = "".join(_section(each) for each in judged)
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Measured by others, predicted</title>'
        f"<style>{STYLE}</style><h1>Measured by others, predicted</h1>"
        f"<p>Seconds of a step: across measured, upwards predicted, both on logarithms; the line is equal, the band "
        f"10 % to both sides.</p>{sections}</html>",
        encoding="utf-8",
    )


def _section(judged: Judged) -> str:
    facts = "".join(f"<tr><td>{number} rows</td><td>{escape(fact)}</td></tr>" for fact, number in judged.said.items())
    said = f"<p>Not said:</p><table>{facts}</table>" if facts else ""
    rows_set = judged.rows_set
    words = f"<h2>{escape(rows_set.title)}</h2><p>{escape(rows_set.source)}; {escape(rows_set.checked)}</p>"
    return f"<section>{_picture(judged.timed)}<div>{words}<p>{escape(sentence(judged))}</p>{said}</div></section>"


def sentence(judged: Judged) -> str:
    """Say `16 of 23 rows: seconds 27.8% off on average, -27.8% signed, 119 of 120 pairs in order; memory of 16 ...`."""
    parts = []
    if errors := judged.errors():
        right, pairs = judged.ordered
        parts.append(f"seconds {_mean_text(errors)}, {right} of {pairs} pairs in order")
    if errors := judged.memory_errors():
        parts.append(f"memory of {len(errors)} {_mean_text(errors)}, at most {judged.most_unseen:.1%} above")
    if ran_out := judged.ran_out:
        parts.append("ran out of memory: " + ", ".join(f"{number} {told}" for told, number in ran_out.items()))
    doubted = sum(bool(row.doubtful) for row in judged.rows)
    left_out = f"; {doubted} doubtful" if doubted else ""
    counted = max(len(judged.timed), len(judged.weighed))
    return f"{counted} of {len(judged.rows)} rows{': ' if parts else ''}{'; '.join(parts)}{left_out}"


def _mean_text(errors: Sequence[float]) -> str:
    return f"{sum(map(abs, errors)) / len(errors):.1%} off on average, {sum(errors) / len(errors):+.1%} signed"


def _picture(rows: Sequence[PublicRow]) -> str:
    if not rows:
        return ""
    both = [(float(row.measured_seconds or 0), float(row.seconds or 0), row.label) for row in rows]
    values = [math.log10(value) for measured, predicted, _ in both for value in (measured, predicted)]
    low, high = math.floor(min(values) * 2) / 2, math.ceil(max(values) * 2) / 2
    high = max(high, low + 0.5)

    def at(seconds: float) -> float:
        return (math.log10(seconds) - low) / (high - low) * SIDE

    size, shift = SIDE + 2 * EDGE, math.log10(1.1) / (high - low) * SIDE
    dots = "".join(
        f'<circle cx="{EDGE + at(measured):.1f}" cy="{EDGE + SIDE - at(predicted):.1f}" r="3.5" fill="#2b6cb0" '
        f'fill-opacity=".6"><title>{escape(label)}: {measured:.4g} s, predicted {predicted:.4g} s</title></circle>'
        for measured, predicted, label in both
    )
    lines = "".join(
        f'<line x1="{EDGE}" y1="{EDGE + SIDE - rise:.1f}" x2="{EDGE + SIDE}" y2="{EDGE - rise:.1f}" stroke="{color}"/>'
        for rise, color in ((0.0, "#5c6773"), (shift, "#dfe5ec"), (-shift, "#dfe5ec"))
    )
    ends = f"{10**low:.3g} s", f"{10**high:.3g} s"
    return (
        f'<svg width="{size}" height="{size}" role="img"><rect x="{EDGE}" y="{EDGE}" width="{SIDE}" height="{SIDE}" '
        f'fill="none" stroke="#dfe5ec"/>{lines}{dots}<text x="{EDGE}" y="{size - 14}">{ends[0]}</text>'
        f'<text x="{EDGE + SIDE}" y="{size - 14}" text-anchor="end">measured, {ends[1]}</text>'
        f'<text x="{EDGE}" y="{EDGE - 8}">predicted</text></svg>'
    )
