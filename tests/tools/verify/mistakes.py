"""Mistakes, planted in a rank's process before the rank's parts are built. Each patches one thing only.

Most are in code that also runs on one device, so two runs of the training loop would agree on the mistake.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compute.model import Batch, counts_of
from meshwright.compute.models import attention
from meshwright.compute.parameters.bucket import Bucket, StepWeights
from meshwright.compute.parameters.gradients import Gradients
from meshwright.compute.parameters.role import StepRule
from meshwright.compute.tensor import cross_entropy, serial
from meshwright.compute.tensor.products import Products
from meshwright.families.gpt import model as gpt
from meshwright.ranks.comm import DONE, Comm, Work
from meshwright.strategies.data_parallel import assembly
from meshwright.strategies.data_parallel.policies import AllReduce
from meshwright.strategies.optim import optimizer
from meshwright.strategies.optim.optimizer import Optimizer
from meshwright.strategies.optim.states import InPlace
from meshwright.training import step as step_module
from meshwright.training.parts import Parts
from tests.tools.verify.cases import Plant


def halved_sum() -> None:
    """Halve the gradients' sum, for every number of ranks."""
    right = AllReduce.reduce

    def wrong(self: AllReduce, bucket: Bucket, comm: Comm) -> Work:
        bucket.gradients.mul_(0.5)
        return right(self, bucket, comm)

    AllReduce.reduce = wrong  # type: ignore[method-assign]


def dropped_sum() -> None:
    """Sum on no rank."""
    AllReduce.reduce = lambda self, bucket, comm: DONE  # type: ignore[method-assign]


def one_wrong_element() -> None:
    """Add 1e-9 to one element of a bucket on one rank."""
    right = AllReduce.reduce

    def wrong(self: AllReduce, bucket: Bucket, comm: Comm) -> Work:
        if comm.index == 0 and bucket.rule.decays:
            bucket.gradients[0] += 1e-9
        return right(self, bucket, comm)

    AllReduce.reduce = wrong  # type: ignore[method-assign]


def wrong_norm() -> None:
    """Make the norm that clips a thousandth too large."""
    right = optimizer.norm_of_squares
    optimizer.norm_of_squares = lambda *arguments: right(*arguments) * 1.001  # type: ignore[assignment]


def wrong_clipping() -> None:
    """Divide by a wrong number, with the right norm."""
    right = Optimizer._update

    def wrong(self: Optimizer, rate: float, divisor: Tensor | None = None, skip: Tensor | None = None) -> StepWeights:
        return right(self, rate, None if divisor is None else divisor * 1.01, skip)

    Optimizer._update = wrong  # type: ignore[method-assign]


def decayed_vectors() -> None:
    """Decay biases and norms as well."""
    right = InPlace._step_together

    def wrong(self: InPlace, members: list[int], rule: StepRule, step: StepWeights) -> None:
        right(self, members, replace(rule, decays=True), step)

    InPlace._step_together = wrong  # type: ignore[method-assign]


def late_schedule() -> None:
    """Use the next step's learning rate."""
    right = optimizer.learning_rate
    optimizer.learning_rate = lambda peak, schedule, step, steps: right(peak, schedule, step + 1, steps)


def wrong_rate() -> None:
    """Make the learning rate a millionth too large."""
    right = optimizer.learning_rate
    optimizer.learning_rate = lambda *arguments: right(*arguments) * (1 + 1e-6)


def wrong_bias_correction() -> None:
    """Count one step too many in Adam."""
    right = Optimizer._update

    def wrong(self: Optimizer, *numbers: Any) -> StepWeights:
        self.steps_taken += 1
        update = right(self, *numbers)
        self.steps_taken -= 1
        return update

    Optimizer._update = wrong  # type: ignore[method-assign]


def local_counts() -> None:
    """Take the mean over each replica's labels, and the mean of the means."""
    right = step_module.replica_backward

    def wrong(parts: Parts, rows: Batch, counts: list[int], samples: int) -> Tensor:
        everyone = [count * parts.mesh.size("data") for count in counts_of(rows, parts.model.labels)]
        return right(parts, rows, everyone, samples)

    step_module.replica_backward = wrong


def _microbatches(change: Callable[[list[Batch]], list[Batch]]) -> None:
    right = Parts.microbatches
    Parts.microbatches = lambda self, batch: change(right(self, batch))  # type: ignore[method-assign]


def dropped_microbatch() -> None:
    _microbatches(lambda batches: batches[1:])


def doubled_microbatch() -> None:
    _microbatches(lambda batches: [batches[1], *batches[1:]])


def misplaced_view() -> None:
    """Swap the gradients of two parameters of one shape in the bucket."""
    make = Bucket.__init__

    def wrong(
        self: Bucket, values: Tensor, gradients: Tensor, views: Mapping[nn.Parameter, Tensor], *rest: Any
    ) -> None:
        members = list(views.items())
        for index, ((first, a), (second, b)) in enumerate(pairwise(members)):
            if first.shape == second.shape:
                members[index : index + 2] = [(first, b), (second, a)]
                break
        make(self, values, gradients, dict(members), *rest)

    Bucket.__init__ = wrong  # type: ignore[method-assign]


def doubled_lookup() -> None:
    """Count the embedding's share of the tied table's gradient twice."""
    right = serial.lookup

    def wrong(ids: Tensor, layer: Any, runs: int = 1) -> Tensor:
        rows = right(ids, layer, runs)
        return 2 * rows - rows.detach()

    serial.lookup = wrong


def forgotten_smoothing() -> None:
    """Leave out the targets' part that all classes share in the gradient of the logits; the loss is right."""
    right = cross_entropy._to_gradients

    def wrong(logits: Tensor, targets: Tensor, factors: Tensor, classes: Any, held: int) -> Tensor:
        losses = right(logits, targets, factors, classes, held)
        logits.add_(factors, alpha=classes.smoothing / classes.vocabulary)
        return losses

    cross_entropy._to_gradients = wrong


def lost_bias_gradient() -> None:
    """Make a linear's bias gradient zeros."""
    right = Products.bias_gradients
    Products.bias_gradients = lambda self, dy: right(self, torch.zeros_like(dy))  # type: ignore[method-assign]


def half_sums() -> None:
    """Add up gradients of microbatches in half precision."""
    right = Gradients._accumulated

    def wrong(self: Gradients, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad.copy_(parameter.grad.bfloat16())
        right(self, parameter)

    Gradients._accumulated = wrong  # type: ignore[method-assign]


def wrong_cut() -> None:
    """Reverse the second tensor rank's part of a cut parameter."""
    right = assembly.draw_values

    def wrong(out: Tensor, name: str, spec: Any, mesh: Any, seed: int) -> None:
        right(out, name, spec, mesh, seed)
        if name == "blocks.0.feed_forward.expand.weight" and mesh.index("tensor") == 1:
            out.copy_(out.flip(-1))

    assembly.draw_values = wrong


def dead_block() -> None:
    """Return a block's input."""
    attention.Block.forward = lambda self, h, *others, **tensors: h  # type: ignore[method-assign]


def dead_model() -> None:
    """Make a loss that depends on nothing."""
    right = gpt.GPT.loss
    gpt.GPT.loss = lambda self, *arguments: right(self, *arguments) * 0  # type: ignore[method-assign]


@dataclass(frozen=True)
class Mistake:
    """`seen`: kinds of comparisons that must fail; `unseen`: kinds that cannot. `kind`: the finding's; "": any."""

    plant: Plant
    seen: tuple[str, ...]
    unseen: tuple[str, ...] = ()
    layout: str = "data"
    model: str = "gpt2"
    kind: str = ""


MISTAKES = [
    Mistake(halved_sum, ("norm", "gradient"), ("initial",), kind="scaled"),
    Mistake(halved_sum, ("norm", "gradient"), ("initial",), layout="none", kind="scaled"),
    Mistake(dropped_sum, ("norm", "gradient", "weight")),
    Mistake(one_wrong_element, ("gradient",), ("initial",)),
    Mistake(wrong_norm, ("norm", "weight"), ("initial", "gradient"), kind="clipping"),
    Mistake(wrong_clipping, ("weight",), ("initial", "gradient"), kind="optimizer"),
    Mistake(decayed_vectors, ("weight",), ("initial", "gradient")),
    Mistake(late_schedule, ("weight",), ("initial", "gradient")),
    Mistake(wrong_rate, ("weight",), ("initial", "gradient")),
    Mistake(wrong_bias_correction, ("weight",), ("initial", "gradient")),
    Mistake(local_counts, ("loss", "gradient")),
    Mistake(dropped_microbatch, ("loss", "gradient")),
    Mistake(doubled_microbatch, ("loss", "gradient")),
    Mistake(misplaced_view, ("gradient", "weight"), ("initial",)),
    Mistake(doubled_lookup, ("gradient", "norm"), ("initial",)),
    Mistake(forgotten_smoothing, ("gradient", "norm"), ("initial",), model="transformer"),
    Mistake(lost_bias_gradient, ("gradient", "weight"), ("initial",)),
    Mistake(wrong_cut, ("initial", "loss", "gradient", "weight"), layout="tensor", kind="wrong part"),
]
