"""A chunk's tasks in pieces, where rows travel to experts as messages (pipeline/pieces.py): their seconds, cut out of
what was recorded of whole layers.

A layer's forward program sends rows to their experts and back: what comes before the first of these two exchanges is
the first piece's, what lies between them the second's. B and W compute in each piece the same part of a layer as F.
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
    chunk: ChunkPlan, kind: TaskKind, which: int, whole: Cost, seconds: Seconds, sent: Callable[[Start], float]
) -> PieceCosts:
    """The pieces of a task whose cost as a whole is `whole`, its exchanges among it. `sent`: an exchange's seconds."""
    pieces: list[float] = [0.0]
    trades: list[float] = []
    for unit in chunk.units:
        program, forward = unit.recording.programs[kind][which], unit.recording.programs[TaskKind.FORWARD][0]
        exchanges, cut = _cut(program)
        computed = sum(map(seconds, cut))
        parts = [seconds(part) for part in _cut(forward)[1]]
        shares = [part / sum(parts) for part in parts] if sum(parts) else [1 / len(parts)] * len(parts)
        own = [sent(start) for start in exchanges] or [0.0] * (len(parts) - 1)
        # Backward the outputs' gradients travel first.
        trades += own if kind is TaskKind.FORWARD else own[::-1]
        pieces[-1] += shares[0] * computed
        pieces += [share * computed for share in shares[1:]]
    # Each piece is a task, and pays for itself what a task pays: what the whole has beside its parts, once.
    beside = max(0.0, whole.seconds - sum(pieces) - sum(trades))
    # A piece keeps, or frees, and needs beside that, its part of what the whole does.
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
    """The exchanges of rows of a layer's program, and the program cut where rows travel, without these."""
    sent = [event for event in program.events if isinstance(event, Start) and event.verb == "all_to_all"]
    # The last two all-to-alls between experts' ranks: without a capacity one of counts comes before them.
    trades = [event for event in sent if event.axes == EXPERT][-2:]
    numbers = {start.number for start in trades}
    cuts = [0, *map(program.events.index, trades), len(program.events)]
    events = (program.events[start:stop] for start, stop in pairwise(cuts))
    kept = (tuple(e for e in own if isinstance(e, Kernel) or e.number not in numbers) for own in events)
    return trades, [replace(program, events=own) for own in kept]
