"""D&SP and D&SP-cSub against data parallelism (SUPER's figure 12), on an encoder-decoder of this machine's size.

    python -m benchmarks.subgraph [--only batch heads separate bytes] [--ranks 2 4] [--rounds N] [--steps N]

(batch) global batches of 4 to 128 at 8 heads; (heads) 8 to 32 heads at constant work a head, batch 8; (separate) the
same with every head a module, run one after another, as in the paper's baseline; (bytes) the bytes that ranks send in a
step, by the ledger, without a run. Below 1: faster than data parallelism at the same count of ranks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks import ours, separate_heads
from benchmarks.contender import Contender, Option
from benchmarks.interleave import measure, plan_arguments, plan_of, write_json
from benchmarks.reference import REFERENCE
from meshwright.ranks.machine import Machine
from tests.harness import counted_step

HEAD_WIDTH = 64
SEQUENCE = 32
BATCHES = (4, 16, 64, 128)
HEADS = (8, 16, 32)
BATCH = 8
"""The global batch for questions about heads."""

FORMS: dict[str, dict[str, Option]] = {
    "data parallel": {},
    "D&SP, core": {"common": "all", "branch": "attention-core"},
    "D&SP, attention": {"common": "all", "branch": "attention"},
    "D&SP, block": {"common": "all", "branch": "block"},
    "cSub, attention": {"common": "one", "branch": "attention"},
    "cSub, block": {"common": "one", "branch": "block"},
}
SEPARATE = ("data parallel", "D&SP, attention", "cSub, attention")
"""Runs of separate heads, which can be cut in one way only."""


def options_of(form: str, ranks: int, batch: int, heads: int) -> dict[str, Option]:
    """Return a run's fields: T5, with a head width independent of the hidden width, 2 + 2 layers, hidden 256."""
    model = (
        f"{{family: t5, layers: 2, hidden: {REFERENCE.hidden}, heads: {heads}, head_width: {HEAD_WIDTH}, "
        f"feed_forward: {4 * REFERENCE.hidden}, vocabulary: {REFERENCE.vocabulary}, dropout: 0.0}}"
    )
    options: dict[str, Option] = {
        "model": model,
        "data.kind": "pairs",
        "data.sequence": SEQUENCE,
        "batch.global": batch,
    }
    if form == "data parallel":
        return options | {"layout.data.size": ranks}
    fields = {"kind": "subgraph", "size": ranks} | FORMS[form]
    return options | {f"layout.tensor.{key}": value for key, value in fields.items()}


def fused(form: str, transport: str, ranks: int, batch: int, heads: int) -> Contender:
    """Return a contender with all heads of a rank in one product."""
    return ours.configured(form, transport, options_of(form, ranks, batch, heads))


def separate(form: str, transport: str, ranks: int, batch: int, heads: int) -> Contender:
    """Return a contender with every head a module."""
    common = str(FORMS[form].get("common", "none"))
    return separate_heads.contender(form, transport, ranks, common=common, batch=batch, heads=heads, width=HEAD_WIDTH)


def fitting(form: str, ranks: int, batch: int) -> bool:
    """Return whether every rank has a sample, if the form divides samples over ranks."""
    return form.startswith("cSub") or batch % ranks == 0


def sent_megabytes(form: str, ranks: int, heads: int) -> tuple[float, float]:
    """Return the bytes that all ranks send in a step for gradients, and for splits and joins. Nothing is run."""
    config = ours.reference_config(options_of(form, ranks, BATCH, heads))
    gradients = crossing = 0
    for rank in range(ranks):
        by_axis = counted_step(config, rank).mesh.ledger.sent_bytes()
        crossing += by_axis.pop("branch", 0)
        gradients += sum(by_axis.values())
    return gradients / 1e6, crossing / 1e6


def show_bytes(ranks: int) -> list[dict[str, object]]:
    """Print a row per form and count of heads; return the rows as plain data."""
    table = Table(title=f"(bytes) MB that all ranks together send in a step, {ranks} ranks, batch {BATCH}")
    for head in ("form", "heads", "gradients", "/ data parallel", "splits and joins", "all", "/ data parallel"):
        table.add_column(head, justify="left" if head == "form" else "right")
    rows: list[dict[str, object]] = []
    for heads in HEADS:
        base, _ = sent_megabytes("data parallel", ranks, heads)
        for form in FORMS:
            gradients, crossing = sent_megabytes(form, ranks, heads)
            ratios = (gradients / base, (gradients + crossing) / base)
            cells = (gradients, ratios[0], crossing, gradients + crossing, ratios[1])
            table.add_row(form, str(heads), *(f"{cell:.2f}" for cell in cells))
            rows.append({"form": form, "heads": heads, "gradients_mb": gradients, "crossing_mb": crossing})
    Console(width=None if sys.stdout.isatty() else 120).print(table)
    return rows


Make = Callable[[str, str, int, int, int], Contender]


def contenders(make: Make, forms: Sequence[str], transport: str, ranks: int, batch: int, heads: int) -> list[Contender]:
    """Return the forms that allow the batch."""
    return [make(form, transport, ranks, batch, heads) for form in forms if fitting(form, ranks, batch)]


def main() -> None:
    parser = plan_arguments("D&SP and cSub against data parallelism.")
    questions = ("bytes", "batch", "heads", "separate")
    parser.add_argument("--only", nargs="+", choices=questions, default=list(questions), help="which questions")
    parser.add_argument("--ranks", type=int, nargs="+", choices=[2, 4], default=[2, 4])
    parser.add_argument("--transport", choices=["torch", "mpi"], default="mpi" if Machine.here().has_mpi else "torch")
    arguments = parser.parse_args()
    plan = plan_of(arguments)
    tables = {}
    for ranks in arguments.ranks:
        if "bytes" in arguments.only:
            tables[f"bytes-{ranks}"] = show_bytes(ranks)
        cases: list[tuple[str, Make, Sequence[str], int, int]] = [
            *[("batch", fused, tuple(FORMS), batch, HEADS[0]) for batch in BATCHES],
            *[("heads", fused, tuple(FORMS), BATCH, heads) for heads in HEADS],
            *[("separate", separate, SEPARATE, BATCH, heads) for heads in HEADS],
        ]
        for question, make, forms, batch, heads in cases:
            if question not in arguments.only:
                continue
            made = contenders(make, forms, arguments.transport, ranks, batch, heads)
            title = f"({question}) {ranks} ranks of one thread, batch {batch}, {heads} heads"
            tables[f"{question}-{ranks}-{batch}-{heads}"] = measure(title, made, plan, ["data parallel"])
    write_json(arguments.json, tables)


if __name__ == "__main__":
    main()
