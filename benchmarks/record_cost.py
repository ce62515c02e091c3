"""`python -m benchmarks.record_cost`: the cost of `parity record` for a step with the widths of a model of 1 B.

The widths are Llama 3.2 1B's (hidden 2048, 32 heads over 8, inner 8192). The count of layers (the model has 16), the
rows of the table and the batch are options, because the whole model with gradients does not fit on a small machine.
Each way runs in a new process, with a separate peak of resident memory: plain, recorded in every step but the first,
and perturbed by rounding.
Recorded bytes grow with modules, not with widths, so that a line extrapolates to 16 layers.
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
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.llama_model import PlainLlama, Sizes
from meshwright import parity
from meshwright.parity.recorded import RecordedRun
from meshwright.parity.runs import compare_runs

WAYS = ("plain", "recorded", "perturbed")
LAYERS = 16


def run_one(way: str, sizes: Sizes, steps: int, most: int, folder: Path) -> dict[str, object]:
    """Return seconds of each step but the first, which also allocates; and the peak of resident memory, in bytes."""
    torch.manual_seed(1)
    model = PlainLlama(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seconds = []
    options = {"steps": range(2, steps + 1), "most": most, "perturb": 1 if way == "perturbed" else None}
    with nullcontext() if way == "plain" else parity.recording(folder, model, **options):
        for step in range(steps):
            start = time.monotonic()
            tokens, labels = sizes.batch(step)
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            seconds.append(time.monotonic() - start)
    return {
        "seconds": seconds[1:],
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def written_bytes(folder: Path) -> tuple[int, int]:
    """Return bytes of a recorded step's files, and of the first weights."""
    step = sum(path.stat().st_size for path in folder.rglob("step-2.*"))
    return step, sum(path.stat().st_size for path in folder.rglob("first.safetensors"))


def report(told: dict[str, dict[str, object]], folder: Path, sizes: Sizes) -> None:
    """Print a row a way, and the bytes of a step on disk."""
    plain = statistics.median(told["plain"]["seconds"])  # type: ignore[arg-type]
    base = told["plain"]["peak_bytes"]
    print(f"{sizes}: {told['plain']['parameters']:,} parameters, float32, {torch.get_num_threads()} threads")
    print(f"{'':10} {'s a step':>9} {'times plain':>12} {'peak GB':>8} {'more MB':>8}")
    for way, facts in told.items():
        median = statistics.median(facts["seconds"])  # type: ignore[arg-type]
        peak = facts["peak_bytes"]
        print(f"{way:10} {median:9.2f} {median / plain:12.2f} {peak / 1e9:8.2f} {(peak - base) / 1e6:8.0f}")  # type: ignore[operator]
    step, first = written_bytes(folder / "rank-0")
    whole = step * LAYERS / sizes.layers
    print(f"on disk: {step / 1e6:.0f} MB a step and {first / 1e6:.0f} MB of first weights", end="; ")
    start = time.monotonic()
    holds = all(result.holds for result in compare_runs(RecordedRun.read(folder), RecordedRun.read(folder)))
    seconds = time.monotonic() - start
    print(f"of {LAYERS} layers at most {whole / 1e6:.0f} and {first * LAYERS / sizes.layers / 1e6:.0f} MB")
    print(f"compared with itself: {'equal' if holds else 'DIFFERS'}, {seconds:.1f} s")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--most", type=int, default=65536, help="elements kept of a tensor")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    sizes = Sizes(given.layers, 2048, 32, 8, 8192, given.vocabulary, True, given.rows, given.tokens)
    if given.way:
        print(json.dumps(run_one(given.way, sizes, given.steps, given.most, given.out)))
        return
    with tempfile.TemporaryDirectory() as folder:
        told = {}
        for way in WAYS:
            again = [sys.executable, "-m", "benchmarks.record_cost", "--way", way, "--out", folder]
            again += [
                f"--{name}={getattr(given, name)}" for name in ("layers", "vocabulary", "tokens", "rows", "steps")
            ]
            ran = subprocess.run([*again, f"--most={given.most}"], stdout=subprocess.PIPE, text=True, check=True)
            told[way] = json.loads(ran.stdout)
        report(told, Path(folder), sizes)


if __name__ == "__main__":
    main()
