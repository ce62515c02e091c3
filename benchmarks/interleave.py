"""Run contenders in turns on one machine, A B C, B C A, ..., so that a disturbance is equal for all contenders.

All workers start at once, live through the whole run, and sleep between turns. After an untimed step of each,
contenders alternate step by step. Ratios are taken within a round; a table has the median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.contender import Allocator, Contender
from benchmarks.team import Team
from meshwright.ranks.machine import processor_name, usable_cores

PRODUCT = 1024
"""Rows and columns of the product; the product's rate is printed under each table."""

ALLOCATORS: dict[Allocator, str] = {
    "told": "all told to keep what a step frees",
    "glibc": "glibc's allocator as it comes, for all",
}


@dataclass(frozen=True)
class Plan:
    """The length of a measurement: `rounds` turns of `steps` steps each, after `warmup` untimed steps of everyone."""

    rounds: int = 12
    steps: int = 1
    warmup: int = 1
    busy: int = 0
    """Processes that compute without end during the measurement, like other users' on a shared machine."""


@dataclass(frozen=True)
class Spread:
    """The median of some numbers, and the two quartiles."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0])
        return cls(*statistics.quantiles(numbers, n=4, method="inclusive"))


@dataclass(frozen=True)
class Result:
    """A contender's figures."""

    contender: Contender
    rounds: list[float]
    """The median step of each round, in milliseconds."""
    loss: float
    """Of the last step."""
    busy: int = 0
    """Of the plan."""
    held_bytes: int = 0
    """The most resident memory of a rank, without the imports."""
    processor: Sequence[float] = ()
    """Milliseconds of all ranks' threads on a core, by round: other processes disturb these less."""

    @property
    def milliseconds(self) -> Spread:
        return Spread.of(self.rounds)

    def ratio(self, baseline: Result) -> Spread:
        """Return this step divided by the baseline's, round by round: below 1 is faster."""
        return _ratio(self.rounds, baseline.rounds)

    def work(self, baseline: Result) -> Spread:
        """Return the ratio of processor time: waiting costs nothing."""
        return _ratio(self.processor, baseline.processor)


def _ratio(times: Sequence[float], baseline: Sequence[float]) -> Spread:
    return Spread.of([step / base for step, base in zip(times, baseline, strict=True)])


def interleave(contenders: Sequence[Contender], plan: Plan) -> list[Result]:
    """Measure all contenders, in turns. Raises LaunchError if a contender fails."""
    rounds: list[list[float]] = [[] for _ in contenders]
    processor: list[list[float]] = [[] for _ in contenders]
    losses = [0.0] * len(contenders)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="benchmark-")))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        starting = progress.add_task("starting", total=len(contenders))
        teams = []
        for contender in contenders:
            teams.append(Team(contender, folder))
            stack.callback(teams[-1].close)
        for team in teams:
            team.begin(plan.warmup)
        for team in teams:
            team.end()
            progress.advance(starting)
        for _ in range(plan.busy):
            stack.callback(stack.enter_context(Popen([sys.executable, "-c", "while True: pass"])).kill)
        measuring = progress.add_task("measuring", total=plan.rounds * len(teams))
        for turn in range(plan.rounds):
            for offset in range(len(teams)):
                index = (turn + offset) % len(teams)
                times, losses[index] = teams[index].run(plan.steps)
                rounds[index].append(statistics.median(times))
                processor[index].append(statistics.median(teams[index].processor))
                progress.advance(measuring)
        return [
            Result(contender, times, loss, plan.busy, team.held_bytes, spent)
            for contender, times, loss, team, spent in zip(contenders, rounds, losses, teams, processor, strict=True)
        ]


def find(results: Sequence[Result], name: str) -> Result:
    """Return the result of the contender `name`."""
    return next(result for result in results if result.contender.name == name)


Rows = list[dict[str, object]]


def measure(title: str, contenders: Sequence[Contender], plan: Plan, baselines: Sequence[str]) -> Rows:
    """Measure all contenders under each contender's allocator, print a table, and return the table as plain data."""
    began = time.monotonic()
    results = interleave(contenders, plan)
    show(f"{title}; {time.monotonic() - began:.0f} s with the start", results, baselines)
    return as_json(results, baselines)


def measure_both(
    title: str, contenders: Sequence[Contender], plan: Plan, baselines: Sequence[str], allocators: Sequence[Allocator]
) -> dict[str, Rows]:
    """Measure all contenders under one allocator after another: a table each, with the allocator in title and key."""
    return {
        f"{title}, {allocator}": measure(
            f"{title}; {ALLOCATORS[allocator]}",
            [replace(contender, allocator=allocator) for contender in contenders], plan, baselines,
        )
        for allocator in allocators
    }  # fmt: skip


def show(title: str, results: Sequence[Result], baselines: Sequence[str]) -> None:
    """Print a table of memory, times and ratios to each baseline; below: the machine, on which ratios depend."""
    busy = results[0].busy
    beside = f", beside {busy} busy process{'es' * (busy > 1)}" if busy else ""
    said = f"medians (quartiles) of {len(results[0].rounds)} rounds, behind a stroke of processor time; {machine()}"
    table = Table(title=title + beside, caption=said)
    table.add_column("contender")
    for head in ("ranks", "MB a rank", "ms a step", *(f"/ {name}" for name in baselines)):
        table.add_column(head, justify="right")
    for result in results:
        memory = f"{result.held_bytes / 1e6:.0f}"
        times = f"{_cell(result.milliseconds, 0)} | {Spread.of(result.processor).median:.0f}"
        others = [find(results, name) for name in baselines]
        ratios = [f"{_cell(result.ratio(baseline), 2)} | {_cell(result.work(baseline), 2)}" for baseline in others]
        table.add_row(result.contender.name, str(result.contender.ranks), memory, times, *ratios)
    Console(width=None if sys.stdout.isatty() else 190).print(table)


def _cell(spread: Spread, digits: int) -> str:
    return f"{spread.median:.{digits}f} ({spread.low:.{digits}f} {spread.high:.{digits}f})"


@cache
def machine() -> str:
    """Return the processor, the count of cores, and the rate of one thread's float32 product of 1024 x 1024 x 1024: the
    fastest of nine, since other processes may be at work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    a, b = torch.randn(2, PRODUCT, PRODUCT).unbind()
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        a @ b
        seconds.append(time.perf_counter() - start)
    torch.set_num_threads(before)
    rate = 2 * PRODUCT**3 / min(seconds) / 1e9
    return f"{processor_name()}, {usable_cores()} cores; a float32 product of {PRODUCT}: {rate:.0f} Gflop/s a thread"


def as_json(results: Sequence[Result], baselines: Sequence[str]) -> Rows:
    """Return the results as plain data."""
    return [
        {
            "name": result.contender.name,
            "ranks": result.contender.ranks,
            "allocator": result.contender.allocator,
            "median_ms": result.milliseconds.median,
            "rounds_ms": result.rounds,
            "processor_ms": list(result.processor),
            "held_bytes": result.held_bytes,
            "loss": result.loss,
            "ratios": {name: result.ratio(find(results, name)).median for name in baselines},
            "work": {name: result.work(find(results, name)).median for name in baselines},
        }
        for result in results
    ]


def plan_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="steps in a turn, of which the median counts")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="measure beside N processes that only compute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    return parser


def peer_arguments(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options of benchmarks that compare with other programs."""
    parser = plan_arguments(description)
    known = list(ALLOCATORS)
    parser.add_argument("--allocators", nargs="+", choices=known, default=known, help="of all contenders; a table each")
    return parser


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan of a command's options."""
    return Plan(arguments.rounds, arguments.steps, busy=arguments.busy)


def write_json(path: Path | None, tables: dict[str, Rows]) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **tables}, indent=1) + "\n")
