"""Seconds of commands that answer without a run, and of a proof: python -m benchmarks.commands [--rounds N]

Each command runs in a new process, in turns, after an untimed round that warms the page cache and writes bytecode.
Medians of wall seconds until the command ends, and of the processor seconds of all started processes: a launcher's fork
server outlives the launcher, so this process adopts the server (Linux). Floors: Python alone, and torch's import.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from contextlib import suppress

MESHWRIGHT = ["-m", "meshwright"]
COMMANDS = {
    "pass": ["-c", "pass"],
    "torch": ["-c", "import torch"],
    "bare": MESHWRIGHT,
    "help": [*MESHWRIGHT, "--help"],
    "version": [*MESHWRIGHT, "--version"],
    "verify-help": [*MESHWRIGHT, "verify", "--help"],
    "config": [*MESHWRIGHT, "config", "layout.tensor"],
    "doctor": [*MESHWRIGHT, "doctor"],
    "verify": [*MESHWRIGHT, "verify", "quickstart"],
}
_ADOPT = 36
"""prctl's PR_SET_CHILD_SUBREAPER: orphans of children become children."""


def seconds_of(words: list[str], folder: str) -> tuple[float, float]:
    """Return the wall seconds of a command of this Python, and the processor seconds of all processes."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ran = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    wall = time.perf_counter() - start
    if ran.returncode and words != MESHWRIGHT:  # without words, help is printed and the code is a mistake's
        raise SystemExit(f"{' '.join(words)}: code {ran.returncode}: {ran.stderr}")
    with suppress(ChildProcessError):
        while True:
            os.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    arguments = parser.parse_args(words)
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(_ADOPT, 1, 0, 0, 0):
        raise SystemExit("this system adopts no orphans: their processor time would be missing")
    found: dict[str, list[tuple[float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(arguments.rounds + 1):
            for name in arguments.only:
                seconds = seconds_of(COMMANDS[name], folder)
                if turn:
                    found[name].append(seconds)
    for name, each in found.items():
        wall, used = (statistics.median(pair[side] for pair in each) for side in (0, 1))
        print(f"python {' '.join(COMMANDS[name]):32s} {wall:6.2f} s, {used:6.2f} processor s", flush=True)


if __name__ == "__main__":
    main()
