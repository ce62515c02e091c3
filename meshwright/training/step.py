"""A step: the global batch forward and backward, the gradients' sums, the optimizer, publishing.

    for batch in batches:
        result = train_step(parts, batch)  # on every rank, with the same global batch

The training loop (loop.py) takes the same step and loads, reports and checks beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshwright.model import Batch, counts_of, rows_of, scales_of, to_device
from meshwright.optim.optimizer import StepResult
from meshwright.parameters.shard import seed_of
from meshwright.parts import Parts
from meshwright.ranks.grid import DATA_AXES, PIPE


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
    loss = backward(parts, batch, number)
    arrivals: Iterable[int] = parts.strategy.arrivals()
    whole_loss = parts.mesh.world.all_reduce(loss, wait=False)  # behind the last bucket, as on every rank
    if observe is not None:
        arrivals = list(arrivals)  # all are there
        observe()
    result = parts.optimizer.step(number, arrivals)
    publish(parts, wait=wait)
    whole_loss.wait()
    return TrainStep(result.gradient_norm, result.learning_rate, result.applied, float(loss))


def backward(parts: Parts, batch: Batch, step: int = 0) -> Tensor:
    """The forward and backward passes of a step on a global batch; this rank's share of its mean loss, a scalar.

    The gradients' sums are under way then: `parts.strategy.arrivals` or `finish` waits for them.
    """
    config = parts.config

    def load(first: int, count: int) -> Batch:
        return rows_of(batch, slice(first, first + count))

    rows = to_device(parts.strategy.share(load, config.replica_batch), parts.mesh.device)
    counts = counts_of(batch, parts.model.labels)
    return replica_backward(parts, rows, counts, step * config.batch.global_)


def replica_backward(parts: Parts, rows: Batch, counts: list[int], samples: int) -> Tensor:
    """Run a replica's rows forward and backward; returns this rank's share of the mean loss, a float64 scalar on its
    device.

    `counts`: how many elements of each label are valid in the global batch. `samples`: how many the run has seen, of
    which dropout's random numbers are made.
    """
    config, mesh = parts.config, parts.mesh
    parts.model.train()
    scale = parts.optimizer.scaler.scale
    scales = scales_of(parts.model.labels, counts, scale, config.batch.global_)
    split = (DATA_AXES, (PIPE,), *((axis,) for axis in (*config.layout.context.token_axes, *parts.kit.split_axes)))
    place = "/".join(str(mesh.index(*axes)) for axes in split)

    if parts.grains is not None and parts.optimizer.fixed is not None:
        parts.optimizer.fixed.begin(scale)
        parts.grains.begin_step(samples + mesh.index(*DATA_AXES) * config.replica_batch, scale)

    def seed(index: int, chunk: int) -> None:
        own = f"/{chunk}" if chunk else ""
        torch.manual_seed(seed_of(f"{config.seed}/dropout/{samples}/{index}/{place}{own}"))

    loss = parts.pipeline.train(parts.microbatches(rows), scales, seed) / scale
    # A replica's ranks hold the same loss, but for its stages, of which only the last has one: it is counted once.
    copies = (axis for axis in mesh.grid.names if axis not in (PIPE, *config.layout.batch_axes))
    return loss if mesh.index(*copies) == 0 else torch.zeros_like(loss)


def publish(parts: Parts, *, wait: bool = True) -> None:
    """End a step: every rank gets the stepped weights (Strategy.publish), and gradients are cleared."""
    parts.strategy.publish(wait=wait)
    parts.kit.end_step()
