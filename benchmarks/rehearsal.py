"""The cost of a step on a GPU, counted without a GPU: kernels, bytes, and when the host waits.

    python -m benchmarks.rehearsal [--layouts serial megatron ...] [--kernels] [--json FILE]

GPT-2 small (124 M) in bf16 O2, microbatches of 32 Ki tokens; the last rank of each layout. Time is not seen.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.rehearsal.costs import LAYERS, LAYOUTS, MICROBATCHES, costs
from tests.rehearsal.fake_cuda import library
from tests.rehearsal.step import FakeGpu

ROWS = 32
"""Sequences of 1,024 tokens in a microbatch."""


def main() -> None:
    parser = argparse.ArgumentParser(description="What a step costs on a GPU, counted on one that is not there.")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--kernels", action="store_true", help="name the kernels, of a layer and of the step")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    arguments = parser.parse_args()
    console = Console(width=140)
    with FakeGpu(library()) as gpu:
        results = costs(gpu, arguments.layouts, ROWS)
    table = Table(title=f"a layer and microbatch; a step of {LAYERS[0]} layers and {MICROBATCHES[0]} microbatches")
    for head in ("layout", "kernels", "MB", "of them products", "step's kernels", "GB", "host waits", "odd products"):
        table.add_column(head, justify="left" if head == "layout" else "right")
    for name, cost in results.items():
        step = {key: sum(numbers.values()) for key, numbers in cost.step.items()}
        table.add_row(
            name, f"{cost.kernels.total():g}", f"{cost.moved_bytes.total() / 1e6:.0f}",
            f"{cost.product_bytes / 1e6:.0f}", str(step["kernels"]), f"{step['moved_bytes'] / 1e9:.1f}",
            str(step["waits"]), str(step["odd_products"]),
        )  # fmt: skip
    console.print(table)
    for name, cost in results.items():
        console.print(f"{name} waits:", cost.step["waits"])
        if arguments.kernels:
            console.print(f"{name}, a layer and microbatch:", dict(cost.kernels))
            console.print(f"{name}, the step:", cost.step["kernels"])
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({name: vars(cost) for name, cost in results.items()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
