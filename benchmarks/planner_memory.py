"""The planner's memory against processes' memory: every kit, synchroniser and schedule, at 1, 2 and 4 ranks.

    python -m benchmarks.planner_memory [--cluster FILE] [--ranks 1,2,4] [--transports mpi,torch]
        [--shapes reference,wide] [--only TEXT]

Each layout runs three steps as in `meshwright compare`, in new processes. Prints a row a layout: the most resident
memory of the first rank of any stage, the predicted memory of the fullest, the error; then the mean error. Load does
not matter to memory.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.table import Table

from benchmarks.planner_cases import SHAPES, Case, cases
from meshwright.data.files import silent
from meshwright.planner.plan.cluster import load_cluster
from meshwright.planner.plan.predict import Planner, Prediction
from meshwright.ranks.machine import Machine
from meshwright.training.measured_run import RankFacts, measure_run

STEPS = 3


@dataclass(frozen=True)
class Outcome:
    """A layout's peak in bytes, and the prediction."""

    case: Case
    measured: int
    predicted: Prediction

    @property
    def error(self) -> float:
        return self.predicted.measured_memory / self.measured - 1


def measure(wanted: Sequence[Case], planner: Planner, folder: Path) -> list[Outcome]:
    """Run and predict each case."""
    text = folder / "text.txt"
    words = random.Random(0)
    text.write_text("\n".join(str(words.randrange(8192)) for _ in range(50_000)))
    outcomes = []
    for index, case in enumerate(wanted):
        config = case.config
        data = config.data.model_copy(update={"source": str(text)})
        config = config.model_copy(update={"data": data})
        prepared = data.prepare(config, silent)
        run = measure_run(config, prepared, folder / str(index), STEPS)
        first: dict[int, RankFacts] = {}
        for facts in run.ranks:
            first.setdefault(facts.stage, facts)
        measured = max(facts.peak_bytes for facts in first.values())
        outcomes.append(Outcome(case, measured, planner.predict(case.config)))
        print(f"{case.name}, {case.transport}: {outcomes[-1].error:+.1%}", file=sys.stderr)
    return outcomes


def show(outcomes: Sequence[Outcome]) -> None:
    """Print a row a case, then the mean."""
    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    table = Table("shape", "layout", "transport", title="Memory of the fullest rank, measured and predicted")
    for head in ("measured MB", "predicted MB", "error", "its parts"):
        table.add_column(head, justify="right")
    for outcome in outcomes:
        case, sizes = outcome.case, (f"{outcome.measured / 1e6:.0f}", f"{outcome.predicted.measured_memory / 1e6:.0f}")
        table.add_row(
            case.shape, case.name, case.transport, *sizes, f"{outcome.error:+.1%}", outcome.predicted.fullest.text
        )
    console.print(table)
    errors = [abs(outcome.error) for outcome in outcomes]
    console.print(f"{len(errors)} layouts: mean error {statistics.fmean(errors):.1%}, largest {max(errors):.1%}")


def _words(text: str) -> list[str]:
    return text.split(",")


def main() -> None:
    parser = argparse.ArgumentParser(description="Predicted memory against resident memory.")
    parser.add_argument("--cluster", default="two-cores", help="a name, or a file that `meshwright calibrate` wrote")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in _words(text)], default=[1, 2, 4])
    transports = ["mpi", "torch"] if Machine.here().has_mpi else ["torch"]
    parser.add_argument("--transports", type=_words, default=transports)
    parser.add_argument("--shapes", type=_words, default=list(SHAPES))
    parser.add_argument("--only", default="", help="layouts whose names have this in them")
    arguments = parser.parse_args()
    wanted = [
        case
        for shape in arguments.shapes
        for transport in arguments.transports
        for case in cases(shape, transport, arguments.ranks)
        if arguments.only in case.name
    ]
    with TemporaryDirectory(prefix="planner-memory-") as folder:
        show(measure(wanted, Planner(load_cluster(arguments.cluster)), Path(folder)))


if __name__ == "__main__":
    main()
