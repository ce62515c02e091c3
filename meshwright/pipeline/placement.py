"""Which chunks of the model's chain each stage holds, and who sends what to whom.

A stage holds `num_chunks` contiguous parts of the chain. With one the chain is cut into as many parts as there are
stages; with several it passes through all stages more than once, and the wait of the first and the last pass is
shorter by as much (interleaved stages: Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

| shape | the chain's positions on stages 0, 1, 2, 3 | neighbours |
|---|---|---|
| loop | 0 4, 1 5, 2 6, 3 7 | the last stage sends on to the first: a ring |
| v (ZB-V, Qi et al., arXiv 2401.10241) | 0 7, 1 6, 2 5, 3 4 | a line; at its turns a stage sends to itself |

A position counts along the chain, a chunk among those of one stage: chunk c is at positions c p ... c p + p - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from meshwright.pipeline.task import Arrival, Task, TaskKind

Shape = Literal["loop", "v"]


@dataclass(frozen=True)
class ChunkPlacement:
    """The chunks of `num_stages` stages, `num_chunks` on each."""

    num_stages: int
    num_chunks: int = 1
    shape: Shape = "loop"

    @property
    def num_positions(self) -> int:
        return self.num_stages * self.num_chunks

    @property
    def is_ring(self) -> bool:
        """Whether the last stage and the first are neighbours, who otherwise are none."""
        # Two stages are neighbours on a line as well.
        return self.shape == "loop" and self.num_chunks > 1 and self.num_stages > 2

    @property
    def last_stage(self) -> int:
        """The stage that holds the chain's end. Its beginning is on stage 0."""
        return self.stage_of(self.num_positions - 1)

    def stage_of(self, position: int) -> int:
        chunk, along = divmod(position, self.num_stages)
        return self.num_stages - 1 - along if self.shape == "v" and chunk % 2 else along

    def position(self, stage: int, chunk: int) -> int:
        # A v goes back through the stages in every second chunk: its turns are on the first and the last stage.
        along = self.num_stages - 1 - stage if self.shape == "v" and chunk % 2 else stage
        return chunk * self.num_stages + along

    def positions(self, stage: int) -> tuple[int, ...]:
        """The positions of the stage's chunks, in order."""
        return tuple(self.position(stage, chunk) for chunk in range(self.num_chunks))

    def receiver(self, stage: int, task: Task) -> tuple[int, Arrival] | None:
        """The stage that a task's result goes to, perhaps this one, and the message as it knows it; None: nobody."""
        if task.kind is TaskKind.WEIGHT:
            return None
        to = self.position(stage, task.chunk) + (1 if task.kind is TaskKind.FORWARD else -1)
        if not 0 <= to < self.num_positions:
            return None
        return self.stage_of(to), Arrival(task.kind, task.microbatch, to // self.num_stages)

    def sender(self, stage: int, kind: TaskKind, chunk: int) -> int | None:
        """The stage that a chunk's activations or gradients come from; None: it begins or ends the chain."""
        source = self.position(stage, chunk) + (-1 if kind is TaskKind.FORWARD else 1)
        return self.stage_of(source) if 0 <= source < self.num_positions else None
