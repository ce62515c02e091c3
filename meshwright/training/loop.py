"""The training loop: one step after another until the last, a stop request, or an error.

A step: backward passes of this replica's microbatches, one step report, the optimizer as gradients arrive, publishing.
A GPU's numbers are read a step late (record.py): what comes between two steps (validation, a checkpoint) flushes first.

`validate` measures the held-out split: the mean loss, and how often the likeliest answer is right.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from meshwright.bits.fixed import rounded_loss
from meshwright.errors import DivergedError
from meshwright.launch.signals import StopRequest
from meshwright.model import Batch, Samples, counts_of, to_device
from meshwright.optim.optimizer import StepResult
from meshwright.parts import Parts
from meshwright.pipeline.span import Span
from meshwright.ranks.agreement import all_rows
from meshwright.ranks.grid import DATA_AXES, PIPE
from meshwright.tensor.experts import dropped_pairs
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
from meshwright.training.record import StepRecord
from meshwright.training.step import publish, replica_backward
from meshwright.training.step_report import RankClock, StepReport, StepReports, StragglerWatch

StepLine = dict[str, object]
"""The metrics of a step, as metrics.jsonl has them."""


SUMMED_LOSS = 2.0**12
"""The scale of a loss that is summed over its elements, whose number divides it at the end: sums stay exact below
2^24."""


@torch.no_grad()
def validate(parts: Parts, held_out: Samples, num_batches: int) -> dict[str, float]:
    """Measure the loss over the first `num_batches` global batches of a split, and the accuracy of the first label.

    The loss of a model of several is the sum of their means.
    """
    config, mesh, model, names = parts.config, parts.mesh, parts.model, parts.model.labels
    model.eval()
    # By label: summed loss, valid elements, correctly predicted elements.
    sums = torch.zeros(3, len(names), dtype=torch.float64, device=mesh.device)
    mine = mesh.index(*DATA_AXES) * config.replica_batch

    def add(h: Tensor, batch: Batch) -> None:
        with parts.pipeline.stages[-1].autocast():
            losses = [model.loss(h, batch, {other: float(other == name) for other in names}) for name in names]
            right = model.num_correct(h, batch)
        if parts.grains is not None:
            losses = [rounded_loss(loss, SUMMED_LOSS) for loss in losses]
        numbers = [[float(loss) for loss in losses], counts_of(batch, names), right]
        sums.add_(torch.tensor(numbers, device=h.device, dtype=torch.float64))

    def add_grains(h: Tensor, batch: Batch) -> None:
        for grain, (rows,) in parts.grains.of(batch, (h,)) if parts.grains is not None else [(batch, (h,))]:
            add(rows, grain)

    with parts.strategy.whole_weights():
        for index in range(num_batches):
            rows = held_out.held_out(index * config.batch.global_ + mine, config.replica_batch)
            parts.pipeline.evaluate(parts.microbatches(to_device(rows, mesh.device)), add_grains)
    mesh.comm(*config.layout.batch_axes, PIPE).all_reduce(sums)
    losses, counts, right = sums
    return {"validation_loss": float((losses / counts).sum()), "validation_accuracy": float(right[0] / counts[0])}


class Trainer:
    """Steps of a rank's parts on a stream of batches. `step` counts steps begun, `samples` is the data cursor."""

    def __init__(
        self, parts: Parts, train: Samples, *, step: int = 0, samples: int = 0, late: bool | None = None
    ) -> None:
        """`late`: a step's numbers are read in the step after (record.py); by default on GPUs."""
        self.parts = parts
        self.train = train
        self.step = step
        self.samples = samples
        device, recorder = parts.mesh.device, parts.mesh.recorder
        self.phases = PhaseClock(device, recorder)
        self._late = device.type == "cuda" if late is None else late
        self._pending: StepRecord | None = None
        """The step whose numbers have not been read."""
        self._clock = RankClock(device, recorder)
        self._stragglers = StragglerWatch(parts.mesh.grid)
        self._sent: dict[str, int] = {}
        self._work = work_of(parts.config, device)
        self._read_seconds = 0.0
        """When the last line's numbers were there."""
        self._batch, mine = self._load(samples)
        """The replica's rows of the next step's batch."""
        counts = torch.tensor(mine, dtype=torch.float64)
        parts.mesh.comm(*parts.config.layout.data.token_axes).all_reduce(counts)
        self._counts = [int(count) for count in counts]
        """How many elements of each label are valid in its global batch."""

    def turn(self, stop: StopRequest | None, observe: Callable[[], None] | None = None) -> tuple[list[StepLine], bool]:
        """Make one step; returns the metrics that are there (all of them on rank 0), a step's each, and whether some
        rank has asked to stop.

        On a CPU they are this step's; on a GPU those of the step before, and `flush` has this one's. `observe` is
        called when the slots hold the whole gradient, before it is clipped and applied.
        """
        started = time.perf_counter()
        parts, late = self.parts, self._late
        parts.mesh.recorder.step = self.step + 1
        phases = self.phases = PhaseClock(parts.mesh.device, parts.mesh.recorder)
        phases.begin(PIPELINE)
        loss = replica_backward(parts, self._batch, self._counts, self.samples)
        phases.pause()
        following, counts = self._load(self.samples + parts.config.batch.global_)
        phases.begin(DATA_PARALLEL)
        arrivals: Iterable[int] = parts.strategy.arrivals()
        phases.pause()
        check = parts.config.check.every
        record = StepRecord(
            self.step, self.samples, self._counts, parts.optimizer.scaler.scale, started, phases, loss,
            dropped_pairs(parts.model, parts.mesh.device),
            weight_hashes(parts) if check and (self.step + 1) % check == 0 else loss.new_empty(0, dtype=torch.int64),
            parts.pipeline.done, self._facts(),
        )  # fmt: skip
        told = self._pending if late else record
        reports = self._tell(told or record, counts, stop is not None and stop.requested, unread=told is None)
        arrivals = phases.waiting(self._then_reports(arrivals, reports, told))
        if observe is not None:
            arrivals = list(arrivals)  # all are there
            observe()
        phases.begin(OPTIMIZER)
        record.pending = parts.optimizer.begin(self.step, arrivals, late=late)
        if not late:
            self._settle(record, reports)
        publish(parts, wait=False)
        phases.pause()
        self._pending = record if late else None
        if late:
            record.fetch()
            if parts.optimizer.scaler.dynamic:  # the next step's scale depends on this one
                self._conclude(record)
        self._batch, self._counts = following, reports.next_counts(parts.mesh.grid.group(parts.mesh.rank, *DATA_AXES))
        self.samples += parts.config.batch.global_
        self.step += 1
        if (every := parts.config.memory.empty_cache_every) and self.step % every == 0:
            release_free_memory(parts.mesh.device)
        return [] if told is None else [self._line(told, reports)], reports.stop

    def flush(self) -> list[StepLine]:
        """The line of a step whose numbers have not been read: waits for the device. Called by all ranks together."""
        record, self._pending = self._pending, None
        if record is None:
            return []
        reports = self._tell(record, [0 for _ in self._counts], False)
        deque(self._then_reports((), reports, record), maxlen=0)
        return [self._line(record, reports)]

    def _tell(self, record: StepRecord, next_counts: list[int], stop: bool, *, unread: bool = False) -> StepReports:
        """Begin to tell all ranks of a step. `unread`: there is none yet but the one under way, which is not over."""
        if unread:
            return StepReports.begin(self.parts.mesh, replace(record.facts, next_counts=next_counts, stop=stop))
        record.wait()
        return StepReports.begin(self.parts.mesh, record.report(next_counts, stop))

    def _then_reports(self, arrivals: Iterable[int], reports: StepReports, record: StepRecord | None) -> Iterator[int]:
        """Pass on the arrivals, then wait for all ranks' reports of a step. Raises where these say that replicas
        differ or, of a step that is over, that its numbers are bad.

        So a step of weights that are wrong is not taken (but for slots that stream, and on a GPU), and the first that
        differs can still be named: later all do.
        """
        yield from arrivals
        if record is None:
            return
        if reports.num_hashes:
            require_equal_replicas(self.parts, record.number + 1, reports.hashes)
        if record.pending is not None:
            self._settle(record, reports)

    def _settle(self, record: StepRecord, reports: StepReports) -> None:
        """Raise where the numbers of a step that the optimizer has begun are bad. `reports`: all ranks' of it."""
        if self._conclude(record).applied:
            require_finite_loss(record.number + 1, reports.losses)

    def _conclude(self, record: StepRecord) -> StepResult:
        """The step's result. Raises where its norm is bad and no smaller loss scale can help."""
        if record.result is not None:
            return record.result
        parts, step = self.parts, record.number + 1
        record.wait()
        try:
            result = record.conclude(parts.optimizer)
        except DivergedError as error:
            if self._late and not parts.optimizer.streams:
                self._retake(record)
            self._suspect_replicas(record)
            losses = all_rows(record.loss.cpu(), parts.mesh.world).tolist()
            raise diagnosed(parts, losses, error) from error
        if not result.applied:
            self._suspect_replicas(record)
            require_curable(parts, step)
        return result

    def _retake(self, record: StepRecord) -> None:
        """Compute the gradients of a step again, which was skipped: they were cleared, or are the next step's."""
        parts = self.parts
        publish(parts)
        batch, _ = self._load(record.samples)
        replica_backward(parts, batch, list(record.counts), record.samples)
        parts.strategy.finish()

    def require_good_state(self) -> None:
        """Raise DivergedError or CorruptionError unless what a checkpoint holds is finite and alike on replicas."""
        parts, config = self.parts, self.parts.config
        if self.step == config.steps and parts.optimizer.steps_taken == 0:
            raise DivergedError(f"step {self.step}: every step overflowed and was skipped; {REMEDY}")
        require_finite_weights(parts, self.step)
        if config.check.every:
            require_equal_replicas(parts, self.step, gathered(parts, state_hashes(parts)))

    def _suspect_replicas(self, record: StepRecord) -> None:
        """Compare the weights, if the step's reports have not: a flipped bit may be why a gradient is not finite."""
        parts, compared = self.parts, record.hashes.numel() and not self._late
        if parts.config.check.every and not compared and not parts.optimizer.streams:
            require_equal_replicas(parts, record.number + 1, gathered(parts, weight_hashes(parts)))

    @property
    def spans(self) -> list[Span]:
        """This rank's last step: when it did each task, and the phases after them."""
        return [*self.parts.pipeline.spans, *self.phases.spans(self.parts.mesh.index(PIPE))]

    def _load(self, samples: int) -> tuple[Batch, list[int]]:
        """This replica's rows of the batch that begins at a sample, and how many elements of each label are valid."""
        self.parts.mesh.recorder.enter("data")

        def load(first: int, count: int) -> Batch:
            return self.train.samples(samples + first, count)

        batch = self.parts.strategy.share(load, self.parts.config.replica_batch)
        return to_device(batch, self.parts.mesh.device), counts_of(batch, self.parts.model.labels)

    def _facts(self) -> StepReport:
        """The report of the step that is under way, as far as the host knows it."""
        mesh = self.parts.mesh
        before, self._sent = self._sent, mesh.ledger.sent_bytes()
        busy_seconds, own_seconds = self._clock.lap()
        return StepReport(
            loss=0.0, next_counts=[], stop=False, busy_seconds=busy_seconds, pipeline_seconds=0.0, task_seconds=0.0,
            peak_memory_bytes=peak_memory_bytes(mesh.device),
            sent_bytes=tuple(self._sent.get(axes, 0) - before.get(axes, 0) for axes in mesh.grid.axis_sets),
            own_seconds=own_seconds,
        )  # fmt: skip

    def _line(self, record: StepRecord, reports: StepReports) -> StepLine:
        """The metrics of a step that was concluded, of all ranks' reports of it."""
        result, mesh = record.conclude(self.parts.optimizer), self.parts.mesh
        line: StepLine = {
            "step": record.number + 1, "loss": sum(reports.losses), "learning_rate": result.learning_rate,
            "grad_norm": result.gradient_norm, "loss_scale": record.loss_scale, "applied": result.applied,
            "phase_seconds": record.phases.seconds(),
        }  # fmt: skip
        now, since = time.perf_counter(), max(record.started_seconds, self._read_seconds)
        self._read_seconds = now
        if mesh.rank == 0:
            each = reports.each()
            line |= metrics_line(now - since, self._work, each, mesh.grid)
            straggler = self._stragglers.step([report.own_seconds for report in each])
            line["straggler"] = None if straggler is None else asdict(straggler)
        return line
