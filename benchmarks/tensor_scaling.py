"""(c) Bytes that a rank sends in a step of a Transformer layer on 64 ranks, by layout, counted without sending any.

    python -m benchmarks.tensor_scaling [--sequence N] [--json FILE]

The size is from strong scaling in Tesseract's Table 1: hidden 3072, 64 heads, batch 16; the paper gives no sequence
length. The bytes are as in `meshwright train --explain`: of one rank that works on meta tensors. Weights
of 2-D products are gathered (`memory.summa: gather`).

A layer is the difference between a model of two layers and of one; the rest of the model of one is the embeddings, the
last norm, the head and the loss.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.config import Config
from tests.harness import counted_step

LAYOUTS: dict[str, Mapping[str, str | int | bool]] = {
    "[4,4,4]": {"kind": "tesseract", "q": 4, "d": 4},
    "[8,8,1]": {"kind": "tesseract", "q": 8, "d": 1},
    "[64]": {"kind": "megatron", "size": 64},
    "[64] sequence parallel": {"kind": "megatron", "size": 64, "sequence_parallel": True},
}
BATCH = 16


def sent_bytes(tensor: Mapping[str, str | int | bool], layers: int, sequence: int) -> dict[str, int]:
    """Return the bytes that rank 0 sends in a step, by axis."""
    return counted_step(_config(tensor, layers, sequence)).mesh.ledger.sent_bytes()


def _config(tensor: Mapping[str, str | int | bool], layers: int, sequence: int) -> Config:
    model = {"layers": layers, "hidden": 3072, "heads": 64, "positions": sequence, "tied": False, "dropout": 0.0}
    return Config.model_validate(
        {
            "model": model,
            "data": {"sequence": sequence},
            "batch": {"global": BATCH},
            "layout": {"tensor": dict(tensor)},
            "memory": {"summa": "gather"},
            "optimizer": {"name": "sgd"},
        }
    )


def measure(sequence: int) -> dict[str, dict[str, dict[str, int]]]:
    """Return bytes by layout, by part of the model, by axis."""
    found = {}
    for name, tensor in LAYOUTS.items():
        single, double = (sent_bytes(tensor, layers, sequence) for layers in (1, 2))
        layer = {axis: double[axis] - single[axis] for axis in double}
        found[name] = {"layer": layer, "rest": {axis: single[axis] - layer[axis] for axis in single}}
    return found


def show(found: Mapping[str, dict[str, dict[str, int]]], sequence: int) -> None:
    """Print a row a layout; the ratio is of the layer's bytes to the bytes of [64]."""
    table = Table(
        title=f"(c) MB that a rank sends in a step, 64 ranks, hidden 3072, batch {BATCH}, sequence {sequence}"
    )
    for head in ("layout", "a layer, by axis", "a layer", "/ [64]", "the rest"):
        table.add_column(head, justify="left" if head.startswith(("layout", "a layer,")) else "right")
    whole = sum(found["[64]"]["layer"].values())
    for name, parts in found.items():
        by_axis = ", ".join(f"{axis} {count / 1e6:.1f}" for axis, count in parts["layer"].items() if count)
        layer, rest = (sum(parts[piece].values()) for piece in ("layer", "rest"))
        table.add_row(name, by_axis, f"{layer / 1e6:.1f}", f"{layer / whole:.3f}", f"{rest / 1e6:.1f}")
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes a rank sends by layout, from the ledger of a run without data.")
    parser.add_argument("--sequence", type=int, default=512, help="tokens in a sequence")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the bytes to FILE as well")
    arguments = parser.parse_args()
    found = measure(arguments.sequence)
    show(found, arguments.sequence)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
