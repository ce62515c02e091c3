"""The head over all stages: of every microbatch each computes its part of the classes (vocabulary parallelism in
pipelines: Yeung et al., arXiv 2411.05288).

The head of a large vocabulary weighs as much as several layers, and the last stage alone has it. Cut over the stages
it makes none longer than the others, and each holds and steps its part of the table.

| piece | on the last stage | on every other | ends with                                                       |
|-------|-------------------|----------------|-----------------------------------------------------------------|
| gate  | layers, last norm | nothing        | the hidden states, which travel from the last stage to all      |
| head  | its classes       | its classes    | backward: its part of their gradient, which travels to the last |

The pieces are tasks, as those around an expert's rows are (pieces.py): a stage does others while hidden states or their
gradients are under way. In the head itself the stages meet, chunk by chunk of tokens, for each other's statistics
(tensor/cross_entropy.py); one that comes late keeps the others waiting, so the head goes before layers (schedule.py). A
microbatch goes there when the one before has left it: all stages then trade and meet in one order, over one comm.

Sends, a microbatch: p - 1 times the hidden states, and as much back, which the last stage adds up in the stages' order.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

from meshwright.pipeline.placement import PiecePlacement
from meshwright.pipeline.task import Arrival, Task, TaskKind


class SpreadHeadPlacement(PiecePlacement):
    """One chunk of layers a stage; gate and head are the last stage's own pieces, and a chain by themselves beside the
    layers of every other."""

    spreads_head: ClassVar[bool] = True

    @cached_property
    def _pieces(self) -> tuple[tuple[range, ...], ...]:
        return *[(range(1), range(1, 3))] * (self.num_stages - 1), (range(2),)

    def receiver(self, stage: int, task: Task) -> tuple[int, Arrival] | None:
        ends = self.place(stage, task.chunk)[0] > 0 and not self.crosses(stage, task)
        return None if ends else super().receiver(stage, task)

    def sender(self, stage: int, kind: TaskKind, chunk: int) -> int | None:
        own, place = self.place(stage, chunk)
        if own == 0:
            return super().sender(stage, kind, chunk)
        return stage if place == (1 if kind is TaskKind.FORWARD else 0) else None
