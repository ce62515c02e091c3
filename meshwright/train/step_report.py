"""The step report: the one small collective a step, in which ranks tell each other what all must know.

It leaves when the backward pass is over and is read after the optimizer's step, so that its latency is hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright.comm import Work
from meshwright.mesh import Mesh


@dataclass(frozen=True)
class StepReport:
    """What one rank says: its share of the loss, of the next step's counted labels, and how it fares.

    `pipeline_seconds`: its forward and backward passes, and the waits between them; `task_seconds`: without the waits.
    """

    loss: float
    next_counts: list[int]
    stop: bool
    busy_seconds: float
    pipeline_seconds: float
    task_seconds: float
    peak_memory_bytes: int
    sent_bytes: tuple[int, ...]

    def numbers(self) -> list[float]:
        times = (self.busy_seconds, self.pipeline_seconds, self.task_seconds)
        head = (self.loss, self.stop, *times, self.peak_memory_bytes)
        return [float(number) for number in (*head, *self.next_counts, *self.sent_bytes)]

    @classmethod
    def of(cls, numbers: Sequence[float], num_labels: int) -> StepReport:
        loss, stop, busy, pipeline, tasks, peak, *rest = numbers
        counts, sent = list(map(int, rest[:num_labels])), tuple(map(int, rest[num_labels:]))
        return cls(loss, counts, bool(stop), busy, pipeline, tasks, int(peak), sent)


@dataclass(frozen=True)
class ReportExchange:
    """Every rank's step report, on its way to all. Counts travel as float64: exact to 2^53."""

    everyone: torch.Tensor
    work: Work
    num_labels: int

    @classmethod
    def begin(cls, mesh: Mesh, report: StepReport) -> ReportExchange:
        """Send this rank's report to all others, without waiting for theirs."""
        mine = torch.tensor(report.numbers(), dtype=torch.float64, device=mesh.device)
        everyone = mine.new_empty(mesh.world.size, mine.numel())
        return cls(everyone, mesh.world.all_gather(everyone, mine, wait=False), len(report.next_counts))

    def read(self) -> list[StepReport]:
        """All reports, in rank order."""
        self.work.wait()
        return [StepReport.of(row, self.num_labels) for row in self.everyone.tolist()]
