"""A parallel program as parity steps it on one rank: its modules and weights by the reference's names, and what is
watched while it steps (gradients before the optimizer, how often that steps, its learning rates)."""

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
"""A rank's model; or its stages, with the reference's names inside of them, or by the names that they have there."""


def named_models(model: Model) -> list[tuple[str, nn.Module]]:
    """A rank's modules with the path in the reference that theirs begin with."""
    if isinstance(model, nn.Module):
        return [("", model)]
    return list(model.items()) if isinstance(model, Mapping) else [("", one) for one in model]


def is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile has a part of the model. Hooks would compile each of its modules anew, alone."""
    return any(isinstance(m, OptimizedModule) or m._compiled_call_impl is not None for m in model.modules())


@dataclass
class SteppedProgram:
    """A parallel program as `job.parallel` was told of it. `known`: paths of the reference's modules; `share`: this
    rank's part of a global batch; `gradients`: whether `.grad` has them; `compares_buffers`: whether they are kept;
    `halves`: one step may be taken in two halves of the samples; `given`: gradients that the step has handed to
    `keep_gradients`."""

    model: Model
    known: frozenset[str]
    held: Callable[[], Mapping[str, Tensor]] | None
    loss: Loss
    step: Callable[[Any, Any], Any] | None
    optimizer: torch.optim.Optimizer | None
    scheduler: Any
    share: Callable[[Any], Any]
    gradients: bool
    compares_buffers: bool
    halves: bool
    losses: list[float | None] = field(default_factory=list)
    stepped: list[int] = field(default_factory=list)
    given: dict[str, Tensor] = field(default_factory=dict)

    @property
    def compiled(self) -> bool:
        """Whether torch.compile has a part of the model, or of one of its stages."""
        return any(is_compiled(model) for _, model in named_models(self.model))

    def weights(self) -> dict[str, Tensor]:
        """This rank's weights, by the reference's names where it has these."""
        if self.held is not None:
            return self.by_reference_names(self.held())
        named: dict[str, Tensor] = {}
        for prefix, model in named_models(self.model):
            own = {path_in(prefix, name): x for name, x in model.named_parameters()}
            if doubled := next((name for name in own if name in named and named[name] is not own[name]), None):
                raise ParityError(
                    f"two stages of this rank have a parameter {doubled}: give job.parallel() a mapping from the "
                    "reference's paths to the stages' modules"
                )
            named |= own
        return self.by_reference_names(named)

    def by_reference_names(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tensors under the names that the reference has for them: without the words of wrappers."""
        names = clean_names(list(named), self.known)
        return {names[raw]: x for raw, x in named.items()}

    def take_step(self, recording: StepRecording, number: int, batch: Any, at: str | None) -> None:
        """One step of the program. `at`: the mark of a traced pass, None where it is not traced."""
        parameters, kept = self.weights(), not self.gradients
        times: dict[torch.optim.Optimizer, int] = {}

        def before_optimizer(stepped: torch.optim.Optimizer, *_: Any) -> None:
            nonlocal kept
            if not kept:  # at the first of several optimizers
                keep(recording, "gradient", number, {name: gradient_of(p) for name, p in parameters.items()})
            kept = True
            if stepped not in times:
                rates.update(rates_of(stepped))
            times[stepped] = times.get(stepped, 0) + 1

        rates = set[float]()
        # The program's own step may clear gradients as it ends: they are read as the first of its optimizers begins.
        watch = register_optimizer_step_pre_hook(before_optimizer)
        try:
            value = self._step(recording, number, batch, at)
        finally:
            watch.remove()
        if not kept:
            keep(recording, "gradient", number, {name: gradient_of(p) for name, p in parameters.items()})
        if self.given:
            keep(recording, "gradient", number, self.given)
            self.given.clear()
        # None on ranks without a loss, such as a pipeline's first stage.
        self.losses.append(None if value is None else float(local_of(torch.as_tensor(value))))
        self.stepped.append(max(times.values(), default=0))
        recording.rates.append(sorted(rates))
        # `weights()` again, not `parameters`: wrappers may have put other tensors in their place.
        keep(recording, "weight", number, {n: local_of(p) for n, p in self.weights().items()})
        buffers = {path_in(prefix, name): local_of(x) for prefix, model in named_models(self.model)
                   for name, x in floating_buffers(model).items()}  # fmt: skip
        keep(recording, "buffer", number, self.by_reference_names(buffers) if self.compares_buffers else {})
        keep_states(recording, number, times, parameters)

    def _step(self, recording: StepRecording, number: int, batch: Any, at: str | None) -> Any:
        """The program's own step, or parity's for it; the loss."""
        if self.step is not None:
            with self.traced(recording, at):
                return self.step(self.model, batch)
        assert self.optimizer is not None
        with self.traced(recording, at):
            value = backward_of(self.model, self.loss, [batch])
        halves = chunks_of(batch, 2) if self.halves and number == HALVED_STEP else []
        if halves:
            # In one pass first: what is wrong there is wrong in these samples, and not in adding up.
            whole = {name: gradient_of(p) for name, p in self.weights().items()}
            keep(recording, "whole-gradient", number, whole)
            self.optimizer.zero_grad()
            backward_of(self.model, self.loss, halves)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        return value

    @contextmanager
    def traced(self, recording: StepRecording, at: str | None) -> Iterator[None]:
        """Trace what runs inside under a mark. Compiled modules run as they are written, as each hook would break and
        compile them anew; the steps that are not traced run what is compiled."""
        if at is None:
            yield
            return
        model = self.model if isinstance(self.model, nn.Module) else named_models(self.model)
        recording.traces[at] = Trace(model, self.known)
        with torch.compiler.set_stance("force_eager"), recording.traces[at]:
            yield

    def take_probe(self, recording: StepRecording, batches: Mapping[str, Any]) -> bool:
        """Both passes of a probe, traced, with weights that do not move; False where they do all the same."""
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
        # A step that moves weights without a torch optimizer moves every output: nothing can be said of samples then.
        after = self.weights()
        return all(torch.equal(local_of(after[name]), x) for name, x in before.items())


@contextmanager
def still_optimizers() -> Iterator[None]:
    """Every step of an optimizer inside has the learning rate 0, so that weights stay bit by bit."""
    kept: list[Any] = []

    def stop(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            kept.append((group, group.get("lr")))
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group.get("lr"), Tensor) else 0.0

    def restore(*_: Any) -> None:
        while kept:
            group, rate = kept.pop()
            group["lr"] = rate

    hooks = (register_optimizer_step_pre_hook(stop), register_optimizer_step_post_hook(restore))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def takes_job(step: Callable[..., Any]) -> bool:
    """Whether a step has three places: the model, the batch, and the job."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    places = [p for p in inspect.signature(step).parameters.values() if p.kind in kinds and p.default is p.empty]
    return len(places) == 3
