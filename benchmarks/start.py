"""Seconds of a start: until a command answers, until a run's first step begins, and of a core a rank.

    python -m benchmarks.start [--rounds N] [--compiled]

`--compiled`: a GPT-2 of four layers of width 768 with `compile`, and the seconds that compiling adds. "Nothing on disk"
is the first compiled run of a machine; "cold" has the header that all C++ kernels include, which torch keeps for all
runs, and no graph; "warm" has both.

Each figure is the least of the rounds, since other work on the machine only adds time. A run is a GPT-2 of four small
layers on prepared data. Wall seconds count from the command. A rank's processor seconds are the process's until the
first step; for a forked rank these leave out the fork server's imports.
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
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

from benchmarks.start_worker import SEPARATE

COMMANDS = {
    "--help": ["--help"],
    "plan --help": ["plan", "--help"],
    "a config mistake": ["train", "run.yaml", "layout.data.sync=alreduce"],
}
STAGES = ["layout.pipeline.size=4", "layout.pipeline.schedule=1f1b"]
RUNS = {
    "1 rank": ["layout.transport=torch"],
    "2 ranks, gloo": ["layout.data.size=2", "layout.transport=torch"],
    "2 ranks, MPI": ["layout.data.size=2", "layout.transport=mpi"],
    "4 stages, gloo": [*STAGES, "layout.transport=torch"],
    "4 stages, MPI": [*STAGES, "layout.transport=mpi"],
}
RUN = """
model: {base: gpt2-small, layers: 4, hidden: 64, heads: 2, positions: 64, vocabulary: 300, vocabulary_multiple: 4}
data: {source: text.txt, sequence: 64}
batch: {global: 8}
steps: 1
device: cpu
threads: 1
metrics: {sinks: []}
"""

COMPILED = """
model: {base: gpt2-small, layers: 4, positions: 128, vocabulary: 300, vocabulary_multiple: 4, dropout: 0}
data: {source: text.txt, sequence: 128}
batch: {global: 4}
layout: {transport: torch}
steps: 1
device: cpu
metrics: {sinks: []}
"""
OVER = "until it is over"


def train_once(words: list[str], out: str) -> None:
    """Launch a run with ranks of benchmarks/start_worker.py, as `meshwright train` does."""
    import meshwright as mw
    from meshwright.training import job

    with patch.object(job, "TRAIN_WORKER", "benchmarks.start_worker:worker"):
        mw.train(mw.load("run.yaml", words), out)


def first_step(folder: Path, words: list[str], out: Path, **variables: str) -> dict[str, float]:
    code = f"from benchmarks.start import train_once; train_once({words!r}, {str(out)!r})"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(Path.cwd()), *sys.path])} | variables
    started = time.time()
    subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    marks = [json.loads(path.read_text()) for path in out.glob("start-*.json")]
    return {
        "until the first step begins": max(mark["begins"] for mark in marks) - started,
        OVER: max(mark["ends"] for mark in marks) - started,
        **{stage: max(mark[stage] for mark in marks) for stage in marks[0] if stage not in ("begins", "ends")},
    }


def print_compiled(folder: Path, rounds: Sequence[int]) -> None:
    (folder / "run.yaml").write_text(COMPILED)
    plain = [first_step(folder, ["compile=none"], folder / f"none {turn}") for turn in rounds]
    print(f"compile=none: {least(plain)}", flush=True)
    without = min(figures[OVER] for figures in plain)
    for name in ("islands", "blocks", "blocks, a file a kernel"):
        compiles, separate = name.partition(",")[0], {SEPARATE: "1"} if "," in name else {}
        starts: dict[str, list[dict[str, float]]] = {"nothing on disk": [], "cold": [], "warm": []}
        for turn in rounds:
            temporary = folder / f"{'-'.join(name.replace(',', '').split())}-{turn}"  # g++'s command has no quotes
            temporary.mkdir()
            for state, cache in zip(starts, ("first", "second", "second"), strict=True):
                variables = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(temporary / cache)}
                out = folder / f"{name} {turn} {state}"
                starts[state].append(first_step(folder, [f"compile={compiles}"], out, **variables | separate))
        for state, found in starts.items():
            adds = min(figures[OVER] for figures in found) - without
            print(f"compile={name}, {state}: adds {adds:.1f} s; {least(found)}", flush=True)


def answer(folder: Path, words: Sequence[str]) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    subprocess.run([sys.executable, "-m", "meshwright", *words], cwd=folder, capture_output=True)
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"wall": wall, "processor": used}


def least(rounds: Sequence[dict[str, float]]) -> str:
    return ", ".join(f"{name} {min(figures[name] for figures in rounds):.2f} s" for name in rounds[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compiled", action="store_true")
    arguments = parser.parse_args()
    rounds = range(arguments.rounds)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(RUN)
        (folder / "text.txt").write_text("a rank is a process, and a process is a rank.\n" * 2000)
        if arguments.compiled:
            print_compiled(folder, rounds)
            return
        for command, words in COMMANDS.items():
            print(f"{command}: {least([answer(folder, words) for _ in rounds])}", flush=True)
        imported = [answer_of("import meshwright.training.worker") for _ in rounds]
        print(f"imports of a rank: {least(imported)}", flush=True)
        for what, run in RUNS.items():
            starts = [first_step(folder, run, folder / f"{what} {turn}") for turn in rounds]
            print(f"{what}: {least(starts)}", flush=True)


def answer_of(code: str) -> dict[str, float]:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime}


if __name__ == "__main__":
    main()
