"""Steps a parallel program on one rank, and records modules, weights and gradients under the reference's names.

Also recorded: gradients before the optimizer's step, the number of steps of an optimizer, learning rates.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import OptimizedModule
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright.parity.batches import HALVED_STEP, Loss, chunks_of
from meshwright.parity.reference import (
    StepRecording,
    backward_of,
    floating_buffers,
    keep,
    keep_states,
    rates_of,
    unmoved,
)
from meshwright.parity.trace import Trace, clean_names, path_in
from meshwright.ranks.dtensor import gradient_of, local_of
from meshwright.ranks.errors import ParityError

Model = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module]
"""A rank's model; or the rank's stages: a list with the reference's names inside, or a mapping by the reference's path.
"""


def named_models(model: Model) -> list[tuple[str, nn.Module]]:
    """Return (path in the reference, module) of each module of a rank."""
    if isinstance(model, nn.Module):
        return [("", model)]
    return list(model.items()) if isinstance(model, Mapping) else [("", module) for module in model]


def is_compiled(model: nn.Module) -> bool:
    """Return True if a part of the model is compiled. Hooks would cause a separate compilation of each module."""
    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules())


@dataclass
class SteppedProgram:
    """A parallel program with the arguments of `job.parallel`."""

    model: Model
    known: frozenset[str]
    """Paths of the reference's modules."""
    held: Callable[[], Mapping[str, Tensor]] | None
    """held(): this rank's weights; None: the model's parameters."""
    loss: Loss
    step: Callable[[Any, Any], Any] | None
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    share: Callable[[Any], Any]
    """share(global_batch): this rank's part."""
    gradients: bool
    """True if `.grad` holds the gradients."""
    compares_buffers: bool
    """True if buffers are recorded."""
    halves: bool
    """True if one step is taken in two halves of the samples."""
    losses: list[float | None] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)
    given: dict[str, Tensor] = field(default_factory=dict)
    """Gradients that the step passed to `keep_gradients`."""

    @property
    def compiled(self) -> bool:
        """True if a part of the model, or of a stage, is compiled."""
        return any(is_compiled(model) for _, model in named_models(self.model))

    def weights(self) -> dict[str, Tensor]:
        """Return this rank's weights, without words of wrappers in the names."""
        if self.held is not None:
            return self.by_reference_names(self.held())
        named: dict[str, Tensor] = {}
        for prefix, model in named_models(self.model):
            stage_weights = {path_in(prefix, name): x for name, x in model.named_parameters()}
            if doubled := next(
                (name for name in stage_weights if name in named and named[name] is not stage_weights[name]), None
            ):
                raise ParityError(
                    f"two stages of this rank have a parameter {doubled}: give job.parallel() a mapping from the "
                    "reference's paths to the stages' modules"
                )
            named |= stage_weights
        return self.by_reference_names(named)

    def by_reference_names(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors under the reference's names: without words of wrappers."""
        names = clean_names(list(named), self.known)
        return {names[raw]: x for raw, x in named.items()}

    def take_step(self, recording: StepRecording, step: int, batch: Any, at: str | None) -> None:
        """Take one step of the program, and record it.

        Args:
            recording: receives the tensors.
            step: number of the step.
            batch: this rank's batch.
            at: the suffix of a traced pass; None: not traced.
        """
        parameters, recorded = self.weights(), not self.gradients
        times: dict[torch.optim.Optimizer, int] = {}

        def before_optimizer(stepped: torch.optim.Optimizer, *_: Any) -> None:
            nonlocal recorded
            if not recorded:  # at the first of several optimizers
                keep(recording, "gradient", step, {name: gradient_of(p) for name, p in parameters.items()})
            recorded = True
            if stepped not in times:
                rates.update(rates_of(stepped))
            times[stepped] = times.get(stepped, 0) + 1

        rates = set[float]()
        # The program's step may clear gradients at the end, so gradients are read before the first optimizer's step.
        watch = register_optimizer_step_pre_hook(before_optimizer)
        try:
            value = self._step(recording, step, batch, at)
        finally:
            watch.remove()
        if not recorded:
            keep(recording, "gradient", step, {name: gradient_of(p) for name, p in parameters.items()})
        if self.given:
            keep(recording, "gradient", step, self.given)
            self.given.clear()
        # None on ranks without a loss, such as a pipeline's first stage.
        self.losses.append(None if value is None else float(local_of(torch.as_tensor(value))))
        self.stepped.append(max(times.values(), default=0))
        recording.rates.append(sorted(rates))
        # `weights()` again, since wrappers may have replaced parameters.
        keep(recording, "weight", step, {n: local_of(p) for n, p in self.weights().items()})
        buffers = {path_in(prefix, name): local_of(x) for prefix, model in named_models(self.model)
                   for name, x in floating_buffers(model).items()}  # fmt: skip
        keep(recording, "buffer", step, self.by_reference_names(buffers) if self.compares_buffers else {})
        keep_states(recording, step, times, parameters)

    def _step(self, recording: StepRecording, step: int, batch: Any, at: str | None) -> Any:
        """Run the program's step, or the default step. Returns the loss."""
        if self.step is not None:
            with self.traced(recording, at):
                return self.step(self.model, batch)
        assert self.optimizer is not None
        with self.traced(recording, at):
            value = backward_of(self.model, self.loss, [batch])
        halves = chunks_of(batch, 2) if self.halves and step == HALVED_STEP else []
        if halves:
            # First in one pass: a mistake in one pass is no mistake of accumulation.
            whole = {name: gradient_of(p) for name, p in self.weights().items()}
            keep(recording, "whole-gradient", step, whole)
            self.optimizer.zero_grad()
            backward_of(self.model, self.loss, halves)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return value

    @contextmanager
    def traced(self, recording: StepRecording, at: str | None) -> Iterator[None]:
        """Trace the passes inside of a context, with a suffix of kinds.

        Compiled modules run uncompiled, since each hook would break the graph and compile again. Steps without a trace
        run the compiled modules.
        """
        if at is None:
            yield
            return
        model = self.model if isinstance(self.model, nn.Module) else named_models(self.model)
        recording.traces[at] = Trace(model, self.known)
        with torch.compiler.set_stance("force_eager"), recording.traces[at]:
            yield

    def take_probe(self, recording: StepRecording, batches: Mapping[str, Any]) -> bool:
        """Trace both passes of a probe with constant weights. Returns False if the weights changed nevertheless."""
        before = {name: local_of(p).clone() for name, p in self.weights().items()}
        for at, batch in batches.items():
            models = [model for _, model in named_models(self.model)]
            with unmoved(*models), self.traced(recording, at):
                if self.step is None:
                    with torch.no_grad():
                        self.loss(self.model, batch)
                else:
                    with still_optimizers():
                        self.step(self.model, batch)
        # A step that changes weights without a torch optimizer changes every output, so the probe proves nothing.
        after = self.weights()
        return all(torch.equal(local_of(after[name]), x) for name, x in before.items())


@contextmanager
def still_optimizers() -> Iterator[None]:
    """Set the learning rate of optimizers to 0 in a context, so that weights keep their bits."""
    rates: list[Any] = []

    def stop(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            rates.append((group, group.get("lr")))
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group.get("lr"), Tensor) else 0.0

    def restore(*_: Any) -> None:
        while rates:
            group, rate = rates.pop()
            group["lr"] = rate

    hooks = (register_optimizer_step_pre_hook(stop), register_optimizer_step_post_hook(restore))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def takes_job(step: Callable[..., Any]) -> bool:
    """Return True if a step has three required positional arguments: model, batch and job."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in inspect.signature(step).parameters.values() if p.kind in kinds and p.default is p.empty]
    return len(places) == 3
