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
from functools import cached_property
from itertools import accumulate
from typing import ClassVar, Literal

from meshwright.pipeline.task import Arrival, Task, TaskKind

Shape = Literal["loop", "v"]


@dataclass(frozen=True)
class ChunkPlacement:
    """The chunks of `num_stages` stages, `num_chunks` on each."""

    num_stages: int
    num_chunks: int = 1
    shape: Shape = "loop"
    spreads_head: ClassVar[bool] = False
    """Whether every stage has a part of the head's classes."""

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

    def pieces_of(self, stage: int) -> tuple[range, ...]:
        """By chunk of a stage, the numbers that its tasks have as their chunk."""
        return tuple(range(chunk, chunk + 1) for chunk in range(self.num_chunks))

    def place(self, stage: int, number: int) -> tuple[int, int]:
        """The chunk of a task that has this number as its chunk, and the task's place in it."""
        return number, 0

    def entry(self, stage: int, kind: TaskKind, chunk: int) -> int:
        """The number of the task that a message from another chunk lets a chunk do."""
        return chunk

    def crosses(self, stage: int, task: Task) -> bool:
        """Whether a task's result comes back to its own stage by a trade of rows with other ranks."""
        return False


@dataclass(frozen=True)
class PiecePlacement(ChunkPlacement):
    """Chunks that fall into pieces, where rows leave for other ranks' experts and where they come back.

    A stage's tasks count its pieces, through all of its chunks, where others count chunks. What ends a piece inside of
    a chunk comes to the next one by an exchange of the ranks that share the stage. `pieces`: of each position.
    """

    pieces: tuple[int, ...] = ()

    @cached_property
    def _pieces(self) -> tuple[tuple[range, ...], ...]:
        """By stage and chunk."""
        stages = []
        for stage in range(self.num_stages):
            counts = [self.pieces[position] for position in self.positions(stage)]
            starts = accumulate(counts, initial=0)
            stages.append(tuple(range(start, start + count) for start, count in zip(starts, counts, strict=False)))
        return tuple(stages)

    def pieces_of(self, stage: int) -> tuple[range, ...]:
        return self._pieces[stage]

    def place(self, stage: int, number: int) -> tuple[int, int]:
        pieces = self._pieces[stage]
        chunk = next(chunk for chunk, own in enumerate(pieces) if number in own)
        return chunk, number - pieces[chunk][0]

    def entry(self, stage: int, kind: TaskKind, chunk: int) -> int:
        pieces = self._pieces[stage][chunk]
        return pieces[0] if kind is TaskKind.FORWARD else pieces[-1]

    def crosses(self, stage: int, task: Task) -> bool:
        chunk, place = self.place(stage, task.chunk)
        if task.kind is TaskKind.WEIGHT:
            return False
        return place < len(self._pieces[stage][chunk]) - 1 if task.kind is TaskKind.FORWARD else place > 0

    def receiver(self, stage: int, task: Task) -> tuple[int, Arrival] | None:
        if self.crosses(stage, task):
            return stage, task._replace(chunk=task.chunk + (1 if task.kind is TaskKind.FORWARD else -1))
        sent = super().receiver(stage, task._replace(chunk=self.place(stage, task.chunk)[0]))
        if sent is None:
            return None
        to, message = sent
        return to, message._replace(chunk=self.entry(to, message.kind, message.chunk))

    def sender(self, stage: int, kind: TaskKind, chunk: int) -> int | None:
        own, place = self.place(stage, chunk)
        if place != (0 if kind is TaskKind.FORWARD else len(self._pieces[stage][own]) - 1):
            return stage
        return super().sender(stage, kind, own)
