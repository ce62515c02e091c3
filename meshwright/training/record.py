"""A record of a step that was begun: facts that are known, and those that its device has yet to tell.

A GPU does a step while its host gives it the next one. What only the device knows of a step (loss, norm, hashes of
replicas, when it did what) is copied behind the step to pinned memory, and read in the step after: the host waits for
the device once a step, when that has the next step's passes to do already. On a CPU a step is done when the call
returns, and its numbers are read at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshwright.optim.optimizer import Optimizer, PendingStep, StepResult
from meshwright.pipeline.span import Moment
from meshwright.pipeline.task import Task
from meshwright.training.phases import PIPELINE, PhaseClock
from meshwright.training.step_report import StepReport


@dataclass
class StepRecord:
    """A step of a rank. `number`: from 0; `samples`, `counts`: its place in the data and its valid labels.

    `loss`: this rank's share, a float64 scalar; `dropped`: pairs of a token and an expert, a scalar; `hashes` [copy
    sets], of the weights that its backward pass has read, int64, or empty where none are compared. They lie on the
    device until `fetch`. `facts`: what the host knows for the step report.
    """

    number: int
    samples: int
    counts: Sequence[int]
    loss_scale: float
    started_seconds: float
    phases: PhaseClock
    loss: Tensor
    dropped: Tensor
    hashes: Tensor
    tasks: Sequence[tuple[Task, Moment, Moment]]
    facts: StepReport
    pending: PendingStep | None = None
    result: StepResult | None = None
    _copied: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Let the device copy its numbers to the host when it has done the step. Waits for nothing."""
        assert self.pending is not None, "the optimizer comes before its norm"
        self.loss, self.dropped, self.hashes, norm = (
            x.to("cpu", non_blocking=True) for x in (self.loss, self.dropped, self.hashes, self.pending.norm)
        )
        self.pending = replace(self.pending, norm=norm)
        if self.phases.device.type == "cuda":
            self._copied = torch.cuda.current_stream(self.phases.device).record_event()

    def wait(self) -> None:
        """Wait until the device has done the step and copied what was fetched, not for what it was given behind it."""
        if self._copied is not None:
            self._copied.synchronize()

    def report(self, next_counts: list[int], stop: bool) -> StepReport:
        """The rank's report of this step, in which it says what is next as well."""
        return replace(
            self.facts, loss=float(self.loss), hashes=tuple(self.hashes.tolist()), next_counts=next_counts, stop=stop,
            dropped_pairs=float(self.dropped), pipeline_seconds=self.phases.seconds()[PIPELINE],
            task_seconds=sum(end() - start() for _, start, end in self.tasks),
        )  # fmt: skip

    def conclude(self, optimizer: Optimizer) -> StepResult:
        """The step's result, once its norm is there. Raises DivergedError as the optimizer does."""
        if self.result is None:
            assert self.pending is not None, "a step that the optimizer has not begun"
            self.result = optimizer.conclude(self.pending, float(self.pending.norm))
        return self.result
