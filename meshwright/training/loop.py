"""The training loop: one step after another until the last, a stop request, or an error.

step.py computes a step. During a step the loop loads the next batch, and ranks exchange reports: of this step on a CPU,
of the previous step on a GPU (record.py). Validation and checkpoints, between two steps, therefore flush first.
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
"""The metrics of a step, by their names in metrics.jsonl."""


@torch.no_grad()
def validate(parts: Parts, held_out: Samples, num_batches: int) -> dict[str, float]:
    """Measure the mean loss over the first `num_batches` global batches of a split, and the first label's accuracy.

    If the model has several losses, the sum of their means is returned.
    """
    config, mesh, model, names = parts.config, parts.mesh, parts.model, parts.model.labels
    model.eval()
    # By label: summed loss, valid elements, correctly predicted elements.
    sums = torch.zeros(3, len(names), dtype=torch.float64, device=mesh.device)
    mine, head = mesh.index(*DATA_AXES) * config.replica_batch, parts.pipeline.stages[-1]

    def add(h: Tensor, batch: Batch) -> None:
        for portion, (rows,) in parts.portions.of(batch, (h,)) if parts.portions is not None else [(batch, (h,))]:
            with head.autocast():
                losses = [model.loss(rows, portion, {label: float(label == name) for label in names}) for name in names]
                right = model.num_correct(rows, portion)
            if parts.portions is not None:
                losses = [rounded_loss(loss, SUMMED_LOSS) for loss in losses]
            if model.chunk.last:  # other stages have at most a part of the head, and the same numbers
                valid = [(portion[name] != IGNORED).sum() for name in names]  # added on the device, without a wait
                sums.add_(torch.stack([torch.stack(numbers).double() for numbers in (losses, valid, right)]))

    with parts.strategy.whole_weights():
        for index in range(num_batches):
            rows = held_out.held_out(index * config.batch.global_ + mine, config.replica_batch)
            parts.pipeline.evaluate(parts.microbatches(to_device(rows, mesh.device)), add)
    # Sums and counts are reduced, then divided once: a mean of ranks' means would weigh unequal counts equally.
    mesh.comm(*config.layout.batch_axes, PIPE).all_reduce(sums)
    losses, counts, right = sums
    loss, accuracy = torch.stack(((losses / counts).sum(), right[0] / counts[0])).cpu().tolist()
    return {"validation_loss": loss, "validation_accuracy": accuracy}


class Trainer:
    """A rank's steps over a stream of batches. `step`: number of steps begun."""

    def __init__(
        self, parts: Parts, train: Samples, *, step: int = 0, samples: int = 0, late: bool | None = None
    ) -> None:
        """Load the batch at the data cursor `samples`. `late`: read a step's numbers a step later (default: GPU)."""
        self.parts = parts
        self.train = train
        self.step = step
        mesh = parts.mesh
        self._late = mesh.device.type == "cuda" if late is None else late
        self._last: StepRecord | None = None
        """The step begun last."""
        self._unread: StepRecord | None = None
        """The step with unread numbers."""
        self._table = all_metrics()
        self._clock = RankClock(mesh.device, mesh.recorder)
        self._stragglers = StragglerWatch(mesh.grid)
        self._sent: dict[str, int] = {}
        self._work = work_of(parts.config, mesh.device)
        self._read_seconds = 0.0
        """Time of reading the last line's numbers."""
        self._before: Moment | None = None
        """End of the previous step on a GPU; None after `flush`, since other work may follow that step."""
        first = self._load(samples)
        counts = torch.tensor(first.counts, dtype=torch.float64)
        mesh.comm(*parts.config.layout.data.token_axes).all_reduce(counts)
        self.batch = replace(first, counts=[int(count) for count in counts])
        """The next step's batch; `batch.samples` is the data cursor: the number of samples that the run trained on."""

    def turn(self, stop: StopRequest | None, observe: Callable[[], None] | None = None) -> tuple[list[StepLine], bool]:
        """Make one step; return the known steps' metrics (complete on rank 0), and whether any rank asks to stop.

        On a CPU the metrics are this step's. On a GPU they are the previous step's, and `flush` returns this step's.
        `observe` is called when the slots hold the whole gradient, before clipping and the update.
        """
        mesh, batch, late, unread = self.parts.mesh, self.batch, self._late, self._unread
        # Late: this step sends the report of the previous step, since the device has written that step's numbers.
        following, told = batch, unread

        def beside(record: StepRecord) -> Callable[[], None]:
            nonlocal following, told
            following = self._load(batch.samples + self.parts.config.batch.global_)
            before, self._sent = self._sent, mesh.ledger.sent_bytes()
            sent = tuple(self._sent.get(axes, 0) - before.get(axes, 0) for axes in mesh.grid.axis_sets)
            record.lap = Lap(*self._clock.lap(), sent)  # since the last step's lap
            record.again = partial(self._again, batch.counts, batch.samples) if late else None
            record.measured = {
                name: metric.measure(record) for name, metric in self._table.items() if callable(metric.measure)
            }
            told = told or record  # the step that the host knows without a wait
            told.tell(self._table, following.counts, stop is not None and stop.requested)
            return told.settle

        mesh.recorder.step = self.step + 1
        self._last = record = begin_step(self.parts, batch, self.step, beside, observe=observe, late=late)
        assert told is not None
        assert told.reports is not None
        self._unread = record if late else None
        counts = told.reports["next_counts"]  # of each label's valid elements: all replicas' sum is a batch's
        replicas = (counts[rank] for rank in mesh.grid.group(mesh.rank, *DATA_AXES))
        self.batch = replace(following, counts=[sum(column) for column in zip(*replicas, strict=True)])
        self.step += 1
        if (every := self.parts.config.memory.empty_cache_every) and self.step % every == 0:
            release_free_memory(mesh.device)
        done = unread if late else record
        return [] if done is None else [self._line(done, told.reports)], bool(told.reports.reduced("stop"))

    def flush(self) -> list[StepLine]:
        """Wait for the device, and return the line of the step with unread numbers. Collective over the world."""
        record, self._unread = self._unread, None
        if record is None:
            return []
        reports = record.tell(self._table, [0 for _ in self.batch.counts], False)
        record.settle()
        line = self._line(record, reports)
        self._before = None
        return [line]

    def _again(self, counts: list[int], samples: int) -> None:
        """Recompute a skipped step's gradients for diagnosis; the originals were cleared or are the next step's."""
        publish(self.parts)
        replica_backward(self.parts, self._load(samples).rows, counts, samples)
        self.parts.strategy.finish()

    def require_good_state(self) -> None:
        """Raise DivergedError unless a checkpoint's tensors are finite, CorruptionError unless replicas are equal."""
        parts, config = self.parts, self.parts.config
        if self.step == config.steps and parts.optimizer.steps_taken == 0:
            raise DivergedError(f"step {self.step}: every step overflowed and was skipped; {REMEDY}")
        require_finite_weights(parts, self.step)
        if config.check.every:
            require_equal_replicas(parts, self.step, gathered_hashes(parts, saved(parts)))

    @property
    def spans(self) -> list[Span]:
        """Return the times of this rank's tasks in the last step, and of the phases after the tasks."""
        assert self._last is not None, "no step was made"
        return [*self.parts.pipeline.spans, *self._last.phases.spans(self.parts.mesh.index(PIPE))]

    def _load(self, samples: int) -> ReplicaBatch:
        """Load this replica's rows of the batch that begins at a sample, with the counts of these rows' labels only."""
        self.parts.mesh.recorder.enter("data")
        rows = self.parts.strategy.share(
            lambda first, count: self.train.samples(samples + first, count), self.parts.config.replica_batch
        )
        return ReplicaBatch(to_device(rows, self.parts.mesh.device), counts_of(rows, self.parts.model.labels), samples)

    def _line(self, record: StepRecord, reports: StepReports) -> StepLine:
        """Return the metrics of a concluded step, from all ranks' reports."""
        result, mesh = record.conclude(), self.parts.mesh
        line: StepLine = {
            "step": record.number + 1, "loss": reports.reduced("loss"), "learning_rate": result.learning_rate,
            "grad_norm": result.gradient_norm, "loss_scale": record.loss_scale, "applied": result.applied,
            "phase_seconds": record.phases.seconds(),
        }  # fmt: skip
        if record.late:
            # Device times: the host's do not separate steps, since a flush waits for two steps at once.
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
