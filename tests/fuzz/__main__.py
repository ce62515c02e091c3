"""`python -m tests.fuzz --minutes 30`: draw runs until the time is up, and compare each with one device.

`--seed`: another sequence; `--ranks`: the most ranks of a run; `--jobs`: runs at a time, each of a separate sequence. A
run that fails is written to tests/fuzz/found/, which test_fuzz.py reads. `python -m tests.fuzz RUN.yaml ...` checks
these runs instead; `--cover` writes the fixed set anew, and with `--keep` adds the missing cases.
`--bits`: layouts under `bits: layout-free` (bits.py), each against one device, to the bit; `--cover` writes their set.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import time
from collections import Counter
from multiprocessing.queues import Queue
from pathlib import Path
from random import Random
from typing import Any

import torch
import yaml

from meshwright.config import Config, load_config
from tests.fuzz.axes import AXES, Case, chat_tokenizer, read_cases, tree_of
from tests.fuzz.bits import covering as covering_bits
from tests.fuzz.bits import differing, numbered, words_of
from tests.fuzz.check import mistakes
from tests.fuzz.draw import Drawing, covering

HERE = Path(__file__).resolve().parent
FOUND, COVERING, COVERING_BITS = HERE / "found", HERE / "covering.jsonl", HERE / "bits.jsonl"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--cover", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--bits", action="store_true")
    parser.add_argument("runs", nargs="*", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)  # ranks are forks of this process
    if options.runs:
        return replay(options.runs)
    if options.bits:
        return cover_bits(options.seed) if options.cover else fuzz_bits(options.minutes, options.seed)
    if options.cover:
        kept = read_cases(COVERING) if options.keep else []
        cases = covering(options.seed, kept)
        COVERING.write_text("".join(f"{json.dumps(case)}\n" for case in cases))
        print(f"{len(cases)} cases in {COVERING}")
        return 0
    return fuzz(options.minutes, options.seed, options.jobs, options.ranks)


def checked(config: Config) -> list[str]:
    """Return the complaints about a run; a rank's error and a hang are complaints, too."""
    try:
        return mistakes(config)
    except Exception as error:
        return [f"{type(error).__name__}: {error}".strip()]


def replay(runs: list[Path]) -> int:
    """Check these run files; return 1 if a run fails."""
    failures = 0
    chat_tokenizer()  # named by runs on pairs
    for path in runs:
        wrong = checked(load_config(path))
        failures += bool(wrong)
        print(f"{path}: {'holds' if not wrong else ''}", *wrong, sep="\n  ", flush=True)
    return int(failures > 0)


def fuzz(minutes: float, seed: int, jobs: int, ranks: int) -> int:
    """Draw and run; print a line for each failure, and a summary. Return 1 if a run failed."""
    started = time.monotonic()
    context = multiprocessing.get_context("fork")
    told: Queue[Any] = context.Queue()
    deadline = started + 60 * minutes
    workers = [
        context.Process(target=_draw_and_run, args=(f"{seed}/{job}", ranks, deadline, told)) for job in range(jobs)
    ]
    for worker in workers:
        worker.start()
    values: Counter[str] = Counter()
    num_cases = failures = drawn = 0
    working = jobs
    while working:
        case, failure, count = told.get()
        if case is None:
            working -= 1
            drawn += count
            continue
        num_cases += 1
        values.update(f"{axis}={value}" for axis, value in case.items())
        if failure:
            failures += 1
            print(f"\n{failure}", flush=True)
        elif sys.stdout.isatty() or num_cases % 50 == 0:
            print(f"\r{num_cases} runs, {failures} failed, {time.monotonic() - started:.0f} s", end="", flush=True)
    for worker in workers:
        worker.join()
    _summarise(values)
    share = 1 - num_cases / max(1, drawn)
    print(
        f"{num_cases} runs of {ranks} ranks at most, {failures} failed, {time.monotonic() - started:.0f} s, "
        f"seed {seed}; {share:.0%} of {drawn} draws were refused by the config"
    )
    return int(failures > 0)


def cover_bits(seed: int) -> int:
    """Write the layouts that have every value of every axis of bits."""
    lines = [
        json.dumps({"run": run, "precision": precision, "words": words_of(layout)})
        for (run, precision), layout in covering_bits(seed)
    ]
    COVERING_BITS.write_text("".join(f"{line}\n" for line in lines))
    print(f"{len(lines)} layouts in {COVERING_BITS}")
    return 0


def fuzz_bits(minutes: float, seed: int) -> int:
    """Draw layouts under equal bits and run each; return 1 if a run does not end with the bits of one device."""
    deadline, failures, count = time.monotonic() + 60 * minutes, 0, 0
    while time.monotonic() < deadline:
        kind, config = numbered(1000 * seed + count)
        try:
            wrong = differing(kind, config)
        except Exception as error:
            wrong = [f"{type(error).__name__}: {error}".strip()]
        count += 1
        if wrong:
            failures += 1
            print(f"FAILED {kind}: {config.layout.summary}: {wrong[0].splitlines()[-1]} ({len(wrong)})", flush=True)
    print(f"{count} layouts under equal bits, {failures} failed, seed {seed}")
    return int(failures > 0)


def _draw_and_run(seed: str, ranks: int, deadline: float, told: Queue[Any]) -> None:
    drawing = Drawing(Random(seed), ranks)
    for case, config in drawing.cases():
        if time.monotonic() > deadline:
            break
        wrong = checked(config)
        failure = _keep(case, wrong) if wrong else ""
        told.put((case, failure, 0))
    told.put((None, "", drawing.drawn))


def _keep(case: Case, wrong: list[str]) -> str:
    """Write the run to a file; return a line with the file's name."""
    text = yaml.safe_dump(tree_of(case), sort_keys=False)
    path = FOUND / f"{case['model']}-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
    noted = "".join(f"# {line}\n" for mistake in wrong[:8] for line in mistake.splitlines()[-12:])
    path.write_text(noted + text)
    last = wrong[0].splitlines()[-1]
    short = " ".join(f"{axis}={value}" for axis, value in case.items() if value is not None)
    return f"FAILED {path.name}: {last} ({len(wrong)} mistakes) [{short}]"


def _summarise(values: Counter[str]) -> None:
    print()
    for axis, choices in AXES.items():
        counts = ", ".join(f"{value} {values[f'{axis}={value}']}" for value in dict.fromkeys(choices))
        print(f"  {axis}: {counts}")


if __name__ == "__main__":
    sys.exit(main())
