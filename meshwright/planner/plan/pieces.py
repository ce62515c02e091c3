"""Costs of a chunk's tasks in pieces, cut from the recordings of whole layers.

A layer with experts exchanges rows twice: to the experts and back (pipeline/pieces.py). The forward program is cut at
both exchanges. The first piece ends at the first exchange, the second one between the two, the third after the second.
Each piece of B and W takes the same share of a layer's seconds as the same piece of F.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING

from meshwright.planner.plan.recorder import Cost, Kernel, PieceCosts, Program, Seconds, Start
from meshwright.ranks.grid import EXPERT
from meshwright.strategies.pipeline.task import TaskKind

if TYPE_CHECKING:
    from meshwright.planner.plan.compose import ChunkPlan


def piece_costs(
    chunk: ChunkPlan, task_kind: TaskKind, which: int, whole: Cost, seconds: Seconds, sent: Callable[[Start], float]
) -> PieceCosts:
    """Divide a task's cost into pieces and exchanges.

    Args:
        chunk: The chunk that the task computes.
        task_kind: F, B or W.
        which: The microbatch's place in the step (recorder.place).
        whole: The task's cost as a whole, with its exchanges.
        seconds: Seconds of a program.
        sent: Seconds of one exchange.
    """
    pieces: list[float] = [0.0]
    trades: list[float] = []
    for unit in chunk.units:
        program, forward = unit.recording.programs[task_kind][which], unit.recording.programs[TaskKind.FORWARD][0]
        exchanges, cut = _cut(program)
        computed = sum(map(seconds, cut))
        parts = [seconds(segment) for segment in _cut(forward)[1]]
        shares = [segment / sum(parts) for segment in parts] if sum(parts) else [1 / len(parts)] * len(parts)
        exchange_times = [sent(start) for start in exchanges] or [0.0] * (len(parts) - 1)
        # In the backward pass the gradients of the layer's output are sent first.
        trades += exchange_times if task_kind is TaskKind.FORWARD else exchange_times[::-1]
        pieces[-1] += shares[0] * computed
        pieces += [share * computed for share in shares[1:]]
    # Each piece is a task, so each pays the fixed cost of a task: the whole cost minus all pieces and exchanges.
    beside = max(0.0, whole.seconds - sum(pieces) - sum(trades))
    # Kept bytes, passing bytes, operations and host bytes are divided in proportion to the seconds.
    total, costs = sum(pieces), []
    passing_bytes = whole.peak_bytes - max(0, whole.kept_bytes)
    for computed in pieces:
        share = computed / total if total else 1 / len(pieces)
        kept_bytes = round(share * whole.kept_bytes)
        peak_bytes = max(0, kept_bytes) + round(share * passing_bytes)
        host_bytes = round(share * whole.host_bytes)
        costs.append(Cost(computed + beside, kept_bytes, peak_bytes, share * whole.flops, host_bytes))
    return PieceCosts(tuple(costs), tuple(trades))


def _cut(program: Program) -> tuple[list[Start], list[Program]]:
    """Return a layer's exchanges of rows, and its program cut at these exchanges, which are left out."""
    sent = [event for event in program.events if isinstance(event, Start) and event.verb == "all_to_all"]
    # The last two all-to-alls over the expert axis carry rows: without a capacity, one before these two carries counts.
    trades = [event for event in sent if event.axes == EXPERT][-2:]
    numbers = {start.number for start in trades}
    cuts = [0, *map(program.events.index, trades), len(program.events)]
    events = (program.events[start:stop] for start, stop in pairwise(cuts))
    segments = (tuple(e for e in segment if isinstance(e, Kernel) or e.number not in numbers) for segment in events)
    return trades, [replace(program, events=segment) for segment in segments]
