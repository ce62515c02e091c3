"""A step: the global batch forward and backward, the gradients' sums, the optimizer, publishing.

    for batch in batches:
        result = train_step(parts, batch)  # on every rank, with the same global batch

The training loop (loop.py) calls `begin_step` too, and loads the next batch, reports and checks during the step.
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
"""Hook called after the step's last gradient reductions have started. The hook returns a function, which is called
after these reductions have finished and before the optimizer updates weights."""


@dataclass(frozen=True)
class ReplicaBatch:
    """A replica's rows of a global batch, on the rank's device. `counts`: valid elements of each label in the global
    batch. `samples`: number of samples that the run has seen before this batch; dropout's seeds are made from it."""

    rows: Batch
    counts: list[int]
    samples: int


@dataclass(frozen=True)
class TrainStep(StepResult):
    """A step's result, equal on all ranks, and the mean loss over the global batch."""

    loss: float


def train_step(
    parts: Parts,
    batch: Batch,
    step: int | None = None,
    *,
    observe: Callable[[], None] | None = None,
    wait: bool = True,
) -> TrainStep:
    """Train one step on a global batch, which is equal on every rank. Collective over the world.

    Args:
        step: number from 0, for the learning rate and dropout; default: the number of steps applied before.
        observe: called when the slots hold the whole gradient, times the loss scale, before clipping and the update.
        wait: if False, other ranks' updated weights are received during the next forward pass; some may be old.

    Raises:
        DivergedError: the gradient is not finite and no smaller loss scale can help.
    """
    step_index = parts.optimizer.steps_taken if step is None else step
    record = begin_step(
        parts, replica_batch(parts, batch, step_index), step_index,
        lambda record: parts.mesh.world.all_reduce(record.loss, wait=False).wait,
        observe=observe, wait=wait,
    )  # fmt: skip
    result = record.conclude()
    return TrainStep(result.gradient_norm, result.learning_rate, result.applied, float(record.loss))


def begin_step(
    parts: Parts,
    batch: ReplicaBatch,
    step_index: int,
    beside: Beside,
    *,
    observe: Callable[[], None] | None = None,
    late: bool = False,
    wait: bool = False,
) -> StepRecord:
    """Start the step `step_index`, from 0: passes, gradient sums, the optimizer, publishing. Returns the step's record.

    `late`: the host does not wait for the device's numbers; the next step settles this one. Otherwise the step is
    settled when this function returns. `observe`, `wait`: as in train_step. Raises as StepRecord.settle.
    """
    strategy, optimizer, started = parts.strategy, parts.optimizer, time.perf_counter()
    phases = PhaseClock(parts.mesh.device, parts.mesh.recorder)
    phases.begin(PASSES)
    # A bucket's reduction starts during the last microbatch's backward pass, when the bucket's gradients are complete.
    loss = replica_backward(parts, batch.rows, batch.counts, batch.samples)
    record = StepRecord(parts, step_index, loss, optimizer.scaler.scale, started, phases, late)
    phases.begin(DATA_PARALLEL)
    arriving = strategy.arrivals()  # starts the last reductions: on every rank, sends of `beside` follow
    phases.begin(None)
    before_write = beside(record)

    def arrivals() -> Iterator[int]:
        yield from arriving
        # The last reduction needed every rank, so this wait is short. Weights that differ between replicas, or a bad
        # step before this one, must be found before this step overwrites the evidence.
        before_write()

    whole: Iterable[int] = phases.waiting(arrivals())
    if observe is not None:
        whole = list(whole)  # else streamed slots would be updated before the last gradient is reduced
        observe()
    phases.begin(OPTIMIZER)
    record.pending = optimizer.begin(step_index, whole, late=late)
    if late:
        record.fetch()
    else:
        record.settle()  # before owners publish: an overwritten bad weight could no longer be named
    publish(parts, wait=wait)  # sent during the next forward pass: each part of the model waits for its own
    phases.begin(None)
    if late and optimizer.scaler.dynamic:
        record.conclude()  # the next step's loss scale depends on this step's norm
    return record


def replica_batch(parts: Parts, batch: Batch, step_index: int) -> ReplicaBatch:
    """Select this rank's rows of a global batch, which is equal on every rank; `step_index`: the step, from 0."""
    config = parts.config
    share = parts.strategy.share(lambda first, count: rows_of(batch, slice(first, first + count)), config.replica_batch)
    rows = to_device(share, parts.mesh.device)
    return ReplicaBatch(rows, counts_of(batch, parts.model.labels), step_index * config.batch.global_)


def backward(parts: Parts, batch: Batch, step: int = 0) -> Tensor:
    """Run a step's passes on a global batch; return this rank's share of the mean loss, a scalar.

    The gradient reductions are then still running: `parts.strategy.arrivals` or `finish` waits for the sums.
    """
    mine = replica_batch(parts, batch, step)
    return replica_backward(parts, mine.rows, mine.counts, mine.samples)


def replica_backward(parts: Parts, rows: Batch, counts: list[int], samples: int) -> Tensor:
    """Run a replica's rows forward and backward; return this rank's share of the mean loss, a float64 scalar on the
    rank's device. `counts`, `samples`: as in ReplicaBatch."""
    config, mesh = parts.config, parts.mesh
    parts.model.train()
    scale = parts.optimizer.scaler.scale
    # Each loss is divided by the global batch's count, so gradients are only summed and never averaged.
    scales = scales_of(parts.model.labels, counts, scale, config.batch.global_)
    # In every layout, ranks that compute equal values draw equal dropout, and ranks with other parts draw other masks.
    split = (DATA_AXES, (PIPE,), *((axis,) for axis in (*config.layout.context.token_axes, *parts.kit.split_axes)))
    coordinates = "/".join(str(mesh.index(*axes)) for axes in split)

    if parts.portions is not None and parts.optimizer.fixed is not None:
        parts.optimizer.fixed.begin(scale)
        parts.portions.begin_step(samples + mesh.index(*DATA_AXES) * config.replica_batch, scale)

    def seed(index: int, chunk: int) -> None:
        suffix = f"/{chunk}" if chunk else ""
        seed_generators(seed_of(f"{config.seed}/dropout/{samples}/{index}/{coordinates}{suffix}"), mesh.device)

    microbatches = parts.microbatches(rows)
    if config.model.routing.counts_first:
        with counted_loads(parts.model, mesh, config.batch.global_), parts.strategy.whole_weights():
            parts.pipeline.preview(microbatches, scales, seed)
    loss = parts.pipeline.train(microbatches, scales, seed) / scale
    # Only a replica's last stage has a loss, and ranks along `copies` hold the same loss: one rank returns it.
    copies = (axis for axis in mesh.grid.names if axis not in (PIPE, *config.layout.batch_axes))
    return loss if mesh.index(*copies) == 0 else torch.zeros_like(loss)


def publish(parts: Parts, *, wait: bool = True) -> None:
    """End a step: send the updated weights to every rank (Synchroniser.publish), and clear gradients."""
    parts.strategy.publish(wait=wait)
    parts.kit.kept.clear()
