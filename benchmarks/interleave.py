"""Run contenders in turns on one machine, A B C, B C A, ..., so that whatever disturbs one disturbs all alike.

All workers live through the whole run; those that are not at turn sleep. A turn is one untimed step (caches, waking)
and some timed ones, of which the median counts. Ratios are medians over the rounds of ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.contender import Contender
from benchmarks.team import Team
from meshwright.ranks.machine import processor_name, usable_cores

PRODUCT = 1024
"""Rows and columns of the product whose rate stands under each table."""


@dataclass(frozen=True)
class Plan:
    """How long to measure: `rounds` turns of `steps` timed steps each, after `warmup` steps of everyone."""

    rounds: int = 10
    steps: int = 3
    warmup: int = 3
    busy: int = 0
    """Processes that compute without end beside the contenders, as somebody else's would on a shared machine."""


@dataclass(frozen=True)
class Result:
    """A contender's median step of each round, in milliseconds, and its last loss; `busy`: the plan's."""

    contender: Contender
    rounds: list[float]
    loss: float
    busy: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.rounds)

    def ratio(self, baseline: Result) -> float:
        """How this one's step compares with the baseline's: below 1 is faster."""
        return statistics.median(own / other for own, other in zip(self.rounds, baseline.rounds, strict=True))


def interleave(contenders: Sequence[Contender], plan: Plan) -> list[Result]:
    """Measure all contenders, in turns. Raises LaunchError where one of them fails."""
    rounds: list[list[float]] = [[] for _ in contenders]
    losses = [0.0] * len(contenders)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="benchmark-")))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        starting = progress.add_task("starting", total=len(contenders))
        teams = []
        for contender in contenders:
            team = Team(contender, folder)
            stack.callback(team.close)
            team.run(plan.warmup)
            teams.append(team)
            progress.advance(starting)
        for _ in range(plan.busy):
            stack.callback(stack.enter_context(Popen([sys.executable, "-c", "while True: pass"])).kill)
        measuring = progress.add_task("measuring", total=plan.rounds * len(teams))
        for number in range(plan.rounds):
            for offset in range(len(teams)):
                index = (number + offset) % len(teams)
                times, losses[index] = teams[index].run(plan.steps + 1)
                rounds[index].append(statistics.median(times[1:]))
                progress.advance(measuring)
    return [Result(*parts, plan.busy) for parts in zip(contenders, rounds, losses, strict=True)]


def find(results: Sequence[Result], name: str) -> Result:
    """The result of the contender `name`."""
    return next(result for result in results if result.contender.name == name)


def show(title: str, results: Sequence[Result], baselines: Sequence[str]) -> None:
    """A table of the medians, and of the ratios to each baseline; under it the machine, which moves the ratios."""
    busy = results[0].busy
    beside = f", beside {busy} busy process{'es' * (busy > 1)}" if busy else ""
    table = Table(title=title + beside, caption=machine())
    table.add_column("contender")
    for head in ("ranks", "median ms", "min", "max", *(f"/ {name}" for name in baselines)):
        table.add_column(head, justify="right")
    for result in results:
        ratios = [f"{result.ratio(find(results, name)):.3f}" for name in baselines]
        times = [f"{value:.1f}" for value in (result.median, min(result.rounds), max(result.rounds))]
        table.add_row(result.contender.name, str(result.contender.ranks), *times, *ratios)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


@cache
def machine() -> str:
    """The processor, its cores, and the rate of one thread's float32 product of 1024 x 1024 x 1024: the fastest of
    nine, since other processes may be at work."""
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


def as_json(results: Sequence[Result], baselines: Sequence[str]) -> list[dict[str, object]]:
    """The same as plain data."""
    return [
        {
            "name": result.contender.name,
            "ranks": result.contender.ranks,
            "median_ms": result.median,
            "rounds_ms": result.rounds,
            "loss": result.loss,
            "ratios": {name: result.ratio(find(results, name)) for name in baselines},
        }
        for result in results
    ]


def plan_arguments(description: str) -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=Plan.rounds, help="turns of each contender")
    parser.add_argument("--steps", type=int, default=Plan.steps, help="timed steps in a turn")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="measure beside N processes that only compute")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    return parser


def plan_of(arguments: argparse.Namespace, warmup: int = Plan.warmup) -> Plan:
    """The plan that a command's options ask for."""
    return Plan(arguments.rounds, arguments.steps, warmup, arguments.busy)


def write_json(path: Path | None, tables: dict[str, list[dict[str, object]]]) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine(), **tables}, indent=1) + "\n")
