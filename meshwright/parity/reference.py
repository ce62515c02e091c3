"""The reference: the whole model on one process, stepped by torch itself, and what one rounding moves of it.

Tolerances are derived, not tuned. The same steps run again, twice, with the weights and every module's output and
gradient moved by one rounding of their type. A right parallel program adds in another order, which moves its numbers
about as much; what it may differ by is MARGIN times that, whatever the precision, the model and the optimizer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.errors import ParityError
from meshwright.parity.compare import relative_error
from meshwright.parity.parts import is_constant
from meshwright.parity.record import STATE
from meshwright.parity.trace import Rounding, Trace
from meshwright.ranks.dtensor import local_of

MARGIN = 8.0
"""How many times the movement of one rounding a right program may differ by: ranks add in another order, in several
places, and the perturbed runs are two draws."""

PERTURBED_RUNS = 2
COMPARED_STEPS = 3
"""Right after one step and wrong after three is what stale weights and a wrong optimizer look like."""

HALVED_STEP = 2
"""The step in which a program that parity steps adds up the gradients of two halves of the samples."""

DROPOUT_STEP = COMPARED_STEPS + 1
"""After the compared steps one more with the models' dropout: replicas must stay equal under it."""

IGNORED_LABEL = -100
"""The label that torch's cross entropy does not count."""

Loss = Callable[[Any, Any], Any]
MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]


@dataclass
class StepRecording:
    """Some steps of a model: `tensors` by (kind, step, name), losses and norms by step from 1."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    tensors: dict[tuple[str, int, str], Tensor] = field(default_factory=dict)
    trace: Trace | None = None


@dataclass(frozen=True)
class ReferenceRecipe:
    """How the reference is trained. `labels`: the key of the global batch whose entries of -100 do not count."""

    loss: Loss
    batch: Callable[[torch.Generator], Any]
    optimizer: MakeOptimizer
    clip: float | None
    labels: Any
    dtype: torch.dtype | None

    def global_batch(self, step: int) -> Any:
        """The batch of a step from 1, on every rank the same. The last step's has unequal numbers of valid labels."""
        generator = torch.Generator().manual_seed(1000 + step)
        with torch.random.fork_rng(devices=[]):
            # For a `batch` that ignores its generator: the same numbers on every rank, in every run.
            torch.manual_seed(2000 + step)
            batch = _cast(self.batch(generator), self.dtype)
        return unequal(batch, self.labels) if step == COMPARED_STEPS else batch


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model in place, and its complex tensors to complex ones: `Module.to` drops their imaginary parts, which
    turns Llama's rotary tables into other ones. torch has no complex type that goes with bf16: there they stay."""
    own = {torch.float32: torch.complex64, torch.float64: torch.complex128}.get(dtype)

    def cast(x: Tensor) -> Tensor:
        if x.is_complex():
            return x if own is None else x.to(own)
        return x.to(dtype) if x.is_floating_point() else x

    model._apply(cast)


def _cast(batch: Any, dtype: torch.dtype | None) -> Any:
    """A batch whose floating tensors have the check's precision."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if dtype is not None and batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {key: _cast(value, dtype) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return type(batch)(_cast(value, dtype) for value in batch)
    return batch


def unequal(batch: Any, labels: Any) -> Any:
    """A batch whose first half of rows keeps a quarter of its labels, and whose last row is padding: ranks then have
    unequal numbers of them."""
    if labels is None:
        return batch
    changed = dict(batch) if isinstance(batch, Mapping) else list(batch)
    x = changed[labels].clone()
    # Rows of the first half go to the first ranks: a mean of means then weighs them wrongly.
    half = x[: max(1, x.shape[0] // 2)]
    if half.ndim > 1:
        half[:, max(1, half.shape[1] // 4) :] = IGNORED_LABEL
    else:
        half[max(1, half.shape[0] // 4) :] = IGNORED_LABEL
    # A row of padding, as the last batch of a data set has; one row at least stays whole.
    if len(x) > len(half) + 1:
        x[-1] = IGNORED_LABEL
    changed[labels] = x
    return changed if isinstance(batch, Mapping) else type(batch)(changed)


def label_key(batch: Any, labels: Any) -> Any:
    """The key of the labels, where the batch has it; None where nothing is known of labels."""
    if isinstance(batch, Mapping):
        return labels if labels in batch else None
    return labels if isinstance(labels, int) and isinstance(batch, (tuple, list)) else None


def spread_constants(model: nn.Module) -> dict[str, float]:
    """Move parameters whose elements are all equal (norms, biases) a little apart, in place; their old values by name.

    A bias of zeros hides a bias that is added twice, a norm's weight of ones one that is not applied; and their parts
    could not be told apart.
    """
    moved = {}
    generator = torch.Generator().manual_seed(77)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_constant(parameter):
                moved[name] = float(parameter.flatten()[0])
                # Drawn in float64 and then rounded, so that every precision gets the same values.
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter)
                parameter.add_(noise, alpha=0.1)
    return moved


def halves_of(batch: Any) -> list[Any]:
    """The first and the second half of the rows of a batch; none where they cannot be halved."""
    halves: list[Any] = []
    for half in (0, 1):
        if isinstance(batch, Tensor):
            # An odd number of rows has no equal halves, and a mean over unequal ones is another number.
            halves += [batch.chunk(2)[half]] if batch.ndim and len(batch) and len(batch) % 2 == 0 else []
        elif isinstance(batch, Mapping) and batch:
            parts = [halves_of(x) for x in batch.values()]
            halves += [dict(zip(batch, (x[half] for x in parts), strict=True))] if all(parts) else []
        elif isinstance(batch, (tuple, list)) and batch:
            parts = [halves_of(x) for x in batch]
            halves += [type(batch)(x[half] for x in parts)] if all(parts) else []
    return halves


def backward_of(model: Any, loss: Loss, batches: Sequence[Any]) -> float:
    """The mean of the losses of some batches; their gradients are added up."""
    total = 0.0
    for batch in batches:
        # The mean over equal parts is the mean over all; a loss that is a sum is not, which `may_accumulate` finds out.
        value = loss(model, batch) / len(batches)
        value.backward()
        total += float(local_of(value))
    return total


def may_accumulate(model: nn.Module, recipe: ReferenceRecipe, batch: Any) -> bool:
    """Whether two halves of a batch give the reference the loss and gradients of the whole: means over equally many do,
    sums do not."""
    gradients = []
    for batches in ([batch], halves_of(batch)):
        copied = copy.deepcopy(model)
        try:
            with without_dropout(copied), torch.random.fork_rng(devices=[]):
                backward_of(copied, recipe.loss, batches)
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError):  # a loss that only reads whole batches
            return False
        gradients.append([p.grad for p in copied.parameters() if p.grad is not None])
    if not batches or len(gradients[0]) != len(gradients[1]):
        return False
    whole, added = (torch.cat([x.flatten().double() for x in tensors]) for tensors in gradients)
    eps = torch.finfo(gradients[0][0].dtype).eps
    # Another order of adding: some roundings, and far from the factor 2 that a sum would be off by.
    return relative_error(added, whole) < 100 * eps


def record(model: nn.Module, recipe: ReferenceRecipe, steps: int, rounding: int | None = None) -> StepRecording:
    """Train a copy of the model for some steps on one process. `rounding`: the seed of a perturbed run."""
    model = copy.deepcopy(model)
    hooks = None if rounding is None else Rounding(model, rounding)
    if hooks is not None:
        with torch.no_grad():
            for parameter in model.parameters():
                # The weights as well: their rounding is what a run in this type cannot know of itself.
                parameter.copy_(hooks.rounded(parameter))
    result = StepRecording()
    parameters = dict(model.named_parameters())
    optimizer = recipe.optimizer(list(parameters.values()))
    for step in range(1, steps + 1):
        trace = Trace(model)
        with trace:
            loss = recipe.loss(model, recipe.global_batch(step))
            loss.backward()
        if step == 1:
            result.trace = trace
        result.losses.append(float(loss.detach()))
        # Before clipping, to know a program that does not clip.
        keep(result, "raw-gradient", step, {n: p.grad for n, p in parameters.items()})
        result.norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters.values()
                                          if p.grad is not None)))  # fmt: skip
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), recipe.clip)
        keep(result, "gradient", step, {n: p.grad for n, p in parameters.items()})
        optimizer.step()
        optimizer.zero_grad()
        keep(result, "weight", step, parameters)
        keep_states(result, step, [optimizer], parameters)
    return result


def keep(result: StepRecording, kind: str, step: int, tensors: Mapping[str, Tensor | None]) -> None:
    """Add copies of named tensors, without those that are None."""
    for name, x in tensors.items():
        if x is not None:
            result.tensors[kind, step, name] = x.detach().clone()


def keep_states(
    result: StepRecording, step: int, optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, Tensor]
) -> None:
    """Add copies of the optimizers' states that have their parameter's shape: Adam's moments, a momentum."""
    for optimizer in optimizers:
        for name, parameter in parameters.items():
            states = optimizer.state.get(parameter, {})
            for kind, x in states.items():
                # Counters of steps are no part of a parameter.
                if isinstance(x, Tensor) and x.is_floating_point() and x.shape == parameter.shape:
                    keep(result, f"{STATE}{kind}", step, {name: local_of(x)})


def gradient_alone(model: nn.Module, recipe: ReferenceRecipe, batch: Any) -> dict[str, Tensor]:
    """The reference's gradient of one rank's part of the batch, as if there were no other; none where the reference's
    loss cannot take that part."""
    model = copy.deepcopy(model)
    with without_dropout(model), torch.random.fork_rng(devices=[]):
        try:
            recipe.loss(model, batch).backward()
        except (RuntimeError, ValueError, IndexError, KeyError, TypeError):  # a form that only the program reads
            return {}
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


def movements(exact: StepRecording, perturbed: Iterable[StepRecording]) -> list[tuple[str, int, str, float]]:
    """How far one rounding moves each tensor, relatively, in the 2-norm, by kind, step and name: at least its kind's
    median. Losses have no name."""
    moved: dict[tuple[str, int, str], float] = {}
    for other in perturbed:
        pairs = [(key, x, exact.tensors[key]) for key, x in other.tensors.items()]
        assert exact.trace is not None
        assert other.trace is not None
        pairs += [((kind, 1, name), x, other.trace.tensors[kind, name, call])
                  for (kind, name, call), x in exact.trace.tensors.items()
                  if (kind, name, call) in other.trace.tensors]  # fmt: skip
        for key, x, y in pairs:
            moved[key] = max(moved.get(key, 0.0), relative_error(x, y))
        for step, (a, b) in enumerate(zip(exact.losses, other.losses, strict=True), 1):
            moved["loss", step, ""] = max(moved.get(("loss", step, ""), 0.0), abs(a - b) / (abs(a) or 1.0))
    by_kind: dict[tuple[str, int], list[float]] = {}
    for (kind, step, _), value in moved.items():
        by_kind.setdefault((kind, step), []).append(value)
    # A tensor that two draws happened to leave alone would have no tolerance at all: its kind's median stands for it.
    medians = {key: sorted(values)[len(values) // 2] for key, values in by_kind.items()}
    return [(*key, max(value, medians[key[:2]])) for key, value in moved.items()]


# Layers alone: functional dropout, as in attention, has no switch that could be thrown from outside.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@contextmanager
def without_dropout(*models: nn.Module) -> Iterator[bool]:
    """Dropout layers drop nothing while the context is entered; whether there are any."""
    layers = [module for model in models for module in model.modules() if isinstance(module, DROPOUTS)]
    rates = [layer.p for layer in layers]
    for layer in layers:
        layer.p = 0.0
    try:
        yield any(rates)
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.p = rate


def check_repeatable(model: nn.Module, recipe: ReferenceRecipe) -> None:
    """Raises ParityError where two passes of the reference differ: what is random cannot be compared."""
    losses = []
    # Other seeds, the same batch: only a random model gives other losses.
    for seed in (1, 2):
        with torch.no_grad():
            torch.manual_seed(seed)
            losses.append(float(recipe.loss(model, recipe.global_batch(1))))
    if losses[0] != losses[1]:
        raise ParityError(
            f"the reference gives {losses[0]:.9g} and {losses[1]:.9g} on the same batch: it is random, so nothing can "
            "be compared; set its dropout to 0 (layers of nn.Dropout are switched off without you)"
        )
    if not math.isfinite(losses[0]):
        raise ParityError(f"the reference's loss is {losses[0]}: there is nothing to compare")


def dead_parameters(exact: StepRecording, names: Sequence[str]) -> list[str]:
    """Parameters of the reference whose gradient is zero everywhere at all steps: comparing them proves nothing."""
    steps = range(1, len(exact.losses) + 1)
    return [
        name for name in names
        if not any(("raw-gradient", step, name) in exact.tensors
                   and bool(exact.tensors["raw-gradient", step, name].any()) for step in steps)
    ]  # fmt: skip
