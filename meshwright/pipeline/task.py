"""What a stage does and what comes to it.

| prints | kind | does | needs | sends |
|---|---|---|---|---|
| F3 | FORWARD | the stage's layers forward | the activation from before | one to the stage after |
| B3 | BACKWARD | the gradient of the stage's input | the gradient from after | one to the stage before |
| W3 | WEIGHT | the gradients of the stage's weights | B3 | nothing |

The first stage's F needs no message, as it has the batch; nor does the last one's B, as it has the loss.
3 is the microbatch. Where the backward pass is not split, B does the work of W too, and there is no W.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """A kind of task; prints as its letter."""

    FORWARD = "F"
    BACKWARD = "B"
    WEIGHT = "W"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class Task:
    """One kind of work on one microbatch."""

    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}"


Arrival = Task
"""A message, named after the task that it lets a stage do: FORWARD is an activation from the stage before, BACKWARD a
gradient from the stage after."""


class Wait(Enum):
    """What a stage does where its schedule has nothing to do: sleep until a message comes."""

    WAIT = "wait"


WAIT = Wait.WAIT
