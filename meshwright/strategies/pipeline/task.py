"""The tasks of a stage and the messages that come to it.

| prints | kind | does | needs | sends |
|---|---|---|---|---|
| F3 | FORWARD | the chunk's layers forward | the activation from before | one to the chunk after |
| B3 | BACKWARD | the gradient of the chunk's input | the gradient from after | one to the chunk before |
| W3 | WEIGHT | the gradients of the chunk's weights | B3 | nothing |

The chain's beginning needs no message for F, as it has the batch; nor does its end for B, as it has the loss.
3 is the microbatch. Where the backward pass is not split, B does the work of W too, and there is no W.
A stage holds one chunk of the chain, or several (placement.py): F3.1 is F3 of its second chunk. Where rows travel to
experts as messages, a chunk is cut there into pieces, which tasks count in place of chunks: F3.1 ends where rows leave,
and F3.2 needs those that other ranks have sent.

What a schedule may see of its stage: counters only.

Counters are enough because every chunk does each kind of task in the order of the microbatches. That order is what
makes sums of gradients the same bits whatever the order in which messages come. A message that overtook another does
not show here until its turn (engine.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from meshwright.strategies.pipeline.placement import ChunkPlacement


class TaskKind(StrEnum):
    """A kind of task; prints as its letter."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"


class Task(NamedTuple):
    """One kind of work on one microbatch, in one chunk of a stage."""

    kind: TaskKind
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}.{self.chunk}" if self.chunk else f"{self.kind}{self.microbatch}"


Arrival = Task
"""A message, named after the task that it lets a stage do: FORWARD is an activation from the chunk before, BACKWARD a
gradient from the chunk after."""


class Wait(Enum):
    """The schedule has nothing to do: the stage sleeps until a message comes."""

    WAIT = "wait"


WAIT = Wait.WAIT


class Counters(NamedTuple):
    """Tasks that are done, and messages that have come, without gaps: of a chunk, or of all."""

    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    activations: int = 0
    gradients: int = 0


DONE = {TaskKind.FORWARD: 0, TaskKind.BACKWARD: 1, TaskKind.WEIGHT: 2}
"""The place among Counters of tasks that are done."""

COME = {TaskKind.FORWARD: 3, TaskKind.BACKWARD: 4}
"""The place among Counters of messages that have come."""


@dataclass(frozen=True)
class View:
    """A stage at the moment of a decision.

    `limit`: the most microbatches in flight here, each counted once for every chunk that holds it. `kinds`: what each
    microbatch goes through, in order: F, B, W; F, B where the backward pass is not split; F in an evaluation. `chunks`:
    the counters of each chunk. `arrivals`: the messages that no task has taken yet, in the order in which they came.
    `order`: all tasks, where the schedule keeps to an order.

    `num_stages`, `is_first`, `is_last`: whether the stage holds the chain's beginning, in its first chunk, and its end,
    in its last one. `total`: the counters of all chunks together.
    """

    stage: int
    placement: ChunkPlacement
    num_microbatches: int
    limit: int
    kinds: tuple[TaskKind, ...]
    chunks: tuple[Counters, ...]
    arrivals: tuple[Arrival, ...] = ()
    order: tuple[Task, ...] = field(default=(), repr=False)
    num_stages: int = field(init=False)
    is_first: bool = field(init=False)
    is_last: bool = field(init=False)
    total: Counters = field(init=False)
    _from_others: tuple[tuple[bool, bool], ...] = field(init=False, repr=False)
    """Whether each chunk's activations, and gradients, come from another stage."""
    _traded: tuple[tuple[bool, bool], ...] = field(init=False, repr=False)
    """Whether each piece's activations, and gradients, come by a trade of rows from the piece beside it."""
    _opens: tuple[bool, ...] = field(init=False, repr=False)
    """Whether each piece is the first of its chunk, where microbatches begin."""
    _begins: tuple[bool, ...] = field(init=False, repr=False)
    """Whether a piece's forward pass needs no message: it has the batch."""
    _ends: tuple[bool, ...] = field(init=False, repr=False)
    """Whether a piece's backward pass needs no message: it has the loss."""
    has_pieces: bool = field(init=False, repr=False)
    """Whether a chunk falls into pieces."""

    def __post_init__(self) -> None:
        pieces = self.placement.numbers[self.stage]
        # Past the frozen dataclass: what follows from the other fields is computed once, not at every look of a
        # schedule.
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
                (place > 0, place < len(own) - 1 and TaskKind.BACKWARD in self.kinds)
                for own in pieces
                for place in range(len(own))
            ),
            # What is beside a stage's chunks of layers, a part of the head, takes no place of theirs.
            _opens=tuple(
                place == 0 and own in pieces[: self.placement.num_chunks] for own in pieces for place in range(len(own))
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
        # Below a place a chunk, a microbatch could not come to the chain's end and back.
        chunks = self.placement.num_chunks
        assert TaskKind.BACKWARD not in self.kinds or self.limit >= chunks, f"{self.limit} places: {self}"

    @property
    def in_flight(self) -> int:
        """Microbatches whose activations a chunk holds: begun, and their last task not done."""
        # With W as a task, activations live until W: so the limit bounds what waits for it, too.
        if not self.has_pieces:
            return self.total.forwards - self.total[DONE[self.kinds[-1]]]
        return sum(map(self.held, range(self.placement.num_chunks)))

    def held(self, chunk: int) -> int:
        """Microbatches that a chunk holds: its first piece has begun them, and not all of its pieces have ended."""
        if not self.has_pieces:
            own = self.chunks[chunk]
            return own.forwards - own[DONE[self.kinds[-1]]]
        counts = [self.chunks[piece] for piece in self.placement.numbers[self.stage][chunk]]
        return counts[0].forwards - min(each[DONE[self.kinds[-1]]] for each in counts)

    @property
    def done(self) -> bool:
        return self.total[DONE[self.kinds[-1]]] == self.num_microbatches * len(self.chunks)

    def next(self, kind: TaskKind, chunk: int = 0) -> Task:
        """The only task of this kind whose turn it is in a chunk."""
        return Task(kind, self.chunks[chunk][DONE[kind]], chunk)

    def ready(self, kind: TaskKind, chunk: int = 0) -> bool:
        """Whether a chunk's next task of this kind has all that it needs, and a forward pass room below the limit."""
        counts = self.chunks[chunk]
        if kind not in self.kinds:
            return False
        if kind is TaskKind.FORWARD:
            given = self.num_microbatches if self._begins[chunk] else counts.activations
            # A microbatch that has begun goes on: its place is taken, and what waits for it may be another rank.
            return counts.forwards < given and (not self._opens[chunk] or self.in_flight < self.limit)
        if kind is TaskKind.BACKWARD:
            return counts.backwards < (counts.forwards if self._ends[chunk] else counts.gradients)
        return counts.weights < counts.backwards

    @property
    def outstanding(self) -> int:
        """Messages that can still come while this stage does nothing."""
        count = 0
        for counts, (activations, gradients) in zip(self.chunks, self._from_others, strict=True):
            count += (self.num_microbatches - counts.activations) * activations
            # A gradient comes of each microbatch that was sent on, and of no other.
            count += (counts.forwards - counts.gradients) * gradients
        for piece, (activations, gradients) in enumerate(self._traded):
            if activations:
                count += self.chunks[piece - 1].forwards - self.chunks[piece].activations
            if gradients:
                count += self.chunks[piece + 1].backwards - self.chunks[piece].gradients
        return count

    def after(self, task: Task) -> View:
        """The view when the task is done: its counter goes on, and the message that it took is gone."""
        kind, _, chunk = task
        assert self.ready(kind, chunk), f"{task} is not ready: {self}"
        assert task == self.next(kind, chunk), f"{task} out of turn: {self}"
        arrivals = self.arrivals
        if task in arrivals:
            place = arrivals.index(task)
            arrivals = arrivals[:place] + arrivals[place + 1 :]
        return self._with(chunk, DONE[kind], arrivals)

    def _with(self, chunk: int, counter: int, arrivals: tuple[Arrival, ...]) -> View:
        """The view after one of a chunk's counters has gone on. It is dataclasses.replace, several times as fast: a
        simulated step has a hundred thousand views."""
        view = object.__new__(View)
        state = view.__dict__
        state.update(self.__dict__)
        state["arrivals"] = arrivals
        counts, total = [*self.chunks[chunk]], [*self.total]
        counts[counter] += 1
        total[counter] += 1
        # Kept beside the chunks' counters: adding up at each look was much of a simulated task's time.
        state["total"] = one = Counters(*total)
        if len(self.chunks) > 1:
            one = Counters(*counts)
        state["chunks"] = (*self.chunks[:chunk], one, *self.chunks[chunk + 1 :])
        return view

    def expects(self, kind: TaskKind, chunk: int = 0) -> Arrival:
        """A chunk's message of this kind whose turn it is."""
        counts = self.chunks[chunk]
        return Arrival(kind, counts.activations if kind is TaskKind.FORWARD else counts.gradients, chunk)

    def with_arrival(self, kind: TaskKind, chunk: int = 0) -> View:
        """The view when a chunk's next message of this kind has come."""
        counts, arrivals = self.chunks[chunk], (*self.arrivals, self.expects(kind, chunk))
        if kind is TaskKind.FORWARD:
            assert not self._begins[chunk], f"an activation at the first stage: {self}"
            assert counts.activations < self.num_microbatches, f"one activation too many: {self}"
        else:
            assert kind is TaskKind.BACKWARD, f"{kind} is no message"
            assert not self._ends[chunk], f"a gradient at the last stage: {self}"
            assert counts.gradients < counts.forwards, f"a gradient of a microbatch that was not sent on: {self}"
        return self._with(chunk, COME[kind], arrivals)
