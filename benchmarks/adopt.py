"""Eleven scripts of examples/adopt: read and predicted at full size; a small form of each measured and proved here.

    python -m benchmarks.adopt [--only NAME ...] [--prove] [--large] [--file FILE]

Full size: without values, as a GPU's program, planned on DGX H100. Small: the script's `TINY` form as a CPU's program,
against torch's own count of products and the live bytes of a real step (adopt_measure.py). --prove: two processes
against one. --large: in addition a Llama of 70 B parameters under FSDP2 on 64 devices, with the processor time and the
memory of the command.

zero.py is measured if DeepSpeed is installed (`pip install deepspeed`, DS_ACCELERATOR=cpu).

Each row is written to FILE when it is ready, and a later start with the same FILE skips rows that are there. Processor
seconds and bytes do not depend on other programs on the machine; the row keeps the load average next to its wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from meshwright.planner.adopt.job import Question, run_ranks
from meshwright.planner.adopt.planned import plan
from meshwright.planner.adopt.proof import prove_script
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.recorder import Kernel
from meshwright.ranks.errors import MeshwrightError

SCRIPTS = Path(__file__).resolve().parent.parent / "examples/adopt"
LARGE = "fsdp.py --size 70b"


@dataclass(frozen=True)
class Case:
    """A script with its words at full size and small, and the ranks of both."""

    words: str = ""
    ranks: int = 1
    small: str = ""
    small_ranks: int = 1
    needs: str = ""
    """A package without which the small form cannot be measured and proved."""


TRAINER = "--output_dir {folder} --report_to none --save_strategy no"
SMALL_GPT = "--width 64 --layers 2 --heads 4 --vocabulary 256 --length 32"
ZERO = {
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 20000, "allgather_bucket_size": 50000},
    "bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 2,
}  # fmt: skip
"""DeepSpeed's JSON of the small form, with buckets smaller than the model."""
CASES = {
    "gpt.py": Case(
        "",
        1,
        "--layers 2 --width 64 --heads 4 --block_size 32 --vocabulary 256 --batch_size 4 --dtype float32 --steps 3",
    ),
    "ddp.py": Case("", 8, "--batch 4 --steps 3", 2),
    "fsdp.py": Case("--size 8b", 8, "--size tiny --sequence 32 --steps 3 --float32", 2),
    "tensor_parallel.py": Case("", 4, "", 2),
    "trainer.py": Case(
        f"{TRAINER} --bf16", 1, f"{TRAINER} {SMALL_GPT} --max_steps 3 --use_cpu --per_device_train_batch_size 4"
    ),
    "accelerated.py": Case(),
    "pipeline.py": Case("", 4, "", 2),
    "lora.py": Case(),
    "vision.py": Case("", 8, "--batch 8 --groups 4"),
    "zero.py": Case("", 8, "--config {folder}/zero.json", 2, "deepspeed"),
    "packed.py": Case(),
}


def products_of(adopted: object) -> float:
    entries = getattr(adopted, "entries")  # noqa: B009
    return sum(
        e.event.flops * e.event.times for e in entries if isinstance(e.event, Kernel) and e.event.kind == "product"
    )


def measured(name: str, case: Case, small: Sequence[str], folder: Path) -> dict[str, float]:
    """Run the small form on CPUs."""
    out = folder / "measured.json"
    words = ["-m", "benchmarks.adopt_measure", str(out), str(SCRIPTS / name), *small]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.small_ranks)]
    command = [sys.executable, *(torchrun if case.small_ranks > 1 else []), *words]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS.parent.parent)
    if not out.is_file():
        raise RuntimeError(f"{name}: {ran.stderr[-500:]}")
    return dict(json.loads(out.read_text()))


def spent() -> float:
    """Return the processor seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def row_of(name: str, case: Case, folder: Path, *, prove: bool) -> dict[str, object]:
    """Return the figures of a script."""
    cluster = load_cluster("dgx-h100")
    os.environ.pop("TINY", None)
    begin, used = time.monotonic(), spent()
    words = tuple(case.words.format(folder=folder).split())
    ranks = run_ranks(Question(SCRIPTS / name, words, cluster, case.ranks), folder / "full")
    seconds, processor = time.monotonic() - begin, spent() - used
    planned = plan(ranks, cluster, case.ranks)
    first = ranks[0]
    row: dict[str, object] = {
        "script": name, "ranks": case.ranks, "parameters": first.parameters, "tflop": first.flops / 1e12,
        "gigabytes": max(memory["total"] for memory in planned.memory.values()) / 1e9, "step_seconds": planned.seconds,
        "sent_gigabytes": first.sent_bytes / 1e9, "notes": len(first.unseen), "adopted_in_seconds": seconds,
        "adopted_in_processor_seconds": processor,
    }  # fmt: skip
    os.environ["TINY"] = "1"
    small = tuple(case.small.format(folder=folder).split())
    question = Question(SCRIPTS / name, small, cluster, case.small_ranks, "cpu")
    (folder / "zero.json").write_text(json.dumps(ZERO))
    tiny = run_ranks(question, folder / "small")[0]
    there = not case.needs or find_spec(case.needs) is not None
    if there:
        real = measured(name, case, small, folder)
        row["products_error"] = products_of(tiny) / real["products"] - 1
        row["bytes_error"] = tiny.memory.allocated / real["peak_bytes"] - 1
    if prove and there:
        row["proved"] = prove_script(SCRIPTS / name, small, None, 2, folder / "proof").verdict
    return row | {"seconds": time.monotonic() - begin, "load": os.getloadavg()[0], "cores": os.cpu_count()}


def large_row(folder: Path) -> dict[str, object]:
    """Adopt a Llama of 70 B parameters on 64 devices by the command; return processor seconds and peak memory."""
    command = [sys.executable, "-m", "meshwright.cli", "adopt", "--edits", "0", "--json", "--out", str(folder / "out")]
    used, begin = spent(), time.monotonic()
    ran = subprocess.run(
        [*command, "--ranks", "64", str(SCRIPTS / "fsdp.py"), "--size", "70b"], capture_output=True, text=True
    )
    if ran.returncode:
        raise RuntimeError(f"{LARGE}: {ran.stderr[-500:]}")
    answer = json.loads(ran.stdout)
    first, planned = answer["adopted"]["0"], answer["planned"]
    return {
        "script": LARGE, "ranks": 64, "parameters": first["parameters"], "tflop": first["flops"] / 1e12,
        "gigabytes": max(memory["total"] for memory in planned["memory"].values()) / 1e9,
        "step_seconds": planned["seconds"], "sent_gigabytes": first["sent_bytes"] / 1e9,
        "notes": len(first["unseen"]), "adopted_in_seconds": time.monotonic() - begin,
        "adopted_in_processor_seconds": spent() - used,
        "peak_gigabytes": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6,
        "load": os.getloadavg()[0], "cores": os.cpu_count(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Eleven scripts, read, predicted, measured and proved.")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--prove", action="store_true", help="two processes against one")
    parser.add_argument("--large", action="store_true", help="a Llama of 70 B parameters as well, without a proof")
    parser.add_argument("--file", type=Path, default=Path("adopt.json"), help="rows; those that are there are skipped")
    arguments = parser.parse_args()
    rows = json.loads(arguments.file.read_text()) if arguments.file.is_file() else {}
    for name in [*([LARGE] if arguments.large else []), *arguments.only]:
        if (
            name in rows
            and "failed" not in rows[name]
            and (name == LARGE or not arguments.prove or "proved" in rows[name])
        ):
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                if name == LARGE:
                    rows[name] = large_row(Path(folder))
                else:
                    rows[name] = row_of(name, CASES[name], Path(folder), prove=arguments.prove)
            except (MeshwrightError, RuntimeError) as error:
                rows[name] = {"script": name, "failed": str(error)}
        print(json.dumps(rows[name]), file=sys.stderr, flush=True)
        unfinished = arguments.file.with_suffix(".part")
        unfinished.write_text(json.dumps(rows, indent=1) + "\n")
        unfinished.replace(arguments.file)
    Console(width=140).print(table_of([rows[name] for name in [*CASES, LARGE] if name in rows]))


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the printed table."""
    table = Table(title="full size on DGX H100; errors and proof: of the small form on CPUs")
    heads = ("script", "ranks", "parameters", "Tflop", "GB", "s a step", "GB sent", "notes", "processor s")
    for head in (*heads, "products", "bytes", "proved"):
        table.add_column(head, justify="left" if head == "script" else "right")
    for row in rows:
        if "failed" in row:
            table.add_row(str(row["script"]), *[""] * 10, str(row["failed"])[:60])
            continue
        errors = [f"{row[name]:+.1%}" if name in row else "" for name in ("products_error", "bytes_error")]
        table.add_row(
            row["script"], str(row["ranks"]), f"{row['parameters']:,}", f"{row['tflop']:.4g}",
            f"{row['gigabytes']:.2f}", f"{row['step_seconds']:.4g}", f"{row['sent_gigabytes']:.2f}", str(row["notes"]),
            f"{row['adopted_in_processor_seconds']:.0f}", *errors, row.get("proved", "").partition(":")[0],
        )  # fmt: skip
    if (large := next((row for row in rows if "peak_gigabytes" in row), None)) is not None:
        table.caption = f"{LARGE}: {large['peak_gigabytes']:.2f} GB of host memory at the peak of one process"
    return table


if __name__ == "__main__":
    main()
