"""The reference's steps, and what is kept of them for the comparison.

A run that failed makes its first step again, with the outputs of all modules kept: then the first wrong one is known.
The layout's are explained as copies, cuts or partial sums of the reference's, as in any check of `meshwright parity`.
What they may be off by is derived there as well: the reference's step is made again with its weights and all outputs
moved by one rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor

from meshwright.compute.model import Batch
from meshwright.config import Config
from meshwright.parity.record import PASSES
from meshwright.parity.reference import PERTURBED_RUNS, StepRecording, movements
from meshwright.parity.trace import Rounding, Trace
from meshwright.tools.verify.reference import Reference
from meshwright.tools.verify.tolerance import tolerance_of


@dataclass(frozen=True)
class Outcome:
    """Results of some steps. `norms` and `gradients`, of the first step that did not overflow, are unclipped. `states`:
    by kind, the optimizer's of each parameter, after the last step or, where a tolerance is `states_early`, after the
    first that did not overflow."""

    losses: list[float]
    norms: list[float]
    initial: dict[str, Tensor]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    states: dict[str, dict[str, Tensor]]


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # Copies, since the optimizer overwrites these tensors.
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def reference_run(config: Config, batches: Iterable[Batch], steps: int, device: torch.device | None = None) -> Outcome:
    """Train `steps` steps on whole global batches, on the CPU unless on another `device`."""
    assert config.model.dropout == 0, f"dropout {config.model.dropout}: no two programs share its masks"
    reference = Reference(config, device or torch.device("cpu"))
    initial, gradients = _copies(reference.parameters), dict[str, Tensor]()
    states, early = dict[str, dict[str, Tensor]](), tolerance_of(config).states_early
    losses, norms = [], []
    for step, batch in enumerate(islice(batches, steps)):
        losses.append(reference.backward(batch))
        counted = (x for name, x in reference.gradients.items() if name not in reference.nudged)
        norms.append(math.sqrt(sum(float(x.double().square().sum()) for x in counted)))
        if first := not gradients and math.isfinite(norms[-1]):
            gradients = _copies(reference.gradients)
        reference.update(step, norms[-1])
        if first if early else step == steps - 1:
            kinds = {spec.name for spec in config.optimizer.update.states}
            for name, parameter in reference.parameters.items():
                for kind, x in reference.optimizer.state[parameter].items():
                    if kind in kinds:  # torch also counts steps
                        states.setdefault(kind, {})[name] = x.cpu().clone()
    assert len(losses) == steps, f"{len(losses)} batches for {steps} steps"
    return Outcome(losses, norms, initial, gradients, _copies(reference.parameters), states)


def trace_reference(config: Config, batch: Batch, device: torch.device) -> tuple[Trace, dict[str, Any]]:
    """The trace of the reference's first step, all rows at once, and the fields of ReferenceFacts that say of it."""
    # All rows at once, so that a module's output is one tensor, of which layouts hold copies, cuts or sums.
    whole = config.model_copy(update={"batch": config.batch.model_copy(update={"micro": config.batch.global_})})
    exact, *perturbed = (_traced_step(whole, batch, device, seed) for seed in (None, *range(PERTURBED_RUNS)))
    trace = exact.traces[PASSES[1]]
    modules = dict(cast(torch.nn.Module, trace.model).named_modules())
    return trace, {
        "order": trace.order, "consumers": trace.consumers, "moved": movements(exact, perturbed),
        "parents": {name: name.rpartition(".")[0] for name in modules if name},
        "classes": {name: type(module).__name__ for name, module in modules.items()},
    }  # fmt: skip


def _traced_step(config: Config, batch: Batch, device: torch.device, rounding: int | None) -> StepRecording:
    """One forward and backward pass. `rounding`: the seed of a perturbed one."""
    reference, recording = Reference(config, device), StepRecording()
    if rounding is not None:
        # Weights and every output moved by one rounding: what the numbers then differ by, right layouts may differ by.
        hooks = Rounding(reference.model, rounding)
        with torch.no_grad():
            for parameter in reference.parameters.values():
                parameter.copy_(hooks.rounded(parameter))
    recording.traces[PASSES[1]] = Trace(reference.model)
    with recording.traces[PASSES[1]]:
        recording.losses.append(reference.backward(batch))
    return recording
