"""The planner's step times against measured ones: every kit, synchroniser and schedule, at 1, 2 and 4 ranks.

    python -m benchmarks.planner [--cluster FILE] [--ranks 1,2,4] [--transports mpi,torch] [--shapes reference,wide]
        [--rounds N] [--steps N] [--json FILE] [--measured FILE]

The cluster file was written by `meshwright calibrate` on this machine. Prints a row a layout: measured (the median over
the rounds), predicted, the error; the mean error of each transport and shape; and the contest: the share of random sets
of five layouts with the right fastest layout, exactly and within 3 % of the step time, the difference of two runs.
--json keeps the measurements; --measured reads this file, and only predicts.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.planner_cases import SHAPES, Case, cases
from benchmarks.visits import Visitor
from meshwright.planner.plan.cluster import Cluster, load_cluster
from meshwright.planner.plan.predict import Planner
from meshwright.ranks.machine import Machine

SET, SETS, SEED = 5, 1000, 1
"""Layouts in a comparison, comparisons, and the seed of the draws."""
ALIKE = 1.03
"""Two layouts are equally fast up to this ratio of times."""


@dataclass(frozen=True)
class Outcome:
    """A case's milliseconds a step."""

    case: Case
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class Contest:
    """The counts of right comparisons, of `sets`."""

    sets: int
    exact: int
    alike: int


def contest(outcomes: Sequence[Outcome]) -> Contest:
    """Draw sets of five outcomes, and count the sets with the right fastest outcome."""
    chance = random.Random(SEED)
    drawn = [chance.sample(outcomes, SET) for _ in range(SETS)]
    picked = [(min(five, key=_predicted), min(five, key=_measured)) for five in drawn]
    exact = sum(choice is best for choice, best in picked)
    alike = sum(choice.measured <= ALIKE * best.measured for choice, best in picked)
    return Contest(len(drawn), exact, alike)


def _predicted(outcome: Outcome) -> float:
    return outcome.predicted


def _measured(outcome: Outcome) -> float:
    return outcome.measured


def measure(wanted: Sequence[Case], rounds: int, steps: int) -> list[float]:
    """Return milliseconds a step of each case: the median over rounds in which every case has a turn."""
    found: list[list[float]] = [[] for _ in wanted]
    groups: dict[tuple[str, int], list[int]] = {}
    for index, case in enumerate(wanted):
        groups.setdefault((case.transport, case.ranks), []).append(index)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="planner-")))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        measuring = progress.add_task(f"measuring {wanted[0].shape}", total=rounds * len(wanted))
        visitors = []
        for (transport, ranks), members in groups.items():
            visitor = Visitor([wanted[index].options for index in members], transport, ranks, steps, folder)
            stack.callback(visitor.close)
            visitors.append((visitor, members))
        for turn in range(rounds):
            for offset in range(len(visitors)):
                visitor, members = visitors[(turn + offset) % len(visitors)]
                for index in members:
                    found[index].append(visitor.run())
                    progress.advance(measuring)
    return [statistics.median(times) for times in found]


def outcomes_of(wanted: Sequence[Case], measured: Sequence[float], cluster: Cluster) -> Iterator[Outcome]:
    """Yield outcomes with the planner's prediction of each case. Recordings are shared, as in a search."""
    planner = Planner(cluster)
    for case, milliseconds in zip(wanted, measured, strict=True):
        yield Outcome(case, milliseconds, 1e3 * planner.predict(case.config).seconds)


def mean_error(outcomes: Iterable[Outcome]) -> float:
    return statistics.fmean(abs(outcome.error) for outcome in outcomes)


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a row a case, a row a transport and shape, and the contest."""
    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table("shape", "layout", "transport", title="A step, measured and predicted")
    for head in ("measured ms", "predicted ms", "error"):
        table.add_column(head, justify="right")
    for outcome in outcomes:
        case, times = outcome.case, (f"{outcome.measured:.0f}", f"{outcome.predicted:.0f}")
        table.add_row(case.shape, case.name, case.transport, *times, f"{outcome.error:+.0%}")
    console.print(table)
    console.print(_summary(outcomes))


def _summary(outcomes: Sequence[Outcome]) -> Table:
    """Return the summary; layouts compete within one shape."""
    table = Table("layouts", "mean error", "fastest of five right", "within 3 %", title="Errors, and the contest")
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        for name in (f"{outcome.case.shape}, {outcome.case.transport}", f"{outcome.case.shape}, all"):
            groups.setdefault(name, []).append(outcome)
    for name, members in groups.items():
        shares = ("-", "-")
        if len(members) >= SET:
            made = contest(members)
            shares = (f"{made.exact / made.sets:.0%}", f"{made.alike / made.sets:.0%}")
        table.add_row(f"{name} ({len(members)})", f"{mean_error(members):.1%}", *shares)
    table.add_row(f"all ({len(outcomes)})", f"{mean_error(outcomes):.1%}", "", "")
    return table


def _words(text: str) -> list[str]:
    return text.split(",")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predicted step times against measured ones.")
    parser.add_argument("--cluster", default="two-cores", help="a name, or a file that `meshwright calibrate` wrote")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in _words(text)], default=[1, 2, 4])
    transports = ["mpi", "torch"] if Machine.here().has_mpi else ["torch"]
    parser.add_argument("--transports", type=_words, default=transports)
    parser.add_argument("--shapes", type=_words, default=list(SHAPES))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each layout")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in a turn")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was measured and predicted to FILE")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="take what was measured from FILE")
    return parser.parse_args()


def main() -> None:
    arguments = _arguments()
    cluster = load_cluster(arguments.cluster)
    outcomes: list[Outcome] = []
    started = time.monotonic()
    known = json.loads(arguments.measured.read_text()) if arguments.measured else {}
    for shape in arguments.shapes:
        for transport in arguments.transports:
            wanted = list(cases(shape, transport, arguments.ranks))
            if known:
                measured = [known[_key(case)]["measured"] for case in wanted]
            else:
                measured = measure(wanted, arguments.rounds, arguments.steps)
            outcomes += outcomes_of(wanted, measured, cluster)
    show(outcomes)
    print(f"{time.monotonic() - started:.0f} seconds")
    if arguments.json:
        rows = {_key(made.case): {"measured": made.measured, "predicted": made.predicted} for made in outcomes}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


def _key(case: Case) -> str:
    return f"{case.shape}, {case.name}, {case.transport}"


if __name__ == "__main__":
    main()
