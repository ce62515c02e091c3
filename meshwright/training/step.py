"""A step: the global batch forward and backward, the gradients' sums, the optimizer, publishing.

    for batch in batches:
        result = train_step(parts, batch)  # on every rank, with the same global batch

The training loop (loop.py) takes the same step, `begin_step`, and loads, reports and checks beside it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.compute.model import Batch, counts_of, rows_of, scales_of, to_device
from meshwright.compute.parameters.shard import seed_generators, seed_of
from meshwright.compute.tensor.router import counted_loads
from meshwright.ranks.grid import DATA_AXES, PIPE
from meshwright.strategies.optim.optimizer import StepResult
from meshwright.training.parts import Parts
from meshwright.training.phases import DATA_PARALLEL, OPTIMIZER, PASSES, PhaseClock
from meshwright.training.record import StepRecord

Beside = Callable[[StepRecord], Callable[[], object]]
"""beside(step): what a caller does while a step's last sums travel. Returns what must have been done when they have
come, before the optimizer writes."""


@dataclass(frozen=True)
class ReplicaBatch:
    """A replica's rows of a global batch, on its device. `counts`: how many elements of each label are valid in the
    global batch; `samples`: how many the run has seen before it, of which dropout's random numbers are made."""

    rows: Batch
    counts: list[int]
    samples: int


@dataclass(frozen=True)
class TrainStep(StepResult):
    """A step's result, which all ranks know, with its mean loss over the global batch."""

    loss: float


def train_step(
    parts: Parts,
    batch: Batch,
    step: int | None = None,
    *,
    observe: Callable[[], None] | None = None,
    wait: bool = True,
) -> TrainStep:
    """One step on a global batch, which every rank has. Collective over the world.

    `step`: its number, from 0, for the learning rate and dropout; by default how many were applied before. `observe` is
    called when the slots hold the whole gradient, times the loss scale, before it is clipped and applied. `wait=False`:
    weights that other ranks have stepped arrive under the next forward pass; until then the model's may be old. Raises
    DivergedError where the gradient is not finite and no smaller loss scale can help.
    """
    number = parts.optimizer.steps_taken if step is None else step
    record = begin_step(
        parts, replica_batch(parts, batch, number), number,
        lambda record: parts.mesh.world.all_reduce(record.loss, wait=False).wait,
        observe=observe, wait=wait,
    )  # fmt: skip
    result = record.conclude()
    return TrainStep(result.gradient_norm, result.learning_rate, result.applied, float(record.loss))


def begin_step(
    parts: Parts,
    batch: ReplicaBatch,
    number: int,
    beside: Beside,
    *,
    observe: Callable[[], None] | None = None,
    late: bool = False,
    wait: bool = False,
) -> StepRecord:
    """Give the device the step `number`, from 0: passes, sums, the optimizer, publishing. Returns its record.

    `late`: nothing is waited for that the device computes; what it tells is settled in the step after. Otherwise the
    step is settled when this returns. `observe`, `wait`: as for train_step. Raises as StepRecord.settle.
    """
    strategy, optimizer, started = parts.strategy, parts.optimizer, time.perf_counter()
    phases = PhaseClock(parts.mesh.device, parts.mesh.recorder)
    phases.begin(PASSES)
    # Full buckets leave in the last microbatch's backward pass, as their gradients become whole.
    loss = replica_backward(parts, batch.rows, batch.counts, batch.samples)
    record = StepRecord(parts, number, loss, optimizer.scaler.scale, started, phases, late)
    phases.begin(DATA_PARALLEL)
    arriving = strategy.arrivals()  # the last buckets leave here: what `beside` sends comes behind, on every rank
    phases.begin(None)
    before_write = beside(record)

    def arrivals() -> Iterator[int]:
        yield from arriving
        # All ranks had to come for the last sum, so nobody waits long now. Weights that differ between replicas, or a
        # step before this one that was bad, must be known before this step overwrites what shows it.
        before_write()

    whole: Iterable[int] = phases.waiting(arrivals())
    if observe is not None:
        whole = list(whole)  # else slots that stream would be stepped before the last gradient is there
        observe()
    phases.begin(OPTIMIZER)
    record.pending = optimizer.begin(number, whole, late=late)
    if late:
        record.fetch()
    else:
        record.settle()  # before owners publish: a bad weight that is overwritten could not be named any more
    publish(parts, wait=wait)  # travels under the next forward pass, in which each part waits for its own
    phases.begin(None)
    if late and optimizer.scaler.dynamic:
        record.conclude()  # the next step's loss scale depends on this step's norm
    return record


def replica_batch(parts: Parts, batch: Batch, number: int) -> ReplicaBatch:
    """This rank's rows of a global batch, which every rank has, as the batch of the step `number`."""
    config = parts.config
    share = parts.strategy.share(lambda first, count: rows_of(batch, slice(first, first + count)), config.replica_batch)
    rows = to_device(share, parts.mesh.device)
    return ReplicaBatch(rows, counts_of(batch, parts.model.labels), number * config.batch.global_)


def backward(parts: Parts, batch: Batch, step: int = 0) -> Tensor:
    """The forward and backward passes of a step on a global batch; this rank's share of its mean loss, a scalar.

    The gradients' sums are under way then: `parts.strategy.arrivals` or `finish` waits for them.
    """
    mine = replica_batch(parts, batch, step)
    return replica_backward(parts, mine.rows, mine.counts, mine.samples)


def replica_backward(parts: Parts, rows: Batch, counts: list[int], samples: int) -> Tensor:
    """Run a replica's rows forward and backward; returns this rank's share of the mean loss, a float64 scalar on its
    device. `counts`, `samples`: as in ReplicaBatch."""
    config, mesh = parts.config, parts.mesh
    parts.model.train()
    scale = parts.optimizer.scaler.scale
    # Each loss is divided by the global batch's count: gradients are then only ever summed, and never averaged.
    scales = scales_of(parts.model.labels, counts, scale, config.batch.global_)
    # Ranks that compute the same draw the same dropout, whatever the layout; those that hold other parts draw others.
    split = (DATA_AXES, (PIPE,), *((axis,) for axis in (*config.layout.context.token_axes, *parts.kit.split_axes)))
    place = "/".join(str(mesh.index(*axes)) for axes in split)

    if parts.portions is not None and parts.optimizer.fixed is not None:
        parts.optimizer.fixed.begin(scale)
        parts.portions.begin_step(samples + mesh.index(*DATA_AXES) * config.replica_batch, scale)

    def seed(index: int, chunk: int) -> None:
        own = f"/{chunk}" if chunk else ""
        seed_generators(seed_of(f"{config.seed}/dropout/{samples}/{index}/{place}{own}"), mesh.device)

    microbatches = parts.microbatches(rows)
    if config.model.routing.counts_first:
        with counted_loads(parts.model, mesh, config.batch.global_), parts.strategy.whole_weights():
            parts.pipeline.preview(microbatches, scales, seed)
    loss = parts.pipeline.train(microbatches, scales, seed) / scale
    # A replica's ranks hold the same loss, but for its stages, of which only the last has one: it is counted once.
    copies = (axis for axis in mesh.grid.names if axis not in (PIPE, *config.layout.batch_axes))
    return loss if mesh.index(*copies) == 0 else torch.zeros_like(loss)


def publish(parts: Parts, *, wait: bool = True) -> None:
    """End a step: every rank gets the stepped weights (Synchroniser.publish), and gradients are cleared."""
    parts.strategy.publish(wait=wait)
    parts.kit.kept.clear()
