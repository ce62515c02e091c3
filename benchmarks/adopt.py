"""Ten scripts of examples/adopt: read and predicted at full size; a small one of each held against a real step.

    python -m benchmarks.adopt [--only NAME ...] [--prove] [--json FILE]

Full size: without values, as a GPU's program, planned on DGX H100. Small: the script's `TINY` form as a CPU's program,
against torch's own count of products and the live bytes of a real step (adopt_measure.py). --prove: two processes
against one, for scripts that run under torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from meshwright.planner.adopt.job import Question, run_ranks
from meshwright.planner.adopt.planned import plan
from meshwright.planner.adopt.proof import prove_script
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.recorder import Kernel
from meshwright.ranks.errors import MeshwrightError

SCRIPTS = Path(__file__).resolve().parent.parent / "examples/adopt"


@dataclass(frozen=True)
class Case:
    """A script with its words at full size and small, and the ranks of both."""

    words: str = ""
    ranks: int = 1
    small: str = ""
    small_ranks: int = 1
    one: str | None = None
    """Words of the one process of a proof; None: no proof."""


TRAINER = "--output_dir {folder} --report_to none --save_strategy no"
SMALL_GPT = "--width 64 --layers 2 --heads 4 --vocabulary 256 --length 32"
CASES = {
    "gpt.py": Case("", 1, "--layers 2 --width 64 --heads 4 --block_size 32 --vocabulary 256 --dtype float32 --steps 3"),
    "ddp.py": Case("", 8, "", 2),
    "fsdp.py": Case("--size 8b", 8, "--size tiny --sequence 32 --steps 3 --float32", 2),
    "tensor_parallel.py": Case("", 4, "", 2, ""),
    "trainer.py": Case(f"{TRAINER} --bf16", 1, f"{TRAINER} {SMALL_GPT} --max_steps 3 --use_cpu"),
    "accelerated.py": Case(),
    "pipeline.py": Case("", 4, "", 2),
    "lora.py": Case(),
    "vision.py": Case(),
    "packed.py": Case(),
}


def products_of(adopted: object) -> float:
    entries = getattr(adopted, "entries")  # noqa: B009
    return sum(
        e.event.flops * e.event.times for e in entries if isinstance(e.event, Kernel) and e.event.kind == "product"
    )


def measured(name: str, case: Case, folder: Path) -> dict[str, float]:
    """Run the small form on CPUs."""
    out = folder / "measured.json"
    words = ["-m", "benchmarks.adopt_measure", str(out), str(SCRIPTS / name), *case.small.format(folder=folder).split()]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.small_ranks)]
    command = [sys.executable, *(torchrun if case.small_ranks > 1 else []), *words]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS.parent.parent)
    if not out.is_file():
        raise RuntimeError(f"{name}: {ran.stderr[-500:]}")
    return dict(json.loads(out.read_text()))


def row_of(name: str, case: Case, folder: Path, *, prove: bool) -> dict[str, object]:
    """Return the figures of a script."""
    cluster = load_cluster("dgx-h100")
    os.environ.pop("TINY", None)
    begin = time.monotonic()
    words = tuple(case.words.format(folder=folder).split())
    ranks = run_ranks(Question(SCRIPTS / name, words, cluster, case.ranks), folder / "full")
    seconds = time.monotonic() - begin
    planned = plan(ranks, cluster, case.ranks)
    first = ranks[0]
    os.environ["TINY"] = "1"
    small = tuple(case.small.format(folder=folder).split())
    question = Question(SCRIPTS / name, small, cluster, case.small_ranks, "cpu")
    tiny = run_ranks(question, folder / "small")[0]
    real = measured(name, case, folder)
    proved = ""
    if prove and case.one is not None:
        code = prove_script(SCRIPTS / name, small, case.one.split(), 2, folder / "proof")
        proved = "equal" if code == 0 else "differs"
    return {
        "script": name, "ranks": case.ranks, "parameters": first.parameters, "tflop": first.flops / 1e12,
        "gigabytes": max(own["total"] for own in planned.memory.values()) / 1e9, "step_seconds": planned.seconds,
        "sent_gigabytes": first.sent_bytes / 1e9, "notes": len(first.unseen), "adopted_in_seconds": seconds,
        "products_error": products_of(tiny) / real["products"] - 1,
        "bytes_error": tiny.memory.allocated / real["peak_bytes"] - 1, "proved": proved,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Ten scripts, read, predicted, measured and proved.")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--prove", action="store_true", help="two processes against one, of scripts with equal data")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to FILE as well")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.only:
        with tempfile.TemporaryDirectory() as folder:
            try:
                rows.append(row_of(name, CASES[name], Path(folder), prove=arguments.prove))
            except (MeshwrightError, RuntimeError) as error:
                rows.append({"script": name, "failed": str(error)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    table = Table(title="full size on DGX H100; errors of the small form against a real step on CPUs")
    for head in ("script", "ranks", "parameters", "Tflop", "GB", "s a step", "GB sent", "notes", "products", "bytes",
                 "proved"):  # fmt: skip
        table.add_column(head, justify="left" if head == "script" else "right")
    for row in rows:
        if "failed" in row:
            table.add_row(str(row["script"]), *[""] * 9, str(row["failed"])[:60])
            continue
        table.add_row(
            str(row["script"]), str(row["ranks"]), f"{row['parameters']:,}", f"{row['tflop']:.4g}",
            f"{row['gigabytes']:.2f}", f"{row['step_seconds']:.4g}", f"{row['sent_gigabytes']:.2f}", str(row["notes"]),
            f"{row['products_error']:+.1%}", f"{row['bytes_error']:+.1%}", str(row["proved"]),
        )  # fmt: skip
    Console(width=140).print(table)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
