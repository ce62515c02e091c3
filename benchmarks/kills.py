"""`kill -9` of a random process of a run, at a random moment: does the restarted run end with the same bits?

python -m benchmarks.kills [--kills 100] [--only WORD ...] [--seed N] [--json FILE]
python -m benchmarks.kills --elastic [--kills 100] [--seed N] [--json LINES]    (elastic_kills.py)

Layouts (kill_cases.py) take turns. Each is first trained undisturbed. Then a run loses a rank, the launcher or mpiexec:
the launcher restarts a lost rank or mpiexec (`restarts: 1`), and `--resume` replaces a lost launcher. The run is
identical if all losses, gradient norms and the SHA-256 of all final shards are equal to the undisturbed run's.

    down   seconds from the kill until no process of the run is left
    back   seconds from the kill (of a launcher: from --resume) to the end of the first step after the restart
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import count
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.kill_cases import CASES, STEPS, Case
from meshwright.config import Config
from meshwright.data.packing import prepare
from meshwright.ranks.errors import MeshwrightError
from meshwright.training.job import train

_PATIENCE_SECONDS = 240.0
_POLL_SECONDS = 0.002
_STARTERS = {"mpi": ("mpiexec",), "torch": ()}
"""Processes other than ranks and launcher that may be killed; torch's fork server belongs to the launcher."""
_WORDS = (
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "and",
    "sleeps",
    "well",
    "under",
    "trees",
)


@dataclass(frozen=True)
class Kill:
    """One kill and the outcome."""

    case: str
    transport: str
    victim: str
    step: int
    """Steps made before."""
    down_seconds: float
    back_seconds: float | None
    wrong: str
    """The first difference from the undisturbed run; empty if identical."""


def start(config: Config, out: Path, *, resume: bool) -> BaseProcess:
    """Start the launcher of a run in a new session, with a file for the printed text.

    Spawned: the fork of a process with a fork server could not start another server.
    """
    launcher = multiprocessing.get_context("spawn").Process(target=_train, args=(config, out, resume))
    launcher.start()
    return launcher


def _train(config: Config, out: Path, resume: bool) -> None:
    os.setsid()
    output = os.open(out.with_suffix(".txt"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    try:
        train(config, out, resume=resume)
    except MeshwrightError as error:
        print(error, flush=True)
        os._exit(1)


def outcome(out: Path, steps: int) -> dict[str, str]:
    """Return each step's loss and gradient norm, with all digits, and each final shard's SHA-256."""
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    facts = {f"step {line['step']}": f"{line['loss']!r} {line['grad_norm']!r}" for line in lines}
    shards = (out / "checkpoints" / f"step-{steps}").glob("*.safetensors")
    return facts | {shard.name: hashlib.sha256(shard.read_bytes()).hexdigest() for shard in shards}


def difference(expected: dict[str, str], found: dict[str, str]) -> str:
    """Return the first difference; empty if all are equal."""
    keys = [key for key in {**expected, **found} if expected.get(key) != found.get(key)]
    return f"{keys[0]}: {found.get(keys[0])}, not {expected.get(keys[0])}" if keys else ""


def wait_for(condition: Callable[[], bool], launcher: BaseProcess | None = None) -> bool:
    """Return whether the condition became true before the launcher's end. Raises TimeoutError if neither happens."""
    end = time.monotonic() + _PATIENCE_SECONDS
    while not condition():
        if launcher is not None and not launcher.is_alive():
            return condition()
        if time.monotonic() > end:
            raise TimeoutError("a run hangs")
        time.sleep(_POLL_SECONDS)
    return True


def steps_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def lives(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ranks_below(launcher: BaseProcess, num_ranks: int, transport: str) -> list[psutil.Process]:
    """Return the ranks in the order of start: the children of mpiexec, or of the fork server after the first child, the
    store's process. Empty until all ranks run."""
    others = 1 if transport == "torch" else 0
    try:
        for process in psutil.Process(launcher.pid).children(recursive=True):
            children = process.children()
            if len(children) == num_ranks + others:
                return sorted(children, key=lambda process: process.pid)[others:]
    except psutil.NoSuchProcess:
        pass
    return []


@dataclass
class _Shot:
    """The victim, the processes that must end too, and the count of steps made."""

    name: str
    victim: psutil.Process
    doomed: list[psutil.Process]
    step: int


def _aim(case: Case, launcher: BaseProcess, out: Path, num_ranks: int, choose: random.Random) -> _Shot | None:
    """Wait for a random moment, and choose a victim; None if the run ended before."""
    step = choose.randrange(STEPS)
    delay = choose.uniform(0, 1.0 if step == 0 else 0.1)
    name = choose.choice([*(f"rank {rank}" for rank in range(num_ranks)), "launcher", *_STARTERS[case.transport]])
    if not wait_for(lambda: bool(ranks_below(launcher, num_ranks, case.transport)), launcher):
        return None
    if not wait_for(lambda: steps_in(out / "metrics.jsonl") >= step, launcher):
        return None
    time.sleep(delay)
    ranks = ranks_below(launcher, num_ranks, case.transport)
    starter = ranks[0].parent() if ranks else None
    if starter is None or not launcher.is_alive():
        return None
    victims = {f"rank {rank}": process for rank, process in enumerate(ranks)}
    victims |= {"launcher": psutil.Process(launcher.pid), "mpiexec": starter}
    doomed = ranks if name.startswith("rank") else [*ranks, starter]
    return _Shot(name, victims[name], doomed, steps_in(out / "metrics.jsonl"))


def shoot(case: Case, config: Config, out: Path, expected: dict[str, str], choose: random.Random) -> Kill | None:
    """Kill a run and wait for the restarted run's end. None if the run ended before the kill."""
    launcher = start(config, out, resume=False)
    try:
        shot = _aim(case, launcher, out, config.layout.world_size, choose)
        if shot is None:
            return None
        metrics = out / "metrics.jsonl"
        inode = metrics.stat().st_ino if metrics.exists() else 0
        killed = time.monotonic()
        shot.victim.kill()
        wait_for(lambda: not any(map(lives, shot.doomed)))
        down, back = time.monotonic() - killed, None
        if shot.name == "launcher":
            launcher.join()
            killed = time.monotonic()
            launcher = start(config, out, resume=True)
        if wait_for(lambda: metrics.exists() and metrics.stat().st_ino != inode, launcher):  # rewritten at a restart
            before = steps_in(metrics)
            if wait_for(lambda: steps_in(metrics) > before, launcher):
                back = time.monotonic() - killed
        launcher.join(_PATIENCE_SECONDS)
        wrong = _wrong(launcher, out, config.steps, expected)
        return Kill(case.name, case.transport, shot.name, shot.step, down, back, wrong)
    finally:
        launcher.kill()
        launcher.join()


def _wrong(launcher: BaseProcess, out: Path, steps: int, expected: dict[str, str]) -> str:
    """Return the first difference of a restarted run from the undisturbed run; empty if there is none."""
    if launcher.exitcode == 0:
        return difference(expected, outcome(out, steps))
    said = out.with_suffix(".txt").read_text().strip().splitlines() or ["it said nothing"]
    return f"exit code {launcher.exitcode}: {said[-1]}"


def make_corpus(folder: Path) -> Path:
    """Prepare a folder of bytes."""
    choose = random.Random(1)
    text = folder / "text.txt"
    text.write_text("\n".join(" ".join(choose.choice(_WORDS) for _ in range(12)) for _ in range(600)))
    prepare(str(text), "bytes", folder / "corpus")
    return folder / "corpus"


def undisturbed(case: Case, corpus: Path, folder: Path) -> dict[str, str]:
    """Train a case without a kill; return losses, norms and shards' hashes."""
    out = folder / "undisturbed" / case.name
    out.parent.mkdir(parents=True, exist_ok=True)
    launcher = start(case.config(corpus), out, resume=False)
    launcher.join(_PATIENCE_SECONDS)
    if launcher.exitcode != 0:
        raise RuntimeError(f"{case.name}: {out.with_suffix('.txt').read_text()}")
    return outcome(out, STEPS)


def kill_in_turns(cases: Sequence[Case], num_kills: int, seed: int, folder: Path, console: Console) -> list[Kill]:
    """Make `num_kills` kills, of the cases in turns; fewer after a Ctrl-C."""
    corpus, choose = make_corpus(folder), random.Random(seed)
    expected: dict[str, dict[str, str]] = {}
    kills: list[Kill] = []
    with suppress(KeyboardInterrupt):
        for turn in count():
            if len(kills) == num_kills:
                break
            case = cases[turn % len(cases)]
            if case.name not in expected:
                expected[case.name] = undisturbed(case, corpus, folder)
            kill = shoot(case, case.config(corpus), folder / f"{turn} {case.name}", expected[case.name], choose)
            if kill is None:
                console.print(f"{case.name}: the run was over before the kill; another one")
                continue
            kills.append(kill)
            said = "identical" if not kill.wrong else kill.wrong
            shot = f"{kill.victim} killed at step {kill.step}"
            console.print(f"{len(kills)}/{num_kills} {kill.case} ({kill.transport}): {shot}: {said}")
    return kills


def table_of(kills: Sequence[Kill]) -> Table:
    """Return a table with a row per layout and a row for all."""
    table = Table("layout", "transport", "identical", "down, median", "max", "back, median", "max", title="kill -9")
    for name in dict.fromkeys(kill.case for kill in kills):
        mine = [kill for kill in kills if kill.case == name]
        table.add_row(name, mine[0].transport, *_cells(mine))
    table.add_section()
    table.add_row("all", "", *_cells(kills))
    return table


def _cells(kills: Sequence[Kill]) -> list[str]:
    cells = [f"{sum(not kill.wrong for kill in kills)} of {len(kills)}"]
    down = [kill.down_seconds for kill in kills]
    back = [kill.back_seconds for kill in kills if kill.back_seconds is not None]
    for known in (down, back):
        cells += [f"{statistics.median(known):.2f} s", f"{max(known):.2f} s"] if known else ["-", "-"]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description="kill -9 of runs at random moments: the same bits?")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--only", nargs="+", default=[""], help="layouts whose name or transport holds one of these")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--elastic", action="store_true", help="runs of 8, 5, 3 and 8 ranks under drawn layouts")
    arguments = parser.parse_args()
    os.nice(10)
    console = Console(soft_wrap=True)
    if arguments.elastic:
        from benchmarks.elastic_kills import elastic, summary  # it is made of this module

        with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
            found = elastic(arguments.kills, arguments.seed, arguments.json, Path(folder), console)
        console.print(summary(found))
        raise SystemExit(any(line["hash"] != line["expected"] for line in found))
    cases = [case for case in CASES if any(word in f"{case.name} {case.transport}" for word in arguments.only)]
    with tempfile.TemporaryDirectory(prefix="kills-", ignore_cleanup_errors=True) as folder:
        kills = kill_in_turns(cases, arguments.kills, arguments.seed, Path(folder), console)
    console.print(table_of(kills))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(kill) for kill in kills], indent=1) + "\n")
    if any(kill.wrong for kill in kills):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
