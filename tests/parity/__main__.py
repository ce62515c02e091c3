"""`python -m tests.parity`: planted mistakes and right programs through `meshwright parity`, in three precisions.

Prints the number of mistakes that are found, at the right module, of the right kind; the false alarms among right
programs, and the largest error relative to the tolerance; the seconds of a check without the start of processes, and of
examples/parity/ddp.py with the start. All cases with equal numbers of ranks share processes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from meshwright.parity.check import ParityCheck, ParityResult, collect, judged, run_check
from meshwright.parity.worker import call_check
from meshwright.ranks.launch import Rank, Ranks, run
from tests.parity.cases import MISTAKES, RIGHT, PlantedMistake
from tests.parity.programs import run_program

PRECISIONS = ("float64", "float32", "bf16")
ROOT = Path(__file__).resolve().parents[2]


def settings() -> list[tuple[str, Any, PlantedMistake | None]]:
    """Return every case: the name, the program's setting, and the planted mistake."""
    wrong = [(mistake.wrong, mistake.setting, mistake) for mistake in MISTAKES]
    return [*wrong, *((f"right-{number}", setting, None) for number, setting in enumerate(RIGHT, 1))]


def run_cases(rank: Rank, names: Sequence[str], precisions: Sequence[str], out: Path) -> list[float]:
    """Run one rank of all cases of a number of ranks. Return the seconds of each."""
    seconds, chosen = [], {name: (setting, mistake) for name, setting, mistake in settings()}
    for precision in precisions:
        for name in names:
            setting, mistake = chosen[name]
            folder = out / f"{name}-{precision}"
            folder.mkdir(exist_ok=True)
            start = time.monotonic()
            planted = mistake.wrong if mistake else ""
            call_check(lambda job, s=setting, w=planted: run_program(job, s, w), rank.mesh, precision, folder)
            seconds.append(time.monotonic() - start)
    return seconds


def results_of(precisions: Sequence[str], folder: Path) -> dict[tuple[str, str], ParityResult]:
    """Run all cases and judge the records."""
    results = {}
    cases = settings()
    for axes in sorted({setting.axes for _, setting, _ in cases}, key=len):
        names = [name for name, setting, _ in cases if setting.axes == axes]
        seconds = run(run_cases, Ranks(axes), names=names, precisions=list(precisions), out=folder)[0]
        for (precision, name), spent in zip(((p, n) for p in precisions for n in names), seconds, strict=True):
            check = ParityCheck(name, Path(__file__), axes, precision)
            result = judged(check, precision, folder / f"{name}-{precision}", time.monotonic() - spent)
            results[name, precision] = result
    return results


def names_it(result: ParityResult, mistake: PlantedMistake) -> bool:
    """Return whether the named module is one of the mistake's modules, is inside one, or is the parent of one."""
    named = result.finding.module if result.finding is not None else ""
    return any(named == m or named.startswith(f"{m}.") or m in named.split(".") for m in mistake.modules)


def report(results: dict[tuple[str, str], ParityResult], precisions: Sequence[str]) -> dict[str, Any]:
    """Print a row a mistake and the counts of each precision."""
    told: dict[str, Any] = {}
    right = [name for name, _, mistake in settings() if mistake is None]
    for precision in precisions:
        counts = dict.fromkeys(("found", "module", "kind"), 0)
        for mistake in MISTAKES:
            result = results[mistake.wrong, precision]
            kind = result.finding.kind if result.finding is not None else ""
            marks = [not result.holds, names_it(result, mistake), kind in mistake.kinds]
            counts = {key: counts[key] + mark for key, mark in zip(counts, marks, strict=True)}
            words = " ".join(word if mark else f"NOT-{word}" for word, mark in zip(counts, marks, strict=True))
            print(f"{precision:8} {mistake.wrong:38} {words:32} {result.verdict[:150]}")
        alarms = [name for name in right if not results[name, precision].holds]
        for name in alarms:
            print(f"{precision:8} {name} FALSE ALARM {results[name, precision].verdict}")
        nearest = max(row.error / row.allowed for name in right for row in results[name, precision].rows if row.allowed)
        seconds = statistics.median(result.seconds for (_, p), result in results.items() if p == precision)
        told[precision] = {**counts, "of": len(MISTAKES), "false_alarms": len(alarms), "right": len(right),
                           "nearest_to_allowed": nearest, "median_seconds": seconds}  # fmt: skip
    for precision, counts in told.items():
        print(f"{precision}: {counts}")
    return told


def start_seconds(rounds: int) -> list[float]:
    """Time whole checks of two ranks under `meshwright parity`: processes, both models, the comparison."""
    check = collect(ROOT / "examples/parity/ddp.py")[0]
    return [run_check(check).seconds for _ in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=PRECISIONS)
    parser.add_argument("--rounds", type=int, default=3, help="whole checks whose seconds are printed")
    parser.add_argument("--json", type=Path, help="keep the counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        told = report(results_of(arguments.precisions, Path(folder)), arguments.precisions)
    told["whole_check_seconds"] = start_seconds(arguments.rounds)
    print(
        "seconds of a whole check of 2 ranks, one after the other:", [round(x, 1) for x in told["whole_check_seconds"]]
    )
    if arguments.json:
        arguments.json.write_text(json.dumps(told, indent=1))


if __name__ == "__main__":
    main()
