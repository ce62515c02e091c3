"""Which chunks of the model's chain each stage holds, and the sender and receiver of each message.

A stage holds `num_chunks` contiguous parts of the chain. With one chunk a stage, the chain has one position for each
stage. With c chunks, a microbatch passes through all stages c times, and the pipeline fills and drains in 1/c of the
time (interleaved stages: Narayanan et al. 2021, arXiv 2104.04473, section 2.2).

| shape | the chain's positions on stages 0, 1, 2, 3 | neighbours |
|---|---|---|
| loop | 0 4, 1 5, 2 6, 3 7 | the last stage sends on to the first: a ring |
| v (ZB-V, Qi et al., arXiv 2401.10241) | 0 7, 1 6, 2 5, 3 4 | a line; at its turns a stage sends to itself |

A position is an index in the chain, a chunk an index within one stage: chunk c is at positions c p ... c p + p - 1.

**Pieces.** A chunk can be cut before and after each layer's experts, where rows are sent to other ranks and received
back (pieces.py). Task numbers then count the pieces of all of a stage's chunks instead of the chunks. Inside of a
chunk, rows are passed from a piece to the next by an all-to-all of the ranks that share the stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Literal

from meshwright.strategies.pipeline.task import Arrival, Task, TaskKind

Shape = Literal["loop", "v"]

_STEPS = ((TaskKind.FORWARD, 1), (TaskKind.BACKWARD, -1))
"""The kinds of tasks that send a message, each with the step in the chain."""


@dataclass(frozen=True)
class ChunkPlacement:
    """The chunks of `num_stages` stages, `num_chunks` on each."""

    num_stages: int
    num_chunks: int = 1
    shape: Shape = "loop"
    pieces: tuple[int, ...] = ()
    """Number of pieces of each position's chunk; empty: chunks are whole."""
    spreads_head: bool = False
    """Whether every stage, of one chunk, also has a part of the head's classes (spread_head.py)."""
    num_positions: int = field(init=False, repr=False, compare=False)
    last_stage: int = field(init=False, repr=False, compare=False)
    """The stage that holds the chain's end. The chain's beginning is on stage 0."""
    is_ring: bool = field(init=False, repr=False, compare=False)
    """Whether the first and the last stage send to each other without being neighbours on a line."""
    positions: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)
    """The positions of each stage's chunks, in order."""
    stage_of: tuple[int, ...] = field(init=False, repr=False, compare=False)
    """The stage of each position."""
    numbers: tuple[tuple[range, ...], ...] = field(init=False, repr=False, compare=False)
    """[stage][chunk]: values of `Task.chunk` for the pieces of the chunk. A part of the head is one chunk more."""
    places: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)
    """[stage][`Task.chunk`]: (chunk, index of the piece in the chunk)."""

    def __post_init__(self) -> None:
        stages, chunks = range(self.num_stages), range(self.num_chunks)
        # Every second chunk of a v runs through the stages backwards: the turns are on the first and the last stage.
        stage_of = tuple(
            stage for chunk in chunks for stage in (reversed(stages) if self.shape == "v" and chunk % 2 else stages)
        )
        positions: list[list[int]] = [[] for _ in stages]
        for position, stage in enumerate(stage_of):
            positions[stage].append(position)
        last = stage_of[-1]
        counts = [[self.pieces[at] if self.pieces else 1 for at in stage_chunks] for stage_chunks in positions]
        if self.spreads_head:
            counts = [[2] if stage == last else [1, 2] for stage in stages]
        numbers = tuple(
            tuple(
                range(sum(stage_chunks[:chunk]), sum(stage_chunks[: chunk + 1])) for chunk in range(len(stage_chunks))
            )
            for stage_chunks in counts
        )
        # Written past the frozen dataclass: values derived from the other fields, computed once instead of at every
        # task.
        self.__dict__.update(
            num_positions=len(stage_of),
            last_stage=last,
            # Two stages are neighbours on a line, too.
            is_ring=self.shape == "loop" and self.num_chunks > 1 and self.num_stages > 2,
            positions=tuple(map(tuple, positions)),
            stage_of=stage_of,
            numbers=numbers,
            places=tuple(
                tuple((chunk, piece_index) for chunk, count in enumerate(stage_chunks) for piece_index in range(count))
                for stage_chunks in counts
            ),
        )

    def receiver(self, stage: int, task: Task) -> tuple[int, Arrival] | None:
        """Return the stage that receives a task's result, perhaps this one, and the message there; None: no stage."""
        task_kind, microbatch, task_chunk = task
        route = self._routes.get((stage, task_kind, task_chunk))
        return route and (route[0], Arrival(task_kind, microbatch, route[1]))

    @cached_property
    def _routes(self) -> dict[tuple[int, TaskKind, int], tuple[int, int]]:
        """By stage, kind and number of a task, the receiving stage and the number of the task there."""
        routes = {}
        for stage, (task_kind, step) in product(range(self.num_stages), _STEPS):
            for task_chunk, (chunk, piece_index) in enumerate(self.places[stage]):
                if piece_index != (len(self.numbers[stage][chunk]) - 1 if step == 1 else 0):
                    routes[stage, task_kind, task_chunk] = stage, task_chunk + step
                    continue
                to = self.positions[stage][chunk] + step if chunk < self.num_chunks else -1
                if 0 <= to < self.num_positions:
                    receiver = self.stage_of[to]
                    entry = self.numbers[receiver][to // self.num_stages]
                    routes[stage, task_kind, task_chunk] = receiver, entry[0] if step == 1 else entry[-1]
        return routes

    def sender(self, stage: int, task_kind: TaskKind, task_chunk: int) -> int | None:
        """Return the stage that sends a task's activations or gradients; None: the chain begins or ends here."""
        chunk, piece_index = self.places[stage][task_chunk]
        if piece_index != (0 if task_kind is TaskKind.FORWARD else len(self.numbers[stage][chunk]) - 1):
            return stage
        if chunk == self.num_chunks:
            return None
        source = self.positions[stage][chunk] + (-1 if task_kind is TaskKind.FORWARD else 1)
        return self.stage_of[source] if 0 <= source < self.num_positions else None

    def crosses(self, stage: int, task: Task) -> bool:
        """Return whether a task's result is sent by an exchange of rows with the ranks of the same stage."""
        chunk, piece_index = self.places[stage][task.chunk]
        if task.kind is TaskKind.WEIGHT:
            return False
        return piece_index < len(self.numbers[stage][chunk]) - 1 if task.kind is TaskKind.FORWARD else piece_index > 0
