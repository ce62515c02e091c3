"""The training loop: one step after another until the last, a stop request, or an error.

A step is step.py's. Beside it the next batch is loaded, and ranks tell each other of this step, or on a GPU of the step
before, whose numbers are there (record.py): what comes between two steps (validation, a checkpoint) flushes first.

`validate` measures the held-out split: the mean loss, and how often the likeliest answer is right.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from meshwright.compute.model import IGNORED, Batch, Samples, counts_of, to_device
from meshwright.compute.parameters.fixed import SUMMED_LOSS, rounded_loss
from meshwright.ranks.errors import DivergedError
from meshwright.ranks.grid import DATA_AXES, PIPE
from meshwright.ranks.launch.signals import StopRequest
from meshwright.strategies.pipeline.span import Moment, Span
from meshwright.training.checks import (
    REMEDY,
    gathered_hashes,
    require_equal_replicas,
    require_finite_weights,
    saved,
)
from meshwright.training.metrics import metrics_line, release_free_memory, work_of
from meshwright.training.parts import Parts
from meshwright.training.record import StepRecord
from meshwright.training.step import ReplicaBatch, begin_step, publish, replica_backward
from meshwright.training.step_report import Lap, RankClock, StepReports, StragglerWatch, all_metrics

StepLine = dict[str, object]
"""The metrics of a step, as metrics.jsonl has them."""


@torch.no_grad()
def validate(parts: Parts, held_out: Samples, num_batches: int) -> dict[str, float]:
    """Measure the loss over the first `num_batches` global batches of a split, and the accuracy of the first label.

    The loss of a model of several is the sum of their means.
    """
    config, mesh, model, names = parts.config, parts.mesh, parts.model, parts.model.labels
    model.eval()
    # By label: summed loss, valid elements, correctly predicted elements.
    sums = torch.zeros(3, len(names), dtype=torch.float64, device=mesh.device)
    mine, head = mesh.index(*DATA_AXES) * config.replica_batch, parts.pipeline.stages[-1]

    def add(h: Tensor, batch: Batch) -> None:
        for portion, (rows,) in parts.portions.of(batch, (h,)) if parts.portions is not None else [(batch, (h,))]:
            with head.autocast():
                losses = [model.loss(rows, portion, {other: float(other == name) for other in names}) for name in names]
                right = model.num_correct(rows, portion)
            if parts.portions is not None:
                losses = [rounded_loss(loss, SUMMED_LOSS) for loss in losses]
            if model.chunk.last:  # other stages have a part of the head at most, and the same numbers of it
                valid = [(portion[name] != IGNORED).sum() for name in names]  # added on the device, and not waited for
                sums.add_(torch.stack([torch.stack(numbers).double() for numbers in (losses, valid, right)]))

    with parts.strategy.whole_weights():
        for index in range(num_batches):
            rows = held_out.held_out(index * config.batch.global_ + mine, config.replica_batch)
            parts.pipeline.evaluate(parts.microbatches(to_device(rows, mesh.device)), add)
    # Sums and counts travel, and are divided once: a mean of ranks' means would weigh unequal counts alike.
    mesh.comm(*config.layout.batch_axes, PIPE).all_reduce(sums)
    losses, counts, right = sums
    loss, accuracy = torch.stack(((losses / counts).sum(), right[0] / counts[0])).cpu().tolist()
    return {"validation_loss": loss, "validation_accuracy": accuracy}


class Trainer:
    """Steps of a rank's parts on a stream of batches. `step` counts steps begun."""

    def __init__(
        self, parts: Parts, train: Samples, *, step: int = 0, samples: int = 0, late: bool | None = None
    ) -> None:
        """`samples`: the data cursor. `late`: a step's numbers are read in the step after; by default on GPUs."""
        self.parts = parts
        self.train = train
        self.step = step
        mesh = parts.mesh
        self._late = mesh.device.type == "cuda" if late is None else late
        self._last: StepRecord | None = None
        """The step begun last."""
        self._unread: StepRecord | None = None
        """The step whose numbers have not been read."""
        self._table = all_metrics()
        self._clock = RankClock(mesh.device, mesh.recorder)
        self._stragglers = StragglerWatch(mesh.grid)
        self._sent: dict[str, int] = {}
        self._work = work_of(parts.config, mesh.device)
        self._read_seconds = 0.0
        """When the last line's numbers were there."""
        self._before: Moment | None = None
        """On a GPU the end of the step before; None where something else than a step has come in between."""
        first = self._load(samples)
        counts = torch.tensor(first.counts, dtype=torch.float64)
        mesh.comm(*parts.config.layout.data.token_axes).all_reduce(counts)
        self.batch = replace(first, counts=[int(count) for count in counts])
        """The next step's; its `samples` are the data cursor: how many the run has trained on."""

    def turn(self, stop: StopRequest | None, observe: Callable[[], None] | None = None) -> tuple[list[StepLine], bool]:
        """Make one step; returns the metrics that are there (all of them on rank 0), a step's each, and whether some
        rank has asked to stop.

        On a CPU they are this step's; on a GPU those of the step before, and `flush` has this one's. `observe` is
        called when the slots hold the whole gradient, before it is clipped and applied.
        """
        mesh, batch, late, unread = self.parts.mesh, self.batch, self._late, self._unread
        # Late: what travels in this step is the step before, whose numbers the device has written by now.
        following, told = batch, unread

        def beside(record: StepRecord) -> Callable[[], None]:
            nonlocal following, told
            following = self._load(batch.samples + self.parts.config.batch.global_)
            before, self._sent = self._sent, mesh.ledger.sent_bytes()
            sent = tuple(self._sent.get(axes, 0) - before.get(axes, 0) for axes in mesh.grid.axis_sets)
            record.lap = Lap(*self._clock.lap(), sent)  # since the last step's
            record.again = partial(self._again, batch.counts, batch.samples) if late else None
            record.measured = {
                name: metric.measure(record) for name, metric in self._table.items() if callable(metric.measure)
            }
            told = told or record  # what the host knows without a wait
            told.tell(self._table, following.counts, stop is not None and stop.requested)
            return told.settle

        mesh.recorder.step = self.step + 1
        self._last = record = begin_step(self.parts, batch, self.step, beside, observe=observe, late=late)
        assert told is not None
        assert told.reports is not None
        self._unread = record if late else None
        counts = told.reports["next_counts"]  # of each label's valid elements: those of all replicas make a batch's
        replicas = (counts[rank] for rank in mesh.grid.group(mesh.rank, *DATA_AXES))
        self.batch = replace(following, counts=[sum(column) for column in zip(*replicas, strict=True)])
        self.step += 1
        if (every := self.parts.config.memory.empty_cache_every) and self.step % every == 0:
            release_free_memory(mesh.device)
        done = unread if late else record
        return [] if done is None else [self._line(done, told.reports)], bool(told.reports.reduced("stop"))

    def flush(self) -> list[StepLine]:
        """The line of a step whose numbers have not been read: waits for the device. Called by all ranks together."""
        record, self._unread = self._unread, None
        if record is None:
            return []
        reports = record.tell(self._table, [0 for _ in self.batch.counts], False)
        record.settle()
        line = self._line(record, reports)
        self._before = None
        return [line]

    def _again(self, counts: list[int], samples: int) -> None:
        """Compute the gradients of a step again, which was skipped: they were cleared, or are the next step's."""
        publish(self.parts)
        replica_backward(self.parts, self._load(samples).rows, counts, samples)
        self.parts.strategy.finish()

    def require_good_state(self) -> None:
        """Raise DivergedError or CorruptionError unless what a checkpoint holds is finite and alike on replicas."""
        parts, config = self.parts, self.parts.config
        if self.step == config.steps and parts.optimizer.steps_taken == 0:
            raise DivergedError(f"step {self.step}: every step overflowed and was skipped; {REMEDY}")
        require_finite_weights(parts, self.step)
        if config.check.every:
            require_equal_replicas(parts, self.step, gathered_hashes(parts, saved(parts)))

    @property
    def spans(self) -> list[Span]:
        """This rank's last step: when it did each task, and the phases after them."""
        assert self._last is not None, "no step was made"
        return [*self.parts.pipeline.spans, *self._last.phases.spans(self.parts.mesh.index(PIPE))]

    def _load(self, samples: int) -> ReplicaBatch:
        """This replica's rows of the batch that begins at a sample, with the counts of their own labels alone."""
        self.parts.mesh.recorder.enter("data")
        rows = self.parts.strategy.share(
            lambda first, count: self.train.samples(samples + first, count), self.parts.config.replica_batch
        )
        return ReplicaBatch(to_device(rows, self.parts.mesh.device), counts_of(rows, self.parts.model.labels), samples)

    def _line(self, record: StepRecord, reports: StepReports) -> StepLine:
        """The metrics of a step that was concluded, of all ranks' reports of it."""
        result, mesh = record.conclude(), self.parts.mesh
        line: StepLine = {
            "step": record.number + 1, "loss": reports.reduced("loss"), "learning_rate": result.learning_rate,
            "grad_norm": result.gradient_norm, "loss_scale": record.loss_scale, "applied": result.applied,
            "phase_seconds": record.phases.seconds(),
        }  # fmt: skip
        if record.late:
            # Not by when the host reads: it waits for two steps at once where a line is flushed.
            step_seconds = record.phases.seconds_since(self._before)
            self._before = record.phases.ended
        else:
            now = time.perf_counter()
            step_seconds = now - max(record.started_seconds, self._read_seconds)
            self._read_seconds = now
        if mesh.rank == 0:
            line |= metrics_line(step_seconds, self._work, reports, mesh.grid)
            straggler = self._stragglers.step(reports["own_seconds"])
            line["straggler"] = None if straggler is None else asdict(straggler)
        return line
