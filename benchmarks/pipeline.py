"""Schedules over 8 stages: real processes, driver and mailbox with paced tasks, and the computing clock.

    python -m benchmarks.pipeline [--microbatches 16 64] [--conditions "no jitter" ...] [--schedules 1f1b ...]
                                  [--transport mpi|torch] [--rounds N] [--repeats N] [--forward-ms T]
                                  [--message-kib N] [--picture FILE] [--json FILE]

Backward passes take twice the time of forward passes (B = W = forward if split), links a tenth. Each round draws other
jitter and late messages, equal for every schedule and for the clock. In a round the schedules take turns, `--repeats`
times, and the fastest of the repeats counts: sleepers that wake late on a busy machine are no fault of a schedule.
Ratios are medians over the rounds of the two schedules' ratio within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.contender import Contender
from benchmarks.interleave import write_json
from benchmarks.paced import CHUNKED, CONDITIONS, RULES, RUNS, Run
from benchmarks.team import Team
from meshwright.strategies.pipeline.span import Timeline
from meshwright.strategies.pipeline.trace import read_trace
from meshwright.training.pictures import draw_timelines

NUM_STAGES = 8
ONE_CHUNK = [name for name in RULES if name not in CHUNKED]
BASELINE = "1f1b"
TARGETS = {16: (0.92, 0.90, 0.95, 0.85), 64: (0.97, 0.94, 0.97, 0.82)}
"""By microbatches: message-driven's most time as a share of 1F1B's, in the order of CONDITIONS."""
WARM_UP = Run(BASELINE, CONDITIONS[0], NUM_STAGES, 2)
PICTURED = ("gpipe", BASELINE, "axonn", "message-driven, limit 8")
"""With 1F1B's memory, 8 microbatches on the first stage; gpipe alone has no limit."""


@dataclass(frozen=True)
class Measured:
    """A run in the processes and by the clock, both in forward passes."""

    run: Run
    real: Timeline
    clock: Timeline

    @property
    def overrun(self) -> float:
        """Return a real task's mean time above the model: the send, and a sleeper's late wake-up."""
        return (_busy(self.real) - _busy(self.clock)) / len(self.real.spans)


def _busy(timeline: Timeline) -> float:
    return sum(span.seconds for span in timeline.spans)


def planned(
    microbatches: Sequence[int], conditions: Sequence[str], schedules: Sequence[str], rounds: int, repeats: int
) -> list[Run]:
    """Return all runs in order. A limit above the microbatches is no limit: of equal schedules the first runs."""
    runs = []
    for turn, size, condition in product(range(rounds * repeats), microbatches, conditions):
        first = turn % len(schedules)
        turns = [name for name in (*schedules[first:], *schedules[:first]) if fits(name, size)]
        runs += [Run(schedule, condition, NUM_STAGES, size, turn // repeats) for schedule in turns]
    return runs


def fits(schedule: str, num_microbatches: int) -> bool:
    """Return whether this schedule differs from the schedule before in RULES."""
    return schedule != "message-driven, all" or num_microbatches > 2 * NUM_STAGES


def measure(runs: Sequence[Run], transport: str, forward_ms: float, message_bytes: int) -> list[Measured]:
    """Run all in one team of processes, and keep the fastest of equal runs. Raises LaunchError if the team fails."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="benchmark-")))
        progress = stack.enter_context(Progress(console=Console(stderr=True), transient=True))
        data = folder / "data"
        data.mkdir()
        (data / RUNS).write_text(json.dumps([asdict(run) for run in (WARM_UP, *runs)]))
        options = {
            "transport": transport,
            "forward_ms": forward_ms,
            "message_bytes": message_bytes,
            "folder": str(data),
        }
        launcher = "mpi" if transport == "mpi" else "torch"
        team = Team(Contender("paced", "benchmarks.paced:paced", options, NUM_STAGES, launcher), folder)
        stack.callback(team.close)
        team.run(1)
        fastest: dict[Run, Measured] = {}
        for index, run in enumerate(progress.track(runs, description="measuring"), start=1):
            team.run(1)
            real = scaled(read_trace(data / f"{index}.json"), 1e3 / forward_ms)
            if run not in fastest or real.total_seconds < fastest[run].real.total_seconds:
                fastest[run] = Measured(run, real, run.simulated())
    return list(fastest.values())


def scaled(timeline: Timeline, factor: float) -> Timeline:
    """Return the timeline in another unit of time."""
    spans = (
        span._replace(start_seconds=span.start_seconds * factor, end_seconds=span.end_seconds * factor)
        for span in timeline.spans
    )
    return Timeline(timeline.num_stages, tuple(spans))


@dataclass(frozen=True)
class Row:
    """A schedule in a cell: totals in forward passes, and ratios to 1F1B's totals, all medians of the rounds."""

    num_microbatches: int
    condition: str
    schedule: str
    real: float
    clock: float
    real_ratio: float
    clock_ratio: float
    overrun: float
    """Of a task, mean; a large overrun means that the machine was busy with other work."""

    @property
    def ratio_error(self) -> float:
        """Return the relative difference of the clock's ratio from the processes' ratio."""
        return self.clock_ratio / self.real_ratio - 1

    @property
    def target(self) -> float | None:
        """Return the most that the real ratio may be, or None without a target."""
        ours = self.schedule.startswith("message-driven") and self.schedule not in CHUNKED
        return TARGETS[self.num_microbatches][CONDITIONS.index(self.condition)] if ours else None


def summed_up(measured: Sequence[Measured]) -> list[Row]:
    """Return a row for each cell and schedule, in the order of the first round and of RULES."""
    baselines = {replace(each.run, schedule=BASELINE): each for each in measured if each.run.schedule == BASELINE}
    cells = dict.fromkeys((each.run.num_microbatches, each.run.condition) for each in measured)
    rows = []
    for (size, condition), schedule in product(cells, RULES):
        here = [
            each
            for each in measured
            if (each.run.num_microbatches, each.run.condition, each.run.schedule) == (size, condition, schedule)
        ]
        if here:
            against = [baselines[replace(each.run, schedule=BASELINE)] for each in here]
            real, clock = [x.real.total_seconds for x in here], [x.clock.total_seconds for x in here]
            real_ratios = [seconds / x.real.total_seconds for seconds, x in zip(real, against, strict=True)]
            clock_ratios = [seconds / x.clock.total_seconds for seconds, x in zip(clock, against, strict=True)]
            overruns = [x.overrun for x in here]
            medians = map(statistics.median, (real, clock, real_ratios, clock_ratios, overruns))
            rows.append(Row(size, condition, schedule, *medians))
    return rows


def show(rows: Sequence[Row], forward_ms: float, title: str) -> None:
    table = Table(title=title)
    table.add_column("cell")
    table.add_column("schedule")
    for head in (
        "real ms",
        "clock ms",
        "clock/real",
        "overrun ms",
        "real /1f1b",
        "clock /1f1b",
        "clock/real",
        "target",
    ):
        table.add_column(head, justify="right")
    cell = None
    for row in rows:
        if cell not in (None, (row.num_microbatches, row.condition)):
            table.add_section()
        first = cell != (row.num_microbatches, row.condition)
        cell = (row.num_microbatches, row.condition)
        table.add_row(
            f"{row.num_microbatches}, {row.condition}" if first else "",
            row.schedule,
            f"{row.real * forward_ms:.0f}",
            f"{row.clock * forward_ms:.0f}",
            f"{row.clock / row.real - 1:+.1%}",
            f"{row.overrun * forward_ms:.2f}",
            f"{row.real_ratio:.3f}",
            f"{row.clock_ratio:.3f}",
            f"{row.ratio_error:+.1%}",
            "" if row.target is None else f"{row.target:.2f}",
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def draw(measured: Sequence[Measured], picture: Path) -> None:
    """Draw the four schedules of the first round with the fewest microbatches, in the first condition."""
    fewest = min(each.run.num_microbatches for each in measured)
    cell = (fewest, measured[0].run.condition, 0)
    there = {
        each.run.schedule: each.real
        for each in measured
        if (each.run.num_microbatches, each.run.condition, each.run.seed) == cell
    }
    titles = {f"{name}, {most_held(there[name])} microbatches held": there[name] for name in PICTURED if name in there}
    draw_timelines(titles, picture, "forward passes")


def most_held(timeline: Timeline) -> int:
    """Return the most microbatches of a stage with activations in memory at one time: from the start of the forward
    pass to the end of the last backward task."""
    most = 0
    for stage in range(timeline.num_stages):
        starts, ends = dict[int, float](), dict[int, float]()
        for span in (span for span in timeline.spans if span.stage == stage):
            micro = int(span.name[1:])
            starts[micro] = min(starts.get(micro, span.start_seconds), span.start_seconds)
            end = span.start_seconds + span.seconds
            ends[micro] = max(ends.get(micro, end), end)
        counts = (sum(starts[n] <= at < ends[n] for n in starts) for at in starts.values())
        most = max(most, *counts)
    return most


def main() -> None:
    parser = argparse.ArgumentParser(description="Schedules in paced processes, beside the clock that computes.")
    parser.add_argument("--microbatches", type=int, nargs="+", choices=list(TARGETS), default=list(TARGETS))
    parser.add_argument("--conditions", nargs="+", choices=CONDITIONS, default=list(CONDITIONS))
    parser.add_argument("--schedules", nargs="+", choices=list(RULES), default=ONE_CHUNK, help="beside 1f1b")
    parser.add_argument("--transport", choices=["mpi", "torch"], default="mpi")
    parser.add_argument("--rounds", type=int, default=3, help="draws of the troubles")
    parser.add_argument("--repeats", type=int, default=1, help="turns with the same troubles; the fastest counts")
    parser.add_argument("--forward-ms", type=float, default=20.0, help="how long a forward pass sleeps")
    parser.add_argument("--message-kib", type=int, default=256)
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the schedules' timelines from real traces")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    arguments = parser.parse_args()
    schedules = list(dict.fromkeys([BASELINE, *arguments.schedules]))
    runs = planned(arguments.microbatches, arguments.conditions, schedules, arguments.rounds, arguments.repeats)
    measured = measure(runs, arguments.transport, arguments.forward_ms, arguments.message_kib * 1024)
    rows = summed_up(measured)
    title = f"{NUM_STAGES} paced stages over {arguments.transport}, forward {arguments.forward_ms:g} ms"
    show(rows, arguments.forward_ms, f"{title}, {arguments.rounds} rounds of {arguments.repeats}")
    if arguments.picture is not None:
        draw(measured, arguments.picture)
    write_json(arguments.json, {title: [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
