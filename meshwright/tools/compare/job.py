"""`meshwright compare`: every layout is checked, then predicted, then run, in turns; what is left is written down.

In OUT: comparison.html, .png and .json; and for each run a folder LAYOUT/round-R with its config, metrics and ranks.
A round runs each layout once, from its first weights on; every second round goes backwards, so that a machine that
grows warm or busy is no layout's disadvantage.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from meshwright.config import Config
from meshwright.data.progress import ShowProgress as Report
from meshwright.data.progress import silent
from meshwright.errors import ConfigError, LaunchError, Problem
from meshwright.launch import Interrupted, joined
from meshwright.machine import usable_cores
from meshwright.resolve import resolve_process, this_machine
from meshwright.tools.compare.ask import Foresight
from meshwright.tools.compare.layouts import Entry
from meshwright.tools.compare.page import draw, write_page
from meshwright.tools.compare.result import WARMUP_STEPS, Comparison, Row
from meshwright.tools.compare.run import here, run
from meshwright.tools.compare.table import as_dict

PAGE, PICTURE, NUMBERS = FILES = ("comparison.html", "comparison.png", "comparison.json")


@dataclass(frozen=True)
class Order:
    """What is to be done. `title`: the run's name. `steps`: of each run; a round runs every layout once."""

    title: str
    out: Path
    steps: int
    rounds: int


def compare(entries: Sequence[Entry], order: Order, foresight: Foresight, report: Report = silent) -> Comparison:
    """Run the layouts and write what comes of it. A layout that dies is left out of later rounds, and says why.

    Raises ConfigError before any process starts; Interrupted, after what has ended was written.
    """
    if joined():
        raise LaunchError("compare starts its own workers: run it outside of torchrun, srun and mpirun")
    processes = _checked(entries, order)
    _make_folder(order.out)
    data = entries[0].config.data.prepare(entries[0].config, report)
    rows = []
    for entry, own in zip(entries, processes, strict=True):
        report(f"predicting {entry.name}", None)
        predicted, why = foresight.of(entry.config)
        threads = own.threads if own.device == "cpu" and own.threads != "auto" else 1
        rows.append(Row(entry, predicted=predicted, unpredicted=why, threads=threads))
    bench = _Bench(order, data, rows, report)
    stopped = bench.measure()
    made = Comparison(
        order.title, tuple(bench.rows), order.steps, order.rounds, _device(processes[0]), foresight.name,
        foresight.silence, f"{stopped}, after {bench.num_done} of {bench.num_runs} runs" if stopped else "",
    )  # fmt: skip
    if made.measured:
        write(made, order.out)
    if stopped is not None:
        raise Interrupted(_kept(made, order.out), stopped.signal)
    return made


def check(made: Comparison, out: Path) -> None:
    """Raises LaunchError where a layout did not come to its end."""
    failed = [row for row in made.rows if row.failure]
    if failed:
        causes = "\n".join(f"{row.name}: {row.failure}" for row in failed)
        raise LaunchError(f"{len(failed)} of {len(made.rows)} layouts failed; {out} has the others\n{causes}")


def write(made: Comparison, out: Path) -> None:
    """The picture, the page with it, the numbers."""
    draw(made, out / PICTURE)
    write_page(made, out / PICTURE, out / PAGE)
    (out / NUMBERS).write_text(json.dumps(as_dict(made), indent=1) + "\n", encoding="utf-8")


class _Bench:
    """The runs, one after another. `rows` gain one with each that ends."""

    def __init__(self, order: Order, data: Path, rows: Sequence[Row], report: Report) -> None:
        self.order, self.data, self.report = order, data, report
        self.rows = list(rows)
        self.num_runs = order.rounds * len(rows)
        self.num_done = 0

    def measure(self) -> Interrupted | None:
        """All rounds; what stopped them, if something did."""
        places = range(len(self.rows))
        try:
            for turn in range(self.order.rounds):
                for place in places if turn % 2 == 0 else reversed(places):
                    if not self.rows[place].failure:
                        self.rows[place] = self._once(place, turn + 1)
        except Interrupted as error:
            return error
        except KeyboardInterrupt:  # between two jobs
            return Interrupted("stopped by SIGINT", signal.SIGINT)
        return None

    def _once(self, place: int, turn: int) -> Row:
        """The row with another run, or with the reason why there is none."""
        row, order = self.rows[place], self.order
        folder = order.out / _folder_name(place, row.name) / f"round-{turn}"
        self.report(f"round {turn} of {order.rounds}: {row.name}", self.num_done / self.num_runs)
        try:
            made = run(here(row.entry.config), self.data, folder, order.steps)
        except Interrupted:
            raise
        except LaunchError as error:
            return replace(row, failure=str(error))
        self.num_done += 1
        return replace(row, runs=(*row.runs, made))


def _folder_name(place: int, name: str) -> str:
    """A layout's folder, whatever its name is made of."""
    return f"{place + 1}-" + re.sub(r"[^\w.-]+", "_", name)


def _checked(entries: Sequence[Entry], order: Order) -> list[Config]:
    """Each layout with its device, threads and transport here.

    Raises ConfigError, under the layout's name, where this machine cannot run it.
    """
    names = [entry.name for entry in entries]
    assert names, "nothing to compare"
    assert len(set(names)) == len(names), f"two layouts of one name: {names}"
    if not WARMUP_STEPS < order.steps <= entries[0].config.steps:
        rule = f"is no number of steps: the first {WARMUP_STEPS} are not timed"
        raise ConfigError.of("--steps", order.steps, rule, f"{WARMUP_STEPS + 1} to the run's {entries[0].config.steps}")
    machine = this_machine()
    processes, problems = [], []
    for entry in entries:
        try:
            processes.append(resolve_process(here(entry.config), machine).config)
        except ConfigError as error:
            problems += [Problem(f"{entry.origin}: {p.field}", p.value, p.rule, p.valid) for p in error.problems]
    if problems:
        raise ConfigError(problems)
    return processes


def _make_folder(out: Path) -> None:
    """Raises ConfigError where it holds something, or cannot be made."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError.of("--out", out, "is not empty", "a new folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = f"cannot be written to ({error.strerror})"
        raise ConfigError.of("--out", out, rule, "a folder that you may write to") from error


def _device(config: Config) -> str:
    return f"a CPU of {usable_cores()} cores" if config.device == "cpu" else "GPUs"


def _kept(made: Comparison, out: Path) -> str:
    """What an interrupted comparison leaves."""
    if not made.measured:
        return f"{made.interrupted}; kept: what was begun, in {out}"
    ended = ", ".join(f"{row.name} ({len(row.runs)} of {made.rounds} rounds)" for row in made.measured)
    return f"{made.interrupted}; kept: {ended}, in {out / PAGE} and beside it"
