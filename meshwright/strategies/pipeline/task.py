"""The tasks of a stage, the messages that a stage receives, and the counters that a schedule sees.

| prints | kind | does | needs | sends |
|---|---|---|---|---|
| F3 | FORWARD | the chunk's layers forward | the activation from before | one to the chunk after |
| B3 | BACKWARD | the gradient of the chunk's input | the gradient from after | one to the chunk before |
| W3 | WEIGHT | the gradients of the chunk's weights | B3 | nothing |

3 is the microbatch. At the chain's beginning F needs no message (F reads the batch); at the end B needs none (B begins
with the loss). If the backward pass is not split, B also computes the weights' gradients, and there is no W.

A stage holds one chunk of the chain, or several (placement.py): F3.1 is F3 of its second chunk. If rows are sent to
experts as messages, chunks are cut into pieces, and tasks count pieces instead of chunks: F3.1 ends by sending rows,
and F3.2 needs the rows that other ranks have sent.

A `View` is all that a schedule sees of a stage: counters. Counters are enough because every chunk runs each kind of
task in the order of the microbatches. In that fixed order, sums of gradients have equal bits whatever the order of
messages. A message that overtakes another is counted when its turn is reached (engine.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from meshwright.strategies.pipeline.placement import ChunkPlacement


class TaskKind(StrEnum):
    """A kind of task; prints as one letter."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


class Task(NamedTuple):
    """One kind of work on one microbatch, in one chunk (or piece) of a stage."""

    kind: TaskKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}" if self.chunk else f"{self.kind}{self.microbatch}"


Arrival = Task
"""A message, named after the task that the message makes ready. FORWARD: an activation of the chunk before; BACKWARD: a
gradient of the chunk after."""


class Wait(Enum):
    """The engine's answer if the schedule chooses no task: the stage waits for a message."""

    WAIT = "wait"


WAIT = Wait.WAIT


class Counters(NamedTuple):
    """Finished tasks, and received messages without gaps, of one chunk or of all."""

    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    activations: int = 0
    gradients: int = 0


DONE = {TaskKind.FORWARD: 0, TaskKind.BACKWARD: 1, TaskKind.WEIGHT: 2}
"""Index in `Counters` of finished tasks."""

COME = {TaskKind.FORWARD: 3, TaskKind.BACKWARD: 4}
"""Index in `Counters` of received messages."""


@dataclass(frozen=True)
class View:
    """A stage at the moment of a decision."""

    stage: int
    placement: ChunkPlacement
    num_microbatches: int
    limit: int
    """Largest number of microbatches in flight, each counted once for each chunk that holds activations."""
    kinds: tuple[TaskKind, ...]
    """The tasks of a microbatch, in order: F, B, W; F, B if the backward pass is not split; F in an evaluation."""
    chunks: tuple[Counters, ...]
    """The counters of each chunk (or piece)."""
    arrivals: tuple[Arrival, ...] = ()
    """The messages that no task has used yet, in order of arrival."""
    order: tuple[Task, ...] = field(default=(), repr=False)
    """All tasks of the stage, if the schedule follows a fixed order."""
    num_stages: int = field(init=False)
    is_first: bool = field(init=False)
    """Whether the stage holds the chain's beginning, in its first chunk."""
    is_last: bool = field(init=False)
    """Whether the stage holds the chain's end, in its last chunk."""
    total: Counters = field(init=False)
    """The sum of all chunks' counters."""
    _from_others: tuple[tuple[bool, bool], ...] = field(init=False, repr=False)
    """Whether each chunk's activations, and gradients, are sent by another stage."""
    _traded: tuple[tuple[bool, bool], ...] = field(init=False, repr=False)
    """Whether each piece's activations, and gradients, are received in an exchange of rows with the piece
    next to it."""
    _opens: tuple[bool, ...] = field(init=False, repr=False)
    """Whether each piece is the first of its chunk: microbatches begin there."""
    _begins: tuple[bool, ...] = field(init=False, repr=False)
    """Whether a piece's forward pass reads the batch and needs no message."""
    _ends: tuple[bool, ...] = field(init=False, repr=False)
    """Whether a piece's backward pass begins with the loss and needs no message."""
    has_pieces: bool = field(init=False, repr=False)
    """Whether a chunk is cut into pieces."""

    def __post_init__(self) -> None:
        pieces = self.placement.numbers[self.stage]
        # Written past the frozen dataclass: values derived from the other fields, computed once instead of at every
        # access.
        self.__dict__.update(
            num_stages=self.placement.num_stages,
            is_first=self.stage == 0,
            is_last=self.stage == self.placement.last_stage,
            total=Counters(*map(sum, zip(*self.chunks, strict=True))),
            _from_others=tuple(
                (
                    self.placement.sender(self.stage, TaskKind.FORWARD, chunk) not in (None, self.stage),
                    TaskKind.BACKWARD in self.kinds
                    and self.placement.sender(self.stage, TaskKind.BACKWARD, chunk) not in (None, self.stage),
                )
                for chunk in range(len(self.chunks))
            ),
            _traded=tuple(
                (piece_index > 0, piece_index < len(chunk_pieces) - 1 and TaskKind.BACKWARD in self.kinds)
                for chunk_pieces in pieces
                for piece_index in range(len(chunk_pieces))
            ),
            # A stage's part of the head, next to its chunks of layers, uses no unit of the limit.
            _opens=tuple(
                piece_index == 0 and chunk_pieces in pieces[: self.placement.num_chunks]
                for chunk_pieces in pieces
                for piece_index in range(len(chunk_pieces))
            ),
            _begins=tuple(
                self.placement.sender(self.stage, TaskKind.FORWARD, chunk) is None for chunk in range(len(self.chunks))
            ),
            _ends=tuple(
                self.placement.sender(self.stage, TaskKind.BACKWARD, chunk) is None for chunk in range(len(self.chunks))
            ),
            has_pieces=len(self.chunks) > len(pieces),
        )
        assert 0 <= self.stage < self.num_stages, f"stage {self.stage} of {self.num_stages}"
        assert self.num_microbatches >= 1, f"{self.num_microbatches} microbatches"
        assert self.limit >= 1, f"a limit of {self.limit} microbatches in flight: stage {self.stage} could never begin"
        # With a limit below the number of chunks, a microbatch could not reach the chain's end and return.
        chunks = self.placement.num_chunks
        assert TaskKind.BACKWARD not in self.kinds or self.limit >= chunks, f"{self.limit} places: {self}"

    @property
    def in_flight(self) -> int:
        """Number of microbatches with activations in a chunk: begun, and the last task not finished."""
        # With W as a task, activations live until W, so the limit bounds pending W tasks, too.
        if not self.has_pieces:
            return self.total.forwards - self.total[DONE[self.kinds[-1]]]
        return sum(map(self.held, range(self.placement.num_chunks)))

    def held(self, chunk: int) -> int:
        """Return the number of microbatches in a chunk: begun by the first piece and not finished by all pieces."""
        if not self.has_pieces:
            counters = self.chunks[chunk]
            return counters.forwards - counters[DONE[self.kinds[-1]]]
        counts = [self.chunks[piece] for piece in self.placement.numbers[self.stage][chunk]]
        return counts[0].forwards - min(each[DONE[self.kinds[-1]]] for each in counts)

    @property
    def done(self) -> bool:
        return self.total[DONE[self.kinds[-1]]] == self.num_microbatches * len(self.chunks)

    def next(self, task_kind: TaskKind, chunk: int = 0) -> Task:
        """Return a chunk's next task of this kind; tasks of a kind run in order."""
        return Task(task_kind, self.chunks[chunk][DONE[task_kind]], chunk)

    def ready(self, task_kind: TaskKind, chunk: int = 0) -> bool:
        """Return whether a chunk's next task of this kind has its inputs and, if F, fits below the limit."""
        counts = self.chunks[chunk]
        if task_kind not in self.kinds:
            return False
        if task_kind is TaskKind.FORWARD:
            given = self.num_microbatches if self._begins[chunk] else counts.activations
            # A begun microbatch continues: it is counted already, and another rank may wait for its rows.
            return counts.forwards < given and (not self._opens[chunk] or self.in_flight < self.limit)
        if task_kind is TaskKind.BACKWARD:
            return counts.backwards < (counts.forwards if self._ends[chunk] else counts.gradients)
        return counts.weights < counts.backwards

    @property
    def outstanding(self) -> int:
        """Number of messages that can still be received while this stage runs no task."""
        count = 0
        for counts, (activations, gradients) in zip(self.chunks, self._from_others, strict=True):
            count += (self.num_microbatches - counts.activations) * activations
            # One gradient is received for each microbatch that was sent on.
            count += (counts.forwards - counts.gradients) * gradients
        for piece, (activations, gradients) in enumerate(self._traded):
            if activations:
                count += self.chunks[piece - 1].forwards - self.chunks[piece].activations
            if gradients:
                count += self.chunks[piece + 1].backwards - self.chunks[piece].gradients
        return count

    def after(self, task: Task) -> View:
        """Return the view after a task: the task is counted, and its message removed from `arrivals`."""
        task_kind, microbatch, chunk = task
        assert self.ready(task_kind, chunk), f"{task} is not ready: {self}"
        assert microbatch == self.chunks[chunk][DONE[task_kind]], f"{task} out of turn: {self}"
        arrivals = self.arrivals
        if task in arrivals:
            position = arrivals.index(task)
            arrivals = arrivals[:position] + arrivals[position + 1 :]
        return self._with(chunk, DONE[task_kind], arrivals)

    def _with(self, chunk: int, counter: int, arrivals: tuple[Arrival, ...]) -> View:
        """Return the view with one of a chunk's counters increased. Equals dataclasses.replace at several times the
        speed: a simulated step has a hundred thousand views."""
        view = object.__new__(View)
        state = view.__dict__
        state.update(self.__dict__)
        state["arrivals"] = arrivals
        # The total is updated, not summed at each access: summing was much of a simulated task's time.
        total = [*self.total]
        total[counter] += 1
        state["total"] = counters = tuple.__new__(Counters, total)
        if len(self.chunks) == 1:
            state["chunks"] = (counters,)
            return view
        counts = [*self.chunks[chunk]]
        counts[counter] += 1
        state["chunks"] = (*self.chunks[:chunk], tuple.__new__(Counters, counts), *self.chunks[chunk + 1 :])
        return view

    def expects(self, task_kind: TaskKind, chunk: int = 0) -> Arrival:
        """Return a chunk's next message of this kind in order."""
        return Arrival(task_kind, self.chunks[chunk][COME[task_kind]], chunk)

    def with_arrival(self, task_kind: TaskKind, chunk: int = 0) -> View:
        """Return the view after a chunk's next message of this kind has been received."""
        counts, arrivals = self.chunks[chunk], (*self.arrivals, self.expects(task_kind, chunk))
        if task_kind is TaskKind.FORWARD:
            assert not self._begins[chunk], f"an activation at the first stage: {self}"
            assert counts.activations < self.num_microbatches, f"one activation too many: {self}"
        else:
            assert task_kind is TaskKind.BACKWARD, f"{task_kind} is no message"
            assert not self._ends[chunk], f"a gradient at the last stage: {self}"
            assert counts.gradients < counts.forwards, f"a gradient of a microbatch that was not sent on: {self}"
        return self._with(chunk, COME[task_kind], arrivals)
