"""The reference: the whole model on one process, stepped by torch, and the changes of its tensors by one rounding.

Tolerances are derived, not tuned. The same steps run twice more, with weights and every module's outputs and gradients
perturbed by one rounding of the type. A right parallel program adds in another order, which changes numbers by about
the same amount. The allowed error is MARGIN times this change, for any precision, model and optimizer.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from meshwright.parity.batches import Loss, ReferenceRecipe, chunks_of
from meshwright.parity.compare import relative_error
from meshwright.parity.parts import is_constant
from meshwright.parity.record import PASSES, PROBES, STATE
from meshwright.parity.trace import Rounding, Trace, all_tensors
from meshwright.ranks.dtensor import local_of
from meshwright.ranks.errors import ParityError

MARGIN = 8.0
"""The allowed error, in units of the change by one rounding. Above 1, since ranks add in another order in several
places, and two perturbed runs are only two draws."""

PERTURBED_RUNS = 2


@dataclass
class StepRecording:
    """Recorded steps of a model."""

    losses: list[float] = field(default_factory=list)
    """By step."""
    norms: list[float] = field(default_factory=list)
    """By step."""
    tensors: dict[tuple[str, int, str], Tensor] = field(default_factory=dict)
    """By (quantity, step from 1, name)."""
    traces: dict[str, Trace] = field(default_factory=dict)
    """By the suffix of the pass."""
    rates: list[list[float]] = field(default_factory=list)
    """By step, the optimizer's learning rates."""


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast a model in place; complex tensors to the complex type of `dtype`.

    `Module.to` would drop imaginary parts, and change Llama's rotary tables. torch has no complex type for bf16:
    complex tensors are then not cast.
    """
    complex_type = {torch.float32: torch.complex64, torch.float64: torch.complex128}.get(dtype)

    def cast(x: Tensor) -> Tensor:
        if x.is_complex():
            return x if complex_type is None else x.to(complex_type)
        return x.to(dtype) if x.is_floating_point() else x

    model._apply(cast)


def spread_constants(model: nn.Module) -> dict[str, float]:
    """Add noise to parameters with constant values (norms, biases), in place. Returns the old values by name.

    A bias of zeros would hide a bias that is added twice, and a norm's weight of ones a weight that is not applied.
    Also, different parts of a constant parameter are equal.
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


def backward_of(model: Any, loss: Loss, batches: Sequence[Any]) -> float:
    """Run the backward passes of some batches, with gradients added up. Returns the mean of the losses."""
    total = 0.0
    for batch in batches:
        # The mean over equal parts is the mean over all. This fails for a loss that is a sum (`may_accumulate`).
        value = loss(model, batch) / len(batches)
        value.backward()
        total += float(local_of(value))
    return total


def may_accumulate(model: nn.Module, recipe: ReferenceRecipe, batch: Any) -> bool:
    """Return True if two halves of a batch give the gradients of the whole batch: true for a mean, false for a sum."""
    halves = chunks_of(batch, 2)
    gradients = [gradient_alone(model, recipe, batches) for batches in ([batch], halves)] if halves else []
    # Statistics that every pass moves (batch norm) would move twice.
    if not all(gradients) or not gradients or len(gradients[0]) != len(gradients[1]) or moves_buffers(model, recipe):
        return False
    whole, added = (torch.cat([x.flatten().double() for x in tensors.values()]) for tensors in gradients)
    eps = torch.finfo(next(iter(gradients[0].values())).dtype).eps
    # Another order of additions gives an error of some roundings, far from the factor 2 of a sum.
    return relative_error(added, whole) < 100 * eps


UNREADABLE = (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError, AssertionError)
"""Errors of a loss function with samples in an unsupported form, such as one rank's share alone."""


def gradient_alone(model: nn.Module, recipe: ReferenceRecipe, batches: Sequence[Any]) -> dict[str, Tensor]:
    """Return the reference's gradient of the mean loss of some batches alone; empty if the loss cannot read these."""
    model = copy.deepcopy(model)
    with without_dropout(model), torch.random.fork_rng(devices=[]):
        try:
            backward_of(model, recipe.loss, batches)
        except UNREADABLE:
            return {}
    return {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}


class Uses(TorchFunctionMode):
    """Mode that gives each use of a parameter a separate view, and keeps the gradient of the view by name and use."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._names = {id(p): name for name, p in parameters.items()}
        self._times: Counter[str] = Counter()
        self.gradients: defaultdict[str, dict[int, Tensor]] = defaultdict(dict)

    def _view(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or id(x) not in self._names or not x.requires_grad:
            return x
        name = self._names[id(x)]
        use = self._times[name]
        self._times[name] += 1
        view = x.view_as(x)

        def keep_gradient(gradient: Tensor) -> None:
            self.gradients[name][use] = gradient.detach()

        view.register_hook(keep_gradient)
        return view

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        # Reading an attribute is no use, except for transposes.
        name = getattr(function, "__name__", "")
        transposes = [vars(torch._C.TensorBase)[attribute].__get__ for attribute in ("T", "mT")]
        writes = name.endswith("_") and not name.endswith("__")
        if torch.is_grad_enabled() and not writes and (name not in ("__get__", "__set__") or function in transposes):
            arguments, keywords = tree_map(self._view, (arguments, keywords))
        return function(*arguments, **(keywords or {}))


def gradients_by_use(model: nn.Module, recipe: ReferenceRecipe) -> dict[str, list[Tensor]]:
    """Return the first step's gradients by use, for parameters that a pass uses more than once: name -> gradients."""
    model = copy.deepcopy(model)
    uses = Uses(dict(model.named_parameters()))
    with without_dropout(model), torch.random.fork_rng(devices=[]):
        try:
            with uses:
                loss = recipe.loss(model, recipe.global_batch(1))
            loss.backward()
        except UNREADABLE:  # a program that depends on the identity of parameters
            return {}
    return {name: [x for _, x in sorted(each.items())] for name, each in uses.gradients.items() if len(each) > 1}


def gradient_of_rounded(model: nn.Module, recipe: ReferenceRecipe, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the first step's gradients with the model's outputs rounded to `dtype`, as in a message."""
    model = copy.deepcopy(model)
    straight = lambda x: x + (x.to(dtype).to(x) - x).detach() if x.is_floating_point() else x  # noqa: E731
    rounded = lambda module, arguments, result: tree_map_only(Tensor, straight, result)  # noqa: E731
    model.register_forward_hook(rounded)
    return gradient_alone(model, recipe, [recipe.global_batch(1)])


def moves_buffers(model: nn.Module, recipe: ReferenceRecipe) -> bool:
    """Return True if a forward pass writes into the model's buffers."""
    copied = copy.deepcopy(model)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        recipe.loss(copied, recipe.global_batch(1))
    return any(not torch.equal(x, y) for x, y in zip(model.buffers(), copied.buffers(), strict=True))


def record(model: nn.Module, recipe: ReferenceRecipe, steps: int, rounding: int | None = None) -> StepRecording:
    """Train a copy of the model for some steps on one process. `rounding`: the seed of a perturbed run."""
    model = copy.deepcopy(model)
    result = StepRecording()
    parameters = dict(model.named_parameters())
    first = copy.deepcopy(model)
    if rounding is not None:
        hooks = Rounding(model, rounding)
        with torch.no_grad():
            for parameter in parameters.values():
                # Weights too, since the rounding of weights is part of the uncertainty of this type.
                parameter.copy_(hooks.rounded(parameter))
    optimizer = recipe.optimizer(list(parameters.values()))
    scheduler = None if recipe.scheduler is None else recipe.scheduler(optimizer)
    for step in range(1, steps + 1):
        # In the second step also record outputs of the first weights, to detect modules with stale weights.
        earlier = first if step == 2 and rounding is None else None
        trace = Trace(model, earlier=earlier)
        with trace if step in PASSES else nullcontext():
            loss = recipe.loss(model, recipe.global_batch(step))
            loss.backward()
        if step in PASSES:
            result.traces[PASSES[step]] = trace
        result.losses.append(float(loss.detach()))
        # Before clipping, to detect a program that does not clip.
        keep(result, "raw-gradient", step, {n: p.grad for n, p in parameters.items()})
        result.norms.append(math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters.values()
                                          if p.grad is not None)))  # fmt: skip
        if recipe.clip is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), recipe.clip)
        keep(result, "gradient", step, {n: p.grad for n, p in parameters.items()})
        result.rates.append(rates_of(optimizer))
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        keep(result, "weight", step, parameters)
        keep(result, "buffer", step, floating_buffers(model))
        keep_states(result, step, [optimizer], parameters)
    if rounding is None:
        for at, batch in zip(PROBES, recipe.probe_batches, strict=False):
            result.traces[at] = Trace(model)
            with unmoved(model), result.traces[at], torch.no_grad():
                recipe.loss(model, batch)
    return result


def rates_of(optimizer: torch.optim.Optimizer) -> list[float]:
    """Return the distinct learning rates of an optimizer's groups, in ascending order."""
    return sorted({float(group["lr"]) for group in optimizer.param_groups if "lr" in group})


def floating_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Return the floating-point buffers of a model: running statistics, tables, a router's corrections."""
    return {name: x for name, x in model.named_buffers() if x.is_floating_point() and x.numel()}


def keep(result: StepRecording, quantity: str, step: int, tensors: Mapping[str, Tensor | None]) -> None:
    """Add copies of named tensors to the recording; None is left out."""
    for name, x in tensors.items():
        if x is not None:
            result.tensors[quantity, step, name] = x.detach().clone()


def states_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, this rank's values) of a parameter's states of the parameter's shape; step counters are left out."""
    for state, x in optimizer.state.get(parameter, {}).items():
        if isinstance(x, Tensor) and x.is_floating_point() and x.shape == parameter.shape:
            yield state, local_of(x)


def keep_states(
    result: StepRecording, step: int, optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, Tensor]
) -> None:
    """Add copies of optimizer states of the parameter's shape (Adam's moments, a momentum) to the recording."""
    for optimizer in optimizers:
        for name, parameter in parameters.items():
            for state, x in states_of(optimizer, parameter):
                keep(result, f"{STATE}{state}", step, {name: x})


def movements(exact: StepRecording, perturbed: Iterable[StepRecording]) -> list[tuple[str, int, str, float]]:
    """Return (quantity, step, name, relative change by one rounding in the 2-norm) of each tensor.

    The change is the largest of the perturbed runs, and at least the median of the quantity. Losses have an empty name.
    """
    moved: dict[tuple[str, int, str], float] = {}
    for run in perturbed:
        pairs = [(key, x, exact.tensors[key]) for key, x in run.tensors.items()]
        pairs += [((quantity, step, name), run.traces[at].tensors[quantity, name, call], x)
                  for step, at in PASSES.items() if at in exact.traces
                  for (quantity, name, call), x in exact.traces[at].tensors.items()
                  if (quantity, name, call) in run.traces[at].tensors]  # fmt: skip
        for key, x, y in pairs:
            if x.shape != y.shape:  # a router assigned rows differently
                continue
            moved[key] = max(moved.get(key, 0.0), relative_error(x, y))
        for step, (a, b) in enumerate(zip(exact.losses, run.losses, strict=True), 1):
            moved["loss", step, ""] = max(moved.get(("loss", step, ""), 0.0), abs(a - b) / (abs(a) or 1.0))
    by_kind: dict[tuple[str, int], list[float]] = {}
    for (quantity, step, _), value in moved.items():
        by_kind.setdefault((quantity, step), []).append(value)
    # A tensor that two draws left unchanged by chance would have no tolerance, so the quantity's median is the minimum.
    medians = {key: sorted(values)[len(values) // 2] for key, values in by_kind.items()}
    return [(*key, max(value, medians[key[:2]])) for key, value in moved.items()]


# Only layers: functional dropout, as in attention, cannot be switched off from outside.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@contextmanager
def without_dropout(*models: nn.Module) -> Iterator[bool]:
    """Switch dropout layers off in a context. Yields True if a layer has a rate above 0."""
    layers = [module for model in models for module in model.modules() if isinstance(module, DROPOUTS)]
    rates = [layer.p for layer in layers]
    for layer in layers:
        layer.p = 0.0
    try:
        yield any(rates)
    finally:
        for layer, rate in zip(layers, rates, strict=True):
            layer.p = rate


@contextmanager
def unmoved(*models: nn.Module) -> Iterator[None]:
    """Restore all state of a pass except parameters after a context: buffers, tensors in attributes of modules, torch's
    and Python's random state. Both passes of a probe then begin with equal state."""
    held = [(tensors, name, x, x.detach().clone()) for model in models for module in model.modules()
            for tensors in (module._buffers, vars(module)) for name, x in tensors.items()
            if isinstance(x, Tensor)]  # fmt: skip
    drawn = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(drawn)
        with torch.no_grad():
            for tensors, name, x, before in held:
                tensors[name] = x  # a pass may have put another tensor in its place
                x.copy_(before)


class NarrowTypes(TorchDispatchMode):
    """Mode that finds the narrowest floating type of results narrower than the operands, e.g. a loss in float32."""

    narrowest: torch.dtype | None = None

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        taken = [x.dtype for x in all_tensors(arguments) if x.is_floating_point()]
        for x in all_tensors(result):
            narrower = bool(taken) and x.is_floating_point() and x.dtype.itemsize < max(t.itemsize for t in taken)
            if narrower and (self.narrowest is None or x.dtype.itemsize < self.narrowest.itemsize):
                self.narrowest = x.dtype
        return result


def check_repeatable(model: nn.Module, recipe: ReferenceRecipe) -> str:
    """Return the narrowest type to which the reference rounds inside, or "".

    Raises:
        ParityError: two passes of the reference differ (it is random), or the loss is not finite.
    """
    losses, narrow = [], NarrowTypes()
    # Other seeds, the same batch: only a random model gives other losses.
    for seed in (1, 2):
        copied = copy.deepcopy(model)  # a pass may move running statistics
        with torch.no_grad(), narrow:
            torch.manual_seed(seed)
            losses.append(float(recipe.loss(copied, recipe.global_batch(1))))
    if not math.isfinite(losses[0]):
        raise ParityError(f"the reference's loss is {losses[0]}: there is nothing to compare")
    if losses[0] != losses[1]:
        raise ParityError(
            f"the reference gives {losses[0]:.9g} and {losses[1]:.9g} on the same batch: it is random, so nothing can "
            "be compared; set its dropout to 0 (layers of nn.Dropout are switched off without you)"
        )
    return "" if narrow.narrowest is None else str(narrow.narrowest).removeprefix("torch.")


def dead_parameters(exact: StepRecording, names: Sequence[str]) -> list[str]:
    """Return the trained parameters with a zero gradient at all steps; a comparison of these proves nothing."""
    steps = range(1, len(exact.losses) + 1)
    return [
        name for name in names
        if not any(("raw-gradient", step, name) in exact.tensors
                   and bool(exact.tensors["raw-gradient", step, name].any()) for step in steps)
    ]  # fmt: skip
