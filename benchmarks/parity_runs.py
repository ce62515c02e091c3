"""`python -m benchmarks.parity_runs`: training scripts recorded unchanged on 1 and on 2 processes, and compared.

A row is a script of examples/parity/runs on two processes, right or with a planted mistake, against the right script on
one process. A right row should be `equal`. A mistake should have the kind and module of `RUNS`. Seconds are for the
recorded script with the start, megabytes for a rank's record. A missing framework is named:
`pip install transformers accelerate lightning==2.6.6 deepspeed==0.19.8`. torchtitan's trainer asks for a GPU: the row
shows the final error. `--large` measures one step of a model of about 100 M parameters: seconds unrecorded and
recorded, the peak of resident memory, disk.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.llama_model import PlainLlama, Sizes
from meshwright import parity
from meshwright.parity.recorded import RecordedRun
from meshwright.parity.runs import compare_runs

SCRIPTS = Path(__file__).resolve().parents[1] / "examples/parity/runs"
ALL = "(all parameters)"
LARGE = Sizes(12, 768, 12, 12, 2048, 32768, True, 1, 256)


@dataclass(frozen=True)
class Run:
    """A script on two ranks."""

    script: str
    axis: str
    wrong: str = ""
    """The planted mistake."""
    kind: str = ""
    """Of the expected finding."""
    module: str = ""
    """Of the expected finding."""
    stage: int = 0
    """Of ZeRO."""

    @property
    def title(self) -> str:
        return f"{self.script} {self.stage}" if self.stage else self.script

    @property
    def words(self) -> list[str]:
        return [*(("--stage", str(self.stage)) if self.stage else ()), "--wrong", self.wrong]


RUNS = (
    Run("ddp", "data"),
    Run("ddp", "data", "sync", "missing reduction", ALL),
    Run("ddp", "data", "thawed", "missing reduction", "2"),
    Run("ddp", "data", "order", "clipping", ALL),
    Run("ddp", "data", "division", "scaled", ALL),
    Run("fsdp2", "data"),
    Run("fsdp2", "data", "divide", "scaled", ALL),
    Run("fsdp2", "data", "local", "clipping", ALL),
    Run("tensor", "tp"),
    Run("tensor", "tp", "partial", "missing reduction", "3"),
    Run("tensor", "tp", "local", "clipping", ALL),
    Run("zero", "data"),
    Run("zero", "data", "rate", "optimizer", ALL),
    Run("zero", "data", "decay", "optimizer", "0"),
    Run("zero", "data", "mean", "wrong buffer", "1"),
    Run("trainer", "data"),
    Run("trainer", "data", "tokens", "token counts", "(loss)"),
    Run("trainer", "data", "clip", "clipping", ALL),
    Run("trainer", "data", "rate", "optimizer", ALL),
    Run("accelerate_loop", "data"),
    Run("accelerate_loop", "data", "prepare", "missing reduction", ALL),
    Run("accelerate_loop", "data", "clip", "clipping", ALL),
    Run("lightning_loop", "data"),
    Run("lightning_loop", "data", "rows", "wrong data", "(data)"),
    Run("lightning_loop", "data", "shuffle", "wrong data", "(data)"),
    Run("lightning_loop", "data", "rate", "optimizer", ALL),
    Run("lightning_loop", "data", "clip", "clipping", ALL),
    Run("lightning_loop", "data", "sum", "scaled", ALL),
    *(
        Run("deepspeed_zero", "data", wrong, kind, module, stage)
        for stage in (1, 2)
        for wrong, kind, module in (
            ("", "", ""), ("division", "scaled", "(loss)"), ("clip", "optimizer", ALL), ("rate", "optimizer", ALL),
            ("rows", "wrong data", "(data)"),
        )
    ),
)  # fmt: skip
NEEDS = {
    "trainer": ("transformers", "accelerate"), "accelerate_loop": ("accelerate",), "lightning_loop": ("lightning",),
    "deepspeed_zero": ("deepspeed",),
}  # fmt: skip
NO_CPU = {"torchtitan": ("-m", "torchtitan.train", "--module", "llama3", "--config", "llama3_debugmodel")}
"""Frameworks with a trainer that asks for a GPU: the command that prints this error in the last line."""


def installed(package: str) -> str:
    """Return the version of a package; empty if absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def record(run: Run, ranks: int, folder: Path, *words: str) -> float:
    """Record a script; return the seconds of the whole command. Raises if the script fails."""
    start = time.monotonic()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += ["-m", "meshwright.parity", "record", "--out", str(folder), "--axes", f"{run.axis}={ranks}", *words]
    ran = subprocess.run([*command, str(SCRIPTS / f"{run.script}.py"), *run.words], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)  # fmt: skip
    if ran.returncode:
        raise RuntimeError(f"{run.title} {run.wrong} on {ranks} ranks failed:\n{ran.stdout[-3000:]}")
    return time.monotonic() - start


def said_of(run: Run, reference: Path, folder: Path) -> tuple[str, bool]:
    """Return the comparison in words, and whether the finding is as expected."""
    results = compare_runs(RecordedRun.read(reference), RecordedRun.read(folder))
    found = next((result for result in results if not result.holds), None)
    if found is None:
        return f"equal, {len(results)} steps", not run.wrong
    if found.finding is None:
        return f"{found.check.name}: found, not named", False
    mistake, module, text = found.finding.kind, found.finding.module, found.finding.text
    return f"{found.check.name}: {mistake} at {module}: {text}", (mistake, module) == (run.kind, run.module)


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.iterdir()) / 1e6


def run_all(runs: Sequence[Run]) -> list[dict[str, object]]:
    """Print a row for each run after the comparison; return all rows."""
    print("| script, 2 ranks | planted | `compare` with one process | as expected | s | MB a rank |")
    print("|---|---|---|---|--:|--:|", flush=True)
    told: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as name:
        references: dict[str, Path] = {}
        for run in runs:
            if missing := [package for package in NEEDS.get(run.script, ()) if not installed(package)]:
                print(f"| {run.title} | {run.wrong} | {missing[0]} is not installed | | | |", flush=True)
                continue
            if run.title not in references:
                references[run.title] = single = Path(name) / f"{run.title}-1"
                right = replace(run, wrong="")
                record(right, 1, single)
                record(right, 1, single, "--perturb", "1")
            folder = Path(name) / f"{run.title}-2-{run.wrong}"
            seconds = record(run, 2, folder)
            said, expected = said_of(run, references[run.title], folder)
            size = megabytes(folder / "rank-0")
            numbers = f"{'yes' if expected else 'NO'} | {seconds:.0f} | {size:.1f}"
            print(f"| {run.title} | {run.wrong} | {said} | {numbers} |", flush=True)
            told.append({"script": run.title, "wrong": run.wrong, "said": said, "expected": expected,
                         "seconds": seconds, "megabytes": size})  # fmt: skip
    for package, words in NO_CPU.items() if len(runs) == len(RUNS) else ():
        why = f"{package} is not installed"
        if installed(package):
            ran = subprocess.run([sys.executable, *words], text=True, capture_output=True, timeout=120)
            why = f"exit code {ran.returncode}: {ran.stderr.strip().splitlines()[-1]}"
        print(f"| {package} | | {why} | | | |")
    right, wrong = ([row for row in told if bool(row["wrong"]) is planted] for planted in (False, True))
    print(f"\nright pairs equal: {sum(bool(row['expected']) for row in right)} of {len(right)}; mistakes named as "
          f"expected: {sum(bool(row['expected']) for row in wrong)} of {len(wrong)}; found: "
          f"{sum('equal' not in str(row['said']) for row in wrong)}")  # fmt: skip
    return told


def run_large(way: str, folder: Path) -> dict[str, float]:
    """Make four clipped AdamW steps of `LARGE`, the second recorded; return seconds, and the peak of memory."""
    torch.manual_seed(1)
    model = PlainLlama(LARGE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds, busy = [], []
    with nullcontext() if way == "plain" else parity.recording(folder, model, steps=(2,)):
        for step in range(4):
            start, spent = time.monotonic(), time.process_time()
            tokens, labels = LARGE.batch(step)
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            seconds.append(time.monotonic() - start)
            busy.append(time.process_time() - spent)
    # A recorded step ends at the next begin: the end of the second is the third's time above the fourth's.
    return {
        "wall": seconds[1] + seconds[2] - seconds[3], "processor": busy[1] + busy[2] - busy[3],
        "peak": 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "parameters": float(sum(p.numel() for p in model.parameters())),
    }  # fmt: skip


def measure_large(rounds: int) -> None:
    """Print the cost of a recorded step of the large model, by processes in turns."""
    with tempfile.TemporaryDirectory() as name:
        told: dict[str, list[dict[str, float]]] = {"plain": [], "recorded": []}
        for turn in range(rounds):
            for way, held in told.items():
                words = [sys.executable, "-m", "benchmarks.parity_runs", "--way", way, "--out", f"{name}/{turn}"]
                held.append(json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout))
        size = megabytes(Path(name) / "0/rank-0")
    print(f"{told['plain'][0]['parameters'] / 1e6:.0f} M parameters, {LARGE.tokens} tokens, AdamW, clipped, float32, "
          f"{torch.get_num_threads()} threads, {rounds} rounds")  # fmt: skip
    for way, held in told.items():
        wall, processor, peak = (
            statistics.median(facts[key] for facts in held) for key in ("wall", "processor", "peak")
        )
        print(f"{way:9} a step {wall:.2f} s, of a processor {processor:.2f} s; peak {peak / 1e9:.2f} GB")
    print(f"on disk: {size:.0f} MB")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="scripts by name")
    parser.add_argument("--json", type=Path, help="keep the rows")
    parser.add_argument("--large", action="store_true", help="the cost of a step of about 100 M parameters")
    parser.add_argument("--rounds", type=int, default=3, help="of --large")
    parser.add_argument("--way", choices=("plain", "recorded"), help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.way:
        print(json.dumps(run_large(given.way, given.out)))
    elif given.large:
        measure_large(given.rounds)
    else:
        told = run_all([run for run in RUNS if not given.only or run.script in given.only])
        if given.json:
            given.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
