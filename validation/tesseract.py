"""Tesseract, Table 1: seconds a sequence, forward and backward, of 1-D, 2-D and 2.5-D tensor parallelism."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from validation.case import Claim, Finding, Row
from validation.measure import backward_seconds, forward_seconds
from validation.paper import Line, Paper

FORWARD, BACKWARD = "forward, s/sequence", "backward, s/sequence"

COPIED = ("8x8x1",)
"""Shapes with a row that is also, digit for digit, in the paper's Table 2 for another size: shown, and not counted."""


def compare(paper: Paper) -> Finding:
    """Return two rows a line of the table."""
    planner, rows = paper.planner(), []
    for line in paper.tables["tesseract_strong"]:
        prediction = planner.predict(paper.config(changes_of(line)))
        batch = prediction.config.batch.global_
        label = f"{line['method']} [{line['shape']}]"
        forward, backward = forward_seconds(prediction) / batch, backward_seconds(prediction) / batch
        marks = {"counts": line["shape"] not in COPIED, "fitted": paper.has_fit}
        rows.append(Row(label, FORWARD, float(line["forward_s"]), forward, **marks))
        rows.append(Row(label, BACKWARD, float(line["backward_s"]), backward, **marks))
    return Finding(tuple(rows), (_order(rows),))


def changes_of(line: Line) -> dict[str, Any]:
    """Return the run of a line, with the batch rounded up to a multiple of the shape's rows."""
    tensor, memory = _tensor(line["shape"]), {}
    if tensor["kind"] == "tesseract":
        memory = {"summa": "stream"}  # panel by panel, as in the papers
    parts = tensor["q"] * tensor["d"] if tensor["kind"] == "tesseract" else 1
    batch = -(-int(line["batch"]) // parts) * parts
    model = {"hidden": int(line["hidden"]), "heads": int(line["heads"])}
    return {"model": model, "batch": {"global": batch}, "layout": {"tensor": tensor}, "memory": memory}


def _tensor(shape: str) -> Mapping[str, Any]:
    """Return the tensor section of `16`, `4x4`, `4x4x2`."""
    sizes = [int(size) for size in shape.split("x")]
    if len(sizes) == 1:
        return {"kind": "megatron", "size": sizes[0]}
    return {"kind": "tesseract", "q": sizes[0], "d": sizes[2] if len(sizes) > 2 else 1}


def _order(rows: list[Row]) -> Claim:
    """Return the order of the methods at 64 GPUs, by the whole time of a sequence.

    The order is no counted claim: a fit with a smaller error and a wrong order was not taken.
    """
    names = ("tesseract [4x4x4]", "optimus [8x8]", "megatron [64]")
    totals = {name: sum(row.predicted for row in rows if row.label == name) for name in names}
    found = sorted(names, key=totals.__getitem__)
    text = "at 64 GPUs: " + " < ".join(names)
    return Claim(text, tuple(found) == names, ", ".join(f"{name} {totals[name]:.3f} s" for name in found), counts=False)
