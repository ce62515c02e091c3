"""A record of a step that was begun: facts known to the host, and numbers that the device has yet to compute.

A GPU computes a step while the host launches the next. A step's numbers on the device are the loss, the norm, hashes of
replicas and times. After the step they are copied to pinned memory; the host reads the copies in the next step. So the
host waits once a step, when the device already has the next passes to compute. On a CPU a step is done when the call
returns, and the numbers are read at once.

In both cases a step is settled before the next step writes weights: all ranks have exchanged the step's numbers
(`tell`), and `settle` has compared the numbers.
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
    """A rank's record of a step. `number`: from 0. `late`: the device's numbers are read in the next step.

    `loss`: this rank's share, a float64 scalar on the device. `measured`: this rank's numbers, by the names in
    step_report.py's table; tensors are on the device until `fetch`. `reports`: all ranks' numbers.
    `again`: recomputes a late step's gradients, since the originals were cleared or are the next step's.
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
        """Start copies of the device's numbers to the host, done after the step. Does not wait."""
        assert self.pending is not None, "the optimizer comes before its norm"
        tensors = {name: value for name, value in self.measured.items() if isinstance(value, Tensor)}
        self.measured |= {name: value.to("cpu", non_blocking=True) for name, value in tensors.items()}
        self.pending = replace(self.pending, norm=self.pending.norm.to("cpu", non_blocking=True))
        if self.phases.device.type == "cuda":
            self._copied = torch.cuda.current_stream(self.phases.device).record_event()

    def tell(self, table: Mapping[str, Metric], next_counts: list[int], stop: bool) -> StepReports:
        """Start to send this step's numbers, `next_counts` and `stop` to all ranks. Waits until the device has done the
        step, not for later work. For a late step still in progress no measured numbers are known or sent."""
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
        """Wait for all ranks' reports of this step. Raises CorruptionError if replicas differ, DivergedError if the
        optimizer has begun the step and the step's numbers are bad.

        So wrong weights are found before the update, except for streamed slots, and on a GPU. The first parameter that
        differs can then still be named: later all parameters differ.
        """
        reports = self.reports
        if reports is not None and "hashes" in reports.places and (self.late or self.pending is None):
            hashes = reports["hashes"]
            if hashes[0]:  # empty if no comparison is due
                require_equal_replicas(self.parts, self.number + 1, hashes)
        if self.pending is not None and self.conclude().applied and reports is not None:
            losses = bad_losses(reports["loss"])  # may be NaN although the gradient's norm is finite
            if losses:
                raise DivergedError(f"step {self.number + 1}: {losses}, although the gradient is finite; {REMEDY}")

    def conclude(self) -> StepResult:
        """Wait for the gradient's norm, and return the step's result. Raises if the norm is bad and no smaller loss
        scale can help: CorruptionError for a flipped bit in a replica, else DivergedError with all known findings.
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
        # A flipped bit may have made the gradient infinite or NaN. The reports have compared the weights before the
        # update if hashes were due, but a late step's weights have been written since, and streamed weights too.
        compared = self.reports is not None and len(self.measured["hashes"]) and not self.late
        if parts.config.check.every and not compared and not parts.optimizer.streams:
            require_equal_replicas(parts, self.number + 1, gathered_hashes(parts, parts.strategy.weights))
        if failure:
            losses = all_rows(self.loss.cpu(), parts.mesh.world).tolist()
            raise diagnosed(parts, losses, failure) from failure
        if bad := first_bad(parts, parts.strategy.weights):  # a smaller loss scale cannot repair weights
            raise DivergedError(
                f"step {self.number + 1}: the step overflowed: the weights of {bad} are not finite; {REMEDY}"
            )
        assert self.result is not None
        return self.result
