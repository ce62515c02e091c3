"""The step report: the one small collective a step, in which ranks tell each other what all must know.

It leaves when the backward pass is over, and is read when the last gradient is summed, for which all had to come:
nobody waits for it, and the optimizer has not written yet when it says that a rank's weights are wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from meshwright.comm import Work
from meshwright.mesh import Mesh


@dataclass(frozen=True)
class StepReport:
    """What one rank says: its share of the loss, of the next step's counted labels, and how it fares.

    `pipeline_seconds`: its forward and backward passes, and the waits between them; `task_seconds`: without the waits.
    `own_seconds`: since its last report, without its waits for others.
    `hashes`: of the weights that it shares with others (replicas.py), in the steps in which they are compared.
    """

    loss: float
    next_counts: list[int]
    stop: bool
    busy_seconds: float
    pipeline_seconds: float
    task_seconds: float
    peak_memory_bytes: int
    sent_bytes: tuple[int, ...]
    hashes: tuple[int, ...] = ()
    own_seconds: float = 0.0

    def numbers(self) -> list[float]:
        times = (self.busy_seconds, self.pipeline_seconds, self.task_seconds, self.own_seconds)
        head = (self.loss, self.stop, *times, self.peak_memory_bytes)
        return [float(number) for number in (*head, *self.next_counts, *self.sent_bytes)]

    @classmethod
    def of(cls, numbers: Sequence[float], num_labels: int) -> StepReport:
        loss, stop, busy, pipeline, tasks, own, peak, *rest = numbers
        counts, sent = list(map(int, rest[:num_labels])), tuple(map(int, rest[num_labels:]))
        return cls(loss, counts, bool(stop), busy, pipeline, tasks, int(peak), sent, own_seconds=own)


@dataclass(frozen=True)
class ReportExchange:
    """Every rank's step report, on its way to all: numbers as float64, counts exact to 2^53; then hashes, as int64."""

    everyone: torch.Tensor
    work: Work
    num_labels: int
    num_hashes: int

    @classmethod
    def begin(cls, mesh: Mesh, report: StepReport) -> ReportExchange:
        """Send this rank's report to all others, without waiting for theirs."""
        numbers = torch.tensor(report.numbers(), dtype=torch.float64)
        hashes = torch.tensor(report.hashes, dtype=torch.int64)
        mine = torch.cat([numbers.view(torch.int64), hashes]).to(mesh.device)
        everyone = mine.new_empty(mesh.world.size, mine.numel())
        work = mesh.world.all_gather(everyone, mine, wait=False)
        return cls(everyone, work, len(report.next_counts), len(report.hashes))

    def read(self) -> list[StepReport]:
        """All reports, in rank order."""
        self.work.wait()
        everyone = self.everyone.cpu()
        split = everyone.shape[1] - self.num_hashes
        numbers, hashes = everyone[:, :split].contiguous().view(torch.float64).tolist(), everyone[:, split:].tolist()
        return [
            replace(StepReport.of(row, self.num_labels), hashes=tuple(its_hashes))
            for row, its_hashes in zip(numbers, hashes, strict=True)
        ]
