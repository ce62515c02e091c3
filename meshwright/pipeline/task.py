"""The tasks of a stage and the messages that come to it.

| prints | kind | does | needs | sends |
|---|---|---|---|---|
| F3 | FORWARD | the stage's layers forward | the activation from before | one to the stage after |
| B3 | BACKWARD | the gradient of the stage's input | the gradient from after | one to the stage before |
| W3 | WEIGHT | the gradients of the stage's weights | B3 | nothing |

The first stage's F needs no message, as it has the batch; nor does the last one's B, as it has the loss.
3 is the microbatch. Where the backward pass is not split, B does the work of W too, and there is no W.

What a schedule may see of its stage: counters only.

Counters are enough because every stage does each kind of task in the order of the microbatches. That order is what
makes sums of gradients the same bits whatever the order in which messages come. A message that overtook another does
not show here until its turn (engine.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class TaskKind(Enum):
    """A kind of task; prints as its letter."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Task:
    """One kind of work on one microbatch."""

    kind: TaskKind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Arrival = Task
"""A message, named after the task that it lets a stage do: FORWARD is an activation from the stage before, BACKWARD a
gradient from the stage after."""


class Wait(Enum):
    """The schedule has nothing to do: the stage sleeps until a message comes."""

    WAIT = "wait"


WAIT = Wait.WAIT


@dataclass(frozen=True)
class View:
    """A stage at the moment of a decision.

    `limit`: the most microbatches in flight here. `kinds`: what each microbatch goes through, in order: F, B, W; F, B
    where the backward pass is not split; F in an evaluation. `forwards`, `backwards`, `weights`: tasks done.
    `activations`, `gradients`: messages that have come, without gaps. `arrivals`: those of them that no task has
    taken yet, in the order in which they came.
    """

    stage: int
    num_stages: int
    num_microbatches: int
    limit: int
    kinds: tuple[TaskKind, ...]
    forwards: int = 0
    backwards: int = 0
    weights: int = 0
    activations: int = 0
    gradients: int = 0
    arrivals: tuple[TaskKind, ...] = ()

    def __post_init__(self) -> None:
        assert 0 <= self.stage < self.num_stages, f"stage {self.stage} of {self.num_stages}"
        assert self.num_microbatches >= 1, f"{self.num_microbatches} microbatches"
        assert self.limit >= 1, f"a limit of {self.limit} microbatches in flight: stage {self.stage} could never begin"

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1

    @property
    def splits(self) -> bool:
        """Whether weight gradients are tasks of their own."""
        return TaskKind.WEIGHT in self.kinds

    def num_done(self, kind: TaskKind) -> int:
        """How many tasks of this kind are done."""
        if kind is TaskKind.FORWARD:
            return self.forwards
        return self.backwards if kind is TaskKind.BACKWARD else self.weights

    @property
    def in_flight(self) -> int:
        """Microbatches whose activations this stage holds: begun, and their last task not done."""
        return self.forwards - self.num_done(self.kinds[-1])

    @property
    def done(self) -> bool:
        return self.num_done(self.kinds[-1]) == self.num_microbatches

    def next(self, kind: TaskKind) -> Task:
        """The only task of this kind whose turn it is."""
        return Task(kind, self.num_done(kind))

    def ready(self, kind: TaskKind) -> bool:
        """Whether the next task of this kind has all that it needs, and a forward pass room below the limit."""
        if kind not in self.kinds:
            return False
        if kind is TaskKind.FORWARD:
            given = self.num_microbatches if self.is_first else self.activations
            return self.forwards < given and self.in_flight < self.limit
        if kind is TaskKind.BACKWARD:
            return self.backwards < (self.forwards if self.is_last else self.gradients)
        return self.weights < self.backwards

    @property
    def outstanding(self) -> int:
        """Messages that can still come while this stage does nothing."""
        activations = 0 if self.is_first else self.num_microbatches - self.activations
        sends_back = TaskKind.BACKWARD in self.kinds and not self.is_last
        return activations + (self.forwards - self.gradients if sends_back else 0)

    def after(self, task: Task) -> View:
        """The view when the task is done: its counter goes on, and the message that it took is gone."""
        assert self.ready(task.kind), f"{task} is not ready: {self}"
        assert task == self.next(task.kind), f"{task} out of turn: {self}"
        if task.kind is TaskKind.FORWARD:
            return self._with(forwards=self.forwards + 1, arrivals=self._without(task.kind))
        if task.kind is TaskKind.BACKWARD:
            return self._with(backwards=self.backwards + 1, arrivals=self._without(task.kind))
        return self._with(weights=self.weights + 1)

    def _with(self, **changes: Any) -> View:
        """dataclasses.replace, several times as fast: a simulated step has a hundred thousand views."""
        made = object.__new__(View)
        made.__dict__.update(self.__dict__)
        made.__dict__.update(changes)
        return made

    def _without(self, kind: TaskKind) -> tuple[TaskKind, ...]:
        """The arrivals less the oldest of this kind, if any: the first stage's F and the last one's B take none."""
        if kind not in self.arrivals:
            return self.arrivals
        index = self.arrivals.index(kind)
        return self.arrivals[:index] + self.arrivals[index + 1 :]

    def expects(self, kind: TaskKind) -> Arrival:
        """The message of this kind whose turn it is."""
        return Arrival(kind, self.activations if kind is TaskKind.FORWARD else self.gradients)

    def with_arrival(self, kind: TaskKind) -> View:
        """The view when the next message of this kind has come."""
        arrivals = (*self.arrivals, kind)
        if kind is TaskKind.FORWARD:
            assert not self.is_first, f"an activation at the first stage: {self}"
            assert self.activations < self.num_microbatches, f"one activation too many: {self}"
            return self._with(activations=self.activations + 1, arrivals=arrivals)
        assert kind is TaskKind.BACKWARD, f"{kind} is no message"
        assert not self.is_last, f"a gradient at the last stage: {self}"
        assert self.gradients < self.forwards, f"a gradient of a microbatch that was not sent on: {self}"
        return self._with(gradients=self.gradients + 1, arrivals=arrivals)
