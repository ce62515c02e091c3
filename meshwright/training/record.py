"""A record of a step that was begun: facts that are known, and those that its device has yet to tell.

A GPU does a step while its host gives it the next one. What only the device knows of a step (loss, norm, hashes of
replicas, when it did what) is copied behind the step to pinned memory, and read in the step after: the host waits for
the device once a step, when that has the next step's passes to do already. On a CPU a step is done when the call
returns, and its numbers are read at once.

Either way a step's numbers are settled before the next step writes: all ranks have told each other of it (`tell`), and
`settle` has held against each other what they told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.agreement import all_rows
from meshwright.ranks.errors import DivergedError
from meshwright.strategies.optim.optimizer import PendingStep, StepResult
from meshwright.training.checks import (
    REMEDY,
    bad_losses,
    diagnosed,
    first_bad,
    gathered_hashes,
    require_equal_replicas,
)
from meshwright.training.metric import Metric
from meshwright.training.parts import Parts
from meshwright.training.phases import PhaseClock
from meshwright.training.step_report import Lap, StepReports


@dataclass
class StepRecord:
    """A step of a rank. `number`: from 0. `late`: the device's numbers are read in the step after.

    `loss`: this rank's share, a float64 scalar on the device. `measured`: what this rank tells of the step, by the
    names of metric.py's table; tensors lie on the device until `fetch`. `reports`: what all ranks have told.
    `again`: computes the gradients of a late step once more, which were cleared, or are the next step's by then.
    """

    parts: Parts
    number: int
    loss: Tensor
    loss_scale: float
    started_seconds: float
    phases: PhaseClock
    late: bool
    lap: Lap = field(default_factory=Lap)
    measured: dict[str, Any] = field(default_factory=dict)
    again: Callable[[], None] | None = None
    pending: PendingStep | None = None
    result: StepResult | None = None
    reports: StepReports | None = None
    _copied: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Let the device copy its numbers to the host when it has done the step. Waits for nothing."""
        assert self.pending is not None, "the optimizer comes before its norm"
        tensors = {name: value for name, value in self.measured.items() if isinstance(value, Tensor)}
        self.measured |= {name: value.to("cpu", non_blocking=True) for name, value in tensors.items()}
        self.pending = replace(self.pending, norm=self.pending.norm.to("cpu", non_blocking=True))
        if self.phases.device.type == "cuda":
            self._copied = torch.cuda.current_stream(self.phases.device).record_event()

    def tell(self, table: Mapping[str, Metric], next_counts: list[int], stop: bool) -> StepReports:
        """Begin to tell all ranks of this step, and what is next as well. Waits for the device to have done the step,
        not for what it was given behind it; of a late step that is under way no number is known yet, and none told."""
        told: dict[str, Any] = {"stop": stop, "next_counts": next_counts}
        if self.pending is not None or not self.late:
            if self._copied is not None:
                self.parts.mesh.recorder.await_device(self._copied, self.parts.mesh.grid.world_size)
            for name, value in self.measured.items():
                known = value.tolist() if isinstance(value, Tensor) else value
                told[name] = known() if callable(known) else known
        self.reports = StepReports.begin(self.parts.mesh, table, told)
        return self.reports

    def settle(self) -> None:
        """Wait for all ranks' reports of this step, and raise where these say that replicas differ (CorruptionError)
        or, of a step that the optimizer has begun, that its numbers are bad (DivergedError).

        So a step of weights that are wrong is not taken (but for slots that stream, and on a GPU), and the first that
        differs can still be named: later all do.
        """
        reports = self.reports
        if reports is not None and "hashes" in reports.places and (self.late or self.pending is None):
            hashes = reports["hashes"]
            if hashes[0]:  # else it is not their turn
                require_equal_replicas(self.parts, self.number + 1, hashes)
        if self.pending is not None and self.conclude().applied and reports is not None:
            losses = bad_losses(reports["loss"])  # one may be no number although the gradient's norm is one
            if losses:
                raise DivergedError(f"step {self.number + 1}: {losses}, although the gradient is finite; {REMEDY}")

    def conclude(self) -> StepResult:
        """The step's result, for which its norm is waited. Raises where the norm is bad and no smaller loss scale can
        help: CorruptionError where a flipped bit in a replica is the cause, else DivergedError with all that is known.
        """
        if self.result is not None:
            return self.result
        parts, pending, failure = self.parts, self.pending, None
        assert pending is not None, "a step that the optimizer has not begun"
        if self._copied is not None:
            parts.mesh.recorder.await_device(self._copied, parts.mesh.grid.world_size)
        try:
            self.result = parts.optimizer.conclude(pending, float(pending.norm))
            if self.result.applied:
                return self.result
        except DivergedError as error:
            failure = error
        if failure and self.again and not parts.optimizer.streams:
            self.again()
        # A flipped bit may be why a gradient is not finite. Before a step writes its reports have compared the
        # weights, if it was their turn; a late step's weights have been written since. Streamed ones have, too.
        compared = self.reports is not None and len(self.measured["hashes"]) and not self.late
        if parts.config.check.every and not compared and not parts.optimizer.streams:
            require_equal_replicas(parts, self.number + 1, gathered_hashes(parts, parts.strategy.weights))
        if failure:
            losses = all_rows(self.loss.cpu(), parts.mesh.world).tolist()
            raise diagnosed(parts, losses, failure) from failure
        if bad := first_bad(parts, parts.strategy.weights):  # which no smaller loss scale can mend
            raise DivergedError(
                f"step {self.number + 1}: the step overflowed: the weights of {bad} are not finite; {REMEDY}"
            )
        assert self.result is not None
        return self.result
