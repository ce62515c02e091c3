"""Measured steps of public FSDP trainers against `meshwright adopt` of a similar script: predicted, measured.

    python -m benchmarks.adopt_rows [--rows N] [--file FILE]

Rows are MPT's of validation/public/mpt.csv (the source is in the first line) on one node in bf16, with at most three
microbatches a step; the script is benchmarks/fsdp_loop.py with the row's sizes. MPT's trainer has FSDP 1, a fused
AdamW without states in bf16, and flash attention; the row says no more.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from meshwright.planner.adopt.job import Question, run_rank
from meshwright.planner.adopt.planned import plan
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.software import load_program
from validation.paper import read_table
from validation.public import FOLDER

SCRIPT = Path(__file__).with_name("fsdp_loop.py")
CLUSTERS = {"h100_80gb": "dgx-h100", "a100_80gb": "dgx-a100"}
MOST_MICROBATCHES = 3
WORDS = {"width": "hidden", "layers": "layers", "heads": "heads", "inner": "ffn", "vocabulary": "vocab"}


def main() -> None:
    """Print one line a row: seconds predicted and measured."""
    parser = argparse.ArgumentParser(description="Adopted scripts against measured rows.")
    parser.add_argument("--rows", type=int, default=100, help="the first N rows")
    parser.add_argument("--file", type=Path, default=Path("adopt_rows.json"), help="rows; those there are skipped")
    arguments = parser.parse_args()
    done = json.loads(arguments.file.read_text()) if arguments.file.is_file() else {}
    errors: list[float] = []
    chosen = [line for line in read_table(FOLDER / "mpt.csv") if line["device"] in CLUSTERS and line["gpus"] == "8"
              and line["precision"] == "bf16"
              and int(line["batch"]) <= MOST_MICROBATCHES * 8 * int(line["micro"])]  # fmt: skip
    for line in chosen[: arguments.rows]:
        name = f"{line['model']}, {line['device']}, {line['seq']} tokens, micro {line['micro']}, {line['recompute']}"
        if name not in done:
            accumulated = int(line["batch"]) // (8 * int(line["micro"]))
            words = [item for word, key in WORDS.items() for item in (f"--{word}", line[key])]
            words += ["--length", line["seq"], "--micro", line["micro"], "--accumulated", str(accumulated)]
            words += ["--recompute"] * (line["recompute"] == "full")
            cluster = load_cluster(CLUSTERS[line["device"]])
            with tempfile.TemporaryDirectory() as folder:
                facts = run_rank(Question(SCRIPT, tuple(words), cluster, 8), 0, Path(folder))
            # The attention of 2023, as in `make validate` for the same rows.
            kernel = load_program("llm-foundry-2023").software.attention_kernel
            planned = plan({0: facts}, cluster, 8, kernel)
            done[name] = {"predicted": planned.seconds, "measured": float(line["seconds"]), "fits": planned.fits}
            arguments.file.write_text(json.dumps(done, indent=1) + "\n")
        row = done[name]
        errors.append(row["predicted"] / row["measured"] - 1)
        fits = "" if row["fits"] else ", does not fit"
        sys.stdout.write(
            f"{name}: {row['predicted']:.3f} s, measured {row['measured']:.3f} ({errors[-1]:+.1%}{fits})\n"
        )
        sys.stdout.flush()
    mean = sum(map(abs, errors)) / max(1, len(errors))
    sys.stdout.write(f"{len(errors)} rows, mean error {mean:.1%}\n")


if __name__ == "__main__":
    main()
