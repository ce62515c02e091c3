"""Experts' exchanges during other microbatches' tasks, and schedules with layers that wait for the exchanges: by the
computing clock, and in processes with paced tasks.

    python -m benchmarks.pipeline_experts [--exchange 0.25 0.5 1] [--microbatches 16 64] [--stages 8] [--rounds N]
                                          [--paced] [--transport mpi|torch] [--forward-ms T] [--json FILE]

A stage's forward pass takes 1, half of this in two layers' experts, and so do B and W. `--exchange`: the seconds of
rows on the wire in a forward pass, and again in B, in four equal exchanges; a message between stages takes 0.1. A
stage's exchanges share the stage's links, one after another. Ratios are to 1F1B with blocking exchanges.

| row                     | exchanges                                                                                 |
|-------------------------|-------------------------------------------------------------------------------------------|
| 1f1b, interleaved, zb-v | blocking in F and B, as in torch.distributed.pipelining's schedules of these names        |
| dualpipev               | hidden if the order pairs an F with a B, else blocking (DeepSeek's, published order)      |
| message-driven          | blocking                                                                                  |
| messages                | sent while the stage runs other ready tasks                                               |

DualPipeV is favoured: a pair costs the computation, however long rows are on the wire, and F's message leaves before B
begins. `memory`: the most microbatches in flight at a stage, in whole microbatches.

`--paced`: half of the stages with two ranks each, which trade rows by the real exchanges and follow the real driver.
Tasks sleep, and rows are hidden until due. Ratios are medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from benchmarks.contender import Contender, Place, Step
from benchmarks.interleave import write_json
from benchmarks.paced import HeldMailbox, NoGradients, sleep_until
from benchmarks.team import Team
from meshwright.compute.model import Batch, Crossing, Hidden, Scales
from meshwright.ranks.environment import read_environment, rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.mailbox import TensorMeta
from meshwright.ranks.mesh import Mesh, open_mesh
from meshwright.strategies.pipeline.clock import simulate
from meshwright.strategies.pipeline.pieces import Exchanges, PiecewiseChunks
from meshwright.strategies.pipeline.pipeline import Pipeline, message_forms
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.schedule import MESSAGE_DRIVEN, ONE_F_ONE_B, SPLIT, ZB_V, ScheduleRule, in_order
from meshwright.strategies.pipeline.span import Timeline
from meshwright.strategies.pipeline.task import Arrival, Task, TaskKind

F, B, W = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT
LATENCY, LAYERS = 0.1, 2
ATTENTION, EXPERTS, SUM = 0.4, 0.5, 0.1
"""A layer's pieces, as shares of the layer."""
BASELINE, DUAL = "1f1b", "dualpipev"
TARGET = 0.85
RUNS = "runs.json"


def dual_pipe_v(stage: int, num_stages: int, count: int) -> tuple[tuple[Task, ...], frozenset[Task]]:
    """Return DualPipeV's order of a stage for `count` microbatches, at least 2 p, and the paired tasks, each run during
    the other's exchanges (DeepSeek-AI, github.com/deepseek-ai/DualPipe, dualpipev.py, 2025)."""
    order: list[Task] = []
    paired: set[Task] = set()
    done: dict[tuple[TaskKind, int], int] = {}
    stored: list[Task] = []

    def do(verb: TaskKind, chunk: int) -> Task:
        index = done.get((verb, chunk), 0)
        done[verb, chunk] = index + 1
        order.append(Task(verb, index, chunk))
        return order[-1]

    def backward(chunk: int, *, split: bool = False) -> Task:
        task = do(B, chunk)
        if split:
            stored.append(task._replace(kind=W))
        else:
            order.append(task._replace(kind=W))
        return task

    def pair(forward: int, back: int) -> None:
        paired.update((do(F, forward), backward(back)))

    last = stage == num_stages - 1
    for _ in range(2 * (num_stages - stage - 1)):
        do(F, 0)
    for _ in range(stage + 1):
        do(F, 0)
        do(F, 1)
    for _ in range(num_stages - stage - 1):
        backward(1, split=True)
        order.append(stored.pop(0))
        do(F, 1)
    for turn in range(count - 2 * num_stages + stage + 1):
        if turn == 0 and last:
            do(F, 0)
            backward(1)
        else:
            pair(0, 1)
        pair(1, 0)
    for _ in range(num_stages - stage - 1):
        backward(1)
        pair(1, 0)
    split = False
    for turn in range(stage + 1):
        split = split or (turn == (stage + 1) // 2 and stage % 2 == 1)
        backward(1, split=split)
        split = split or (turn == (stage + 1) // 2 and stage % 2 == 0)
        backward(0, split=split)
    for _ in range(num_stages - stage - 1):
        order.append(stored.pop(0))
        backward(0, split=True)
    order += stored
    return tuple(order), frozenset(paired)


DUAL_PIPE_V = ScheduleRule(
    in_order, SPLIT, lambda stage, num_stages, count: 2 * num_stages + 1, fixed=True, shapes=("v",),
    chunked_limit=lambda stage, placement, count: 2 * count,
    order=lambda stage, placement, count, limit: dual_pipe_v(stage, placement.num_stages, count)[0],
)  # fmt: skip

RULES: dict[str, tuple[ScheduleRule, int, bool]] = {
    BASELINE: (ONE_F_ONE_B, 1, False),
    "interleaved 1f1b": (ONE_F_ONE_B, 2, False),
    "zb-v": (ZB_V, 2, False),
    DUAL: (DUAL_PIPE_V, 2, False),
    "message-driven": (MESSAGE_DRIVEN, 1, False),
    "messages, memory of 1f1b": (MESSAGE_DRIVEN, 1, True),
    "messages": (MESSAGE_DRIVEN, 1, True),
    "messages, v": (MESSAGE_DRIVEN, 2, True),
}
"""Schedule, chunks a stage, and whether rows are sent as messages."""


@dataclass(frozen=True)
class Run:
    """One step. Times are in forward passes of a stage."""

    schedule: str
    exchange: float
    num_stages: int
    num_microbatches: int
    turn: int = 0

    @property
    def rule(self) -> ScheduleRule:
        rule = RULES[self.schedule][0]
        if rule is not MESSAGE_DRIVEN:
            return rule
        places = self.num_stages if self.schedule.endswith("of 1f1b") else 2 * self.num_stages
        return rule.limited(places)

    @property
    def in_pieces(self) -> bool:
        return RULES[self.schedule][2]

    @property
    def chunks(self) -> ChunkPlacement:
        rule, chunks, _ = RULES[self.schedule]
        if chunks == 1:
            return ChunkPlacement(self.num_stages)
        return ChunkPlacement(self.num_stages, chunks, "loop" if rule is ONE_F_ONE_B else "v")

    @property
    def placement(self) -> ChunkPlacement:
        whole = self.chunks
        if not self.in_pieces:
            return whole
        layers = LAYERS // whole.num_chunks
        pieces = (2 * layers + 1,) * whole.num_positions
        return ChunkPlacement(whole.num_stages, whole.num_chunks, whole.shape, pieces)

    def costs(self, stage: int, task: Task) -> float:
        share = 1 / self.chunks.num_chunks
        computes = share * self._part(stage, task)
        if task.kind is B and not self.rule.splits:
            computes *= 2
        if self.in_pieces or task.kind is W:
            return computes
        if self.schedule == DUAL and task in dual_pipe_v(stage, self.num_stages, self.num_microbatches)[1]:
            return computes
        return computes + share * self.exchange

    def _part(self, stage: int, task: Task) -> float:
        """Return the share of a chunk's work that a piece computes."""
        if not self.in_pieces:
            return 1.0
        chunk, place = self.placement.places[stage][task.chunk]
        last = len(self.placement.numbers[stage][chunk]) - 1
        layer = 1 / (last // 2)
        if place % 2:
            return EXPERTS * layer
        return ((ATTENTION if place < last else 0.0) + (SUM if place > 0 else 0.0)) * layer

    def latency(self, stage: int, to: int, task: Task) -> float:
        return self.exchange / (2 * LAYERS) if self.placement.crosses(stage, task) else LATENCY

    def simulated(self) -> Timeline:
        return simulate(
            self.num_stages, self.num_microbatches, self.rule, self.costs, self.latency, placement=self.placement
        )


def most_in_flight(run: Run, timeline: Timeline) -> float:
    """Return the most microbatches on the fullest stage: a piece or a chunk counts as a share of the stage."""
    ends = "weight" if run.rule.splits else "backward"
    most = 0.0
    for stage in range(run.num_stages):
        held = 0.0
        for span in timeline.tasks:
            if span.stage == stage and span.category in ("forward", ends):
                task = Task(F, 0, span.chunk)
                share = run._part(stage, task) / run.chunks.num_chunks
                held += share if span.category == "forward" else -share
                most = max(most, held)
    return most


@dataclass(frozen=True)
class Row:
    """A schedule in a cell, in forward passes of a stage; `ratio`: to 1F1B's total."""

    exchange: float
    num_microbatches: int
    schedule: str
    total: float
    ratio: float
    memory: float
    idle: float | None


def by_clock(exchange: float, count: int, num_stages: int) -> list[Row]:
    rows = []
    base = 0.0
    for name in RULES:
        run = Run(name, exchange, num_stages, count)
        timeline = run.simulated()
        base = base or timeline.total_seconds
        total = timeline.total_seconds
        rows.append(Row(exchange, count, name, total, total / base, most_in_flight(run, timeline), timeline.idle_share))
    return rows


def show(rows: Sequence[Row], title: str) -> None:
    table = Table(title=title)
    for head in ("exchange", "microbatches", "schedule"):
        table.add_column(head)
    for head in ("total", "/1f1b", "memory", "idle"):
        table.add_column(head, justify="right")
    known = None
    for row in rows:
        cell = row.exchange, row.num_microbatches
        if known not in (None, cell):
            table.add_section()
        first, known = known != cell, cell
        table.add_row(
            f"{row.exchange:g}" if first else "", f"{row.num_microbatches}" if first else "", row.schedule,
            f"{row.total:.1f}", f"{row.ratio:.3f}", f"{row.memory:.1f}", "" if row.idle is None else f"{row.idle:.0%}",
        )  # fmt: skip
    Console(width=100).print(table)


class PacedChunk:
    """A chunk without a model, with sleeping tasks: whole, or in pieces that end with rows."""

    def __init__(self, index: int, chunk: int, run: Run, forward_seconds: float, form: TensorMeta, row: Hidden) -> None:
        self.index, self.chunk, self.run, self.forward_seconds = index, chunk, run, forward_seconds
        self.form, self.row = form, row
        self.stage = self

    @property
    def is_last(self) -> bool:
        return self.run.chunks.positions[self.index][self.chunk] == self.run.chunks.num_positions - 1

    def _done(self, task: Task) -> Hidden | Crossing:
        """Sleep, then return the task's output: a message, or rows, with the time at which they are due."""
        sleep_until(time.time() + self.run.costs(self.index, task) * self.forward_seconds)
        end, placement = time.time(), self.run.placement
        sent = placement.receiver(self.index, task)
        if placement.crosses(self.index, task):
            rows = self.row[0].clone()
            rows[:, 0] = end
            return Crossing(rows, (len(rows) // 2,) * 2, (len(rows) // 2,) * 2)
        if sent is None or sent[0] == self.index:
            return (torch.zeros(()),) if task.kind is F and self.is_last else ()
        due = end + self.run.latency(self.index, sent[0], task) * self.forward_seconds
        return (torch.full(self.form.shape, due, dtype=self.form.dtype),)

    def _piece(self, place: int) -> int:
        return self.run.placement.numbers[self.index][self.chunk][place]


class PacedWhole(PacedChunk):
    """A paced chunk for a driver of chunks."""

    def forward(self, index: int, incoming: Hidden, batch: Batch, scales: Scales) -> Any:
        return self._done(Task(F, index, self.chunk))

    def backward(self, index: int, gradients: Hidden, *, defers: bool) -> Any:
        return self._done(Task(B, index, self.chunk))

    def weights(self, index: int, *, final: bool) -> None:
        self._done(Task(W, index, self.chunk))


class PacedPieces(PacedChunk):
    """A paced chunk for a driver of pieces."""

    def forward(self, index: int, place: int, incoming: Hidden, batch: Batch, scales: Scales) -> Any:
        return self._done(Task(F, index, self._piece(place)))

    def backward(self, index: int, place: int, gradients: Hidden) -> Any:
        return self._done(Task(B, index, self._piece(place)))

    def weights(self, index: int, place: int, *, final: bool) -> None:
        self._done(Task(W, index, self._piece(place)))


class HeldExchanges(Exchanges):
    """Exchanges that hide rows until due: `seconds` after the last sender's end and after the exchange before."""

    def __init__(self, mesh: Mesh, seconds: float) -> None:
        super().__init__(mesh.comm("expert"))
        self.seconds, self._over = seconds, 0.0
        self._held: list[tuple[float, Arrival, Tensor]] = []

    @property
    def is_empty(self) -> bool:
        return super().is_empty and not self._held

    def poll(self) -> list[tuple[Arrival, Tensor]]:
        for arrival, rows in super().poll():
            self._over = max(self._over, float(rows[:, 0].max())) + self.seconds
            self._held.append((self._over, arrival, rows))
        now = time.time()
        due = [(arrival, rows) for moment, arrival, rows in self._held if moment <= now]
        self._held = [held for held in self._held if held[0] > now]
        return due


@contextmanager
def paced(
    place: Place, transport: str, forward_ms: float, message_bytes: int, row_bytes: int, folder: str
) -> Iterator[Step]:
    """Yield a step that makes the next run of the folder's runs.json, and returns the seconds from the first task of
    any rank to the end of the last."""
    todo = iter([Run(**fields) for fields in json.loads((Path(folder) / RUNS).read_text())])
    grid = Grid((("data", 1), ("expert", 2), ("pipe", place.ranks // 2)))
    form, rows = TensorMeta((max(1, message_bytes // 8),), torch.float64), (torch.zeros(2, row_bytes // 16 or 1),)
    seconds = forward_ms / 1e3
    with open_mesh(grid, read_environment(), transport, torch.device("cpu"), rendezvous()) as mesh:
        mailbox = HeldMailbox(mesh.mailbox("pipe", ring=True))

        def step() -> float:
            run, index = next(todo), mesh.index("pipe")
            whole = run.chunks
            chunk_type = PacedPieces if run.in_pieces else PacedWhole
            wide = tuple(x.double() for x in rows)
            stages: Any = [chunk_type(index, chunk, run, seconds, form, wide) for chunk in range(whole.num_chunks)]
            forms = message_forms(index, whole, [(form,)] * (whole.num_positions - 1))
            pieces = None
            if run.in_pieces:
                held = HeldExchanges(mesh, run.exchange / (2 * LAYERS) * seconds)
                pieces = PiecewiseChunks(stages, run.placement, held)
            driver = Pipeline(
                stages, run.rule, mesh, mesh.comm("expert"), mailbox, forms, NoGradients(), whole, pieces
            )  # fmt: skip
            mesh.world.barrier()
            driver.train([{}] * run.num_microbatches, {}, lambda microbatch, chunk: None)
            spans = driver.spans
            ends = torch.tensor([-spans[0].start_seconds, spans[-1].end_seconds], dtype=torch.float64)
            every = torch.empty(mesh.world.size if mesh.rank == 0 else 0, 2, dtype=torch.float64)
            mesh.world.gather(every, ends, 0)
            return float(every.max(0)[0].sum()) if mesh.rank == 0 else 0.0

        yield step


def in_processes(arguments: argparse.Namespace) -> list[Row]:
    """Run all schedules in turns; each ratio is the median of the rounds' ratios."""
    stages = arguments.stages // 2
    cells = list(product(arguments.exchange, arguments.microbatches))
    chosen = list(dict.fromkeys([BASELINE, *arguments.schedules]))
    runs = [
        Run(name, exchange, stages, count, turn)
        for turn, (exchange, count), name in product(range(arguments.rounds), cells, chosen)
        if count >= 2 * stages
    ]
    taken: dict[Run, float] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="benchmark-")))
        warm = [Run(BASELINE, 0.5, stages, 2), Run("messages", 0.5, stages, 2)]
        (folder / RUNS).write_text(json.dumps([asdict(run) for run in (*warm, *runs)]))
        options = {
            "transport": arguments.transport, "forward_ms": arguments.forward_ms, "message_bytes": 2**18,
            "row_bytes": 2**18, "folder": str(folder),
        }  # fmt: skip
        launcher = "mpi" if arguments.transport == "mpi" else "torch"
        team = Team(Contender("paced", "benchmarks.pipeline_experts:paced", options, 2 * stages, launcher), folder)
        stack.callback(team.close)
        for _ in warm:
            team.run(1)
        for run in runs:
            taken[run] = team.run(1)[1]
    rows = []
    for (exchange, count), name in product(cells, chosen):
        turns = [run for run in runs if (run.exchange, run.num_microbatches, run.schedule) == (exchange, count, name)]
        bases = [taken[Run(BASELINE, exchange, stages, count, run.turn)] for run in turns]
        total = statistics.median(taken[run] for run in turns) * 1e3 / arguments.forward_ms
        ratio = statistics.median(taken[run] / base for run, base in zip(turns, bases, strict=True))
        clock = turns[0].simulated()
        rows.append(Row(exchange, count, name, total, ratio, most_in_flight(turns[0], clock), None))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description="Experts' exchanges under other microbatches' tasks.")
    parser.add_argument("--exchange", type=float, nargs="+", default=[0.25, 0.5, 1.0])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3, help="turns of the processes")
    parser.add_argument("--paced", action="store_true", help="in processes as well, half as many stages of two ranks")
    parser.add_argument("--schedules", nargs="+", choices=RULES, default=list(RULES), help="in processes, beside 1f1b")
    parser.add_argument("--transport", choices=["mpi", "torch"], default="mpi")
    parser.add_argument("--forward-ms", type=float, default=40.0, help="how long a forward pass of a stage sleeps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE as well")
    arguments = parser.parse_args()
    cells = list(product(arguments.exchange, arguments.microbatches))
    title = f"{arguments.stages} stages, virtual clock; aim for messages {TARGET}"
    rows = [row for exchange, count in cells for row in by_clock(exchange, count, arguments.stages)]
    show(rows, title)
    results = {title: [asdict(row) for row in rows]}
    if arguments.paced:
        title = f"{arguments.stages // 2} paced stages of 2 ranks over {arguments.transport}"
        measured = in_processes(arguments)
        show(measured, title)
        half = arguments.stages // 2
        show([row for exchange, count in cells for row in by_clock(exchange, count, half)], "the same by the clock")
        results[title] = [asdict(row) for row in measured]
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
