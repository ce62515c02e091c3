"""The training loop: one step after another until the last, a stop request, or an error.

A step: backward passes of this replica's microbatches, one step report, the optimizer as gradients arrive, publishing.

`validate` measures the held-out split: the mean loss, and how often the likeliest answer is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict

import torch
from torch import Tensor

from meshwright.errors import DivergedError
from meshwright.launch.signals import StopRequest
from meshwright.model import Batch, Samples, counts_of, to_device
from meshwright.optim.optimizer import StepResult
from meshwright.parts import Parts
from meshwright.pipeline.span import Span
from meshwright.ranks.grid import PIPE
from meshwright.training.checks import (
    REMEDY,
    diagnosed,
    gathered,
    require_curable,
    require_equal_replicas,
    require_finite_loss,
    require_finite_weights,
    state_hashes,
    weight_hashes,
)
from meshwright.training.metrics import metrics_line, peak_memory_bytes, release_free_memory, work_of
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PIPELINE, PhaseClock
from meshwright.training.step import publish, replica_backward
from meshwright.training.step_report import RankClock, StepReport, StepReports, StragglerWatch


@torch.no_grad()
def validate(parts: Parts, held_out: Samples, num_batches: int) -> dict[str, float]:
    """Measure the loss over the first `num_batches` global batches of a split, and the accuracy of the first label.

    The loss of a model of several is the sum of their means.
    """
    config, mesh, model, names = parts.config, parts.mesh, parts.model, parts.model.labels
    model.eval()
    # By label: summed loss, valid elements, correctly predicted elements.
    sums = torch.zeros(3, len(names), dtype=torch.float64, device=mesh.device)
    mine = mesh.index("data") * config.replica_batch

    def add(h: Tensor, batch: Batch) -> None:
        with parts.pipeline.stage.autocast():
            losses = [float(model.loss(h, batch, {other: float(other == name) for other in names})) for name in names]
            right = model.num_correct(h, batch)
        sums.add_(torch.tensor([losses, counts_of(batch, names), right], device=h.device, dtype=torch.float64))

    with parts.strategy.whole_weights():
        for index in range(num_batches):
            rows = held_out.held_out(index * config.batch.global_ + mine, config.replica_batch)
            parts.pipeline.evaluate(parts.microbatches(to_device(rows, mesh.device)), add)
    mesh.comm(*config.layout.batch_axes, PIPE).all_reduce(sums)
    losses, counts, right = sums
    return {"validation_loss": float((losses / counts).sum()), "validation_accuracy": float(right[0] / counts[0])}


class Trainer:
    """Steps of a rank's parts on a stream of batches. `step` counts finished steps, `samples` is the data cursor."""

    def __init__(self, parts: Parts, train: Samples, *, step: int = 0, samples: int = 0) -> None:
        self.parts = parts
        self.train = train
        self.step = step
        self.samples = samples
        self.phases = PhaseClock(parts.mesh.device, parts.mesh.recorder)
        self._clock = RankClock(parts.mesh.device, parts.mesh.recorder)
        self._stragglers = StragglerWatch(parts.mesh.grid)
        self._sent: dict[str, int] = {}
        self._work = work_of(parts.config, parts.mesh.device)
        self._batch = self._load(samples)
        """The replica's rows of the next step's batch."""
        mine = torch.tensor(counts_of(self._batch, parts.model.labels), dtype=torch.float64)
        parts.mesh.comm("data").all_reduce(mine)
        self._counts = [int(count) for count in mine]
        """How many elements of each label are valid in its global batch."""

    def turn(
        self, stop: StopRequest | None, observe: Callable[[], None] | None = None
    ) -> tuple[dict[str, object], bool]:
        """Make one step; returns its metrics (all of them on rank 0), and whether some rank has asked to stop.

        `observe` is called when the slots hold the whole gradient, before it is clipped and applied.
        """
        started = time.perf_counter()
        parts = self.parts
        scale = parts.optimizer.scaler.scale
        parts.mesh.recorder.step = self.step + 1
        phases = self.phases = PhaseClock(parts.mesh.device, parts.mesh.recorder)
        phases.begin(PIPELINE)
        loss = replica_backward(parts, self._batch, self._counts, self.samples)
        phases.pause()
        self.samples += parts.config.batch.global_
        following = self._load(self.samples)
        phases.begin(DATA_PARALLEL)
        arrivals: Iterable[int] = parts.strategy.arrivals()
        phases.pause()
        reports = StepReports.begin(parts.mesh, self._report(loss, following, stop))
        arrivals = phases.waiting(self._then_reports(arrivals, reports))
        if observe is not None:
            arrivals = list(arrivals)  # all are there
            observe()
        phases.begin(OPTIMIZER)
        result = self._apply(arrivals, reports)
        phases.pause()
        self._batch = following
        self._counts = reports.next_counts(parts.mesh.grid.group(parts.mesh.rank, "data"))
        self.step += 1
        every = parts.config.memory.empty_cache_every
        if every and self.step % every == 0:
            release_free_memory(parts.mesh.device)
        line: dict[str, object] = {
            "step": self.step, "loss": sum(reports.losses), "learning_rate": result.learning_rate,
            "grad_norm": result.gradient_norm, "loss_scale": scale, "applied": result.applied,
            "phase_seconds": phases.seconds(),
        }  # fmt: skip
        if parts.mesh.rank == 0:
            each = reports.each()
            line |= metrics_line(time.perf_counter() - started, self._work, each, parts.mesh.grid)
            straggler = self._stragglers.step([report.own_seconds for report in each])
            line["straggler"] = None if straggler is None else asdict(straggler)
        return line, reports.stop

    def _then_reports(self, arrivals: Iterable[int], reports: StepReports) -> Iterator[int]:
        """Pass on the arrivals, then wait for all ranks' reports. Raises where these say that replicas differ.

        So a step of weights that are wrong is not taken (but for slots that stream), and the first that differs can
        still be named: later all do.
        """
        yield from arrivals
        if reports.num_hashes:
            require_equal_replicas(self.parts, self.step + 1, reports.hashes)

    def _apply(self, arrivals: Iterable[int], reports: StepReports) -> StepResult:
        """Take the optimizer's step, and publish it. Raises where the step's numbers are bad."""
        parts, step = self.parts, self.step + 1
        try:
            result = parts.optimizer.step(self.step, arrivals)
        except DivergedError as error:
            self._suspect_replicas(reports)
            raise diagnosed(parts, reports.losses, error) from error
        if not result.applied:
            self._suspect_replicas(reports)
            require_curable(parts, step)
        else:
            require_finite_loss(step, reports.losses)
        publish(parts)
        return result

    def require_good_state(self) -> None:
        """Raise DivergedError or CorruptionError unless what a checkpoint holds is finite and alike on replicas."""
        parts, config = self.parts, self.parts.config
        if self.step == config.steps and parts.optimizer.steps_taken == 0:
            raise DivergedError(f"step {self.step}: every step overflowed and was skipped; {REMEDY}")
        require_finite_weights(parts, self.step)
        if config.check.every:
            require_equal_replicas(parts, self.step, gathered(parts, state_hashes(parts)))

    def _suspect_replicas(self, reports: StepReports) -> None:
        """Compare the weights, if this step's reports have not: a flipped bit may be why a gradient is not finite."""
        parts = self.parts
        if parts.config.check.every and not reports.num_hashes and not parts.optimizer.streams:
            require_equal_replicas(parts, self.step + 1, gathered(parts, weight_hashes(parts)))

    @property
    def spans(self) -> list[Span]:
        """This rank's last step: when it did each task, and the phases after them."""
        return [*self.parts.pipeline.spans, *self.phases.spans(self.parts.mesh.index(PIPE))]

    def _load(self, samples: int) -> Batch:
        device = self.parts.mesh.device
        self.parts.mesh.recorder.enter("data")

        def load(first: int, count: int) -> Batch:
            return to_device(self.train.samples(samples + first, count), device)

        return self.parts.strategy.share(load, self.parts.config.replica_batch)

    def _report(self, loss: float, following: Batch, stop: StopRequest | None) -> StepReport:
        mesh, every = self.parts.mesh, self.parts.config.check.every
        before, self._sent = self._sent, mesh.ledger.sent_bytes()
        busy_seconds, own_seconds = self._clock.lap()
        return StepReport(
            loss=loss,
            next_counts=counts_of(following, self.parts.model.labels),
            stop=stop is not None and stop.requested,
            busy_seconds=busy_seconds,
            pipeline_seconds=self.phases.seconds()[PIPELINE],
            task_seconds=sum(span.seconds for span in self.parts.pipeline.spans),
            peak_memory_bytes=peak_memory_bytes(mesh.device),
            sent_bytes=tuple(self._sent.get(axes, 0) - before.get(axes, 0) for axes in mesh.grid.axis_sets),
            own_seconds=own_seconds,
            hashes=tuple(weight_hashes(self.parts)) if every and (self.step + 1) % every == 0 else (),
        )
