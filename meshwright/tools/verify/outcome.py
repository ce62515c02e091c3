"""The reference's steps, and the results that are kept for the comparison.

After a failed comparison the first step runs again with the outputs of all modules recorded, to find the first wrong
module. As in any check of `meshwright parity`, the layout's outputs are explained as copies, cuts or partial sums of
the reference's. The allowed errors are derived as there: the reference's step is repeated with the weights and all
outputs moved by one rounding.
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
from meshwright.compute.models.preferences import REFERENCE, PreferenceChain
from meshwright.config import Config
from meshwright.parity.record import PASSES
from meshwright.parity.reference import PERTURBED_RUNS, StepRecording, movements
from meshwright.parity.trace import Rounding, Trace
from meshwright.tools.verify.reference import Reference
from meshwright.tools.verify.tolerance import tolerance_of


@dataclass(frozen=True)
class Outcome:
    """Results of some steps of the reference."""

    losses: list[float]
    norms: list[float]
    """Gradient norms before clipping."""
    initial: dict[str, Tensor]
    """Weights before the first step."""
    gradients: dict[str, Tensor]
    """Unclipped gradients of the first step that did not overflow; empty if all did."""
    weights: dict[str, Tensor]
    """Weights after the last step."""
    states: dict[str, dict[str, Tensor]]
    """Optimizer states by kind and parameter, after the last step. With a tolerance of `states_early`: after the first
    step that did not overflow."""


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # The optimizer overwrites these tensors.
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def reference_run(config: Config, batches: Iterable[Batch], steps: int, device: torch.device | None = None) -> Outcome:
    """Train `steps` steps on whole global batches. `device`: default: the CPU."""
    assert config.model.dropout == 0, f"dropout {config.model.dropout}: no two programs share its masks"
    reference = Reference(config, device or torch.device("cpu"))
    unmoved = None if config.loss is None else Reference(config, device or torch.device("cpu"))
    initial, gradients = _copies(reference.parameters), dict[str, Tensor]()
    states, early = dict[str, dict[str, Tensor]](), tolerance_of(config).states_early
    losses, norms = [], []
    for step, batch in enumerate(islice(batches, steps)):
        losses.append(reference.backward(batch if unmoved is None else with_first_weights(unmoved, batch)))
        counted = (x for name, x in reference.gradients.items() if name not in reference.nudged)
        norms.append(math.sqrt(sum(float(x.double().square().sum()) for x in counted)))
        if first := not gradients and math.isfinite(norms[-1]):
            gradients = _copies(reference.gradients)
        reference.update(step, norms[-1])
        if first if early else step == steps - 1:
            kinds = {spec.name for spec in config.optimizer.update.states}
            for name, parameter in reference.parameters.items():
                for state_name, x in reference.optimizer.state[parameter].items():
                    if state_name in kinds:  # torch also counts steps
                        states.setdefault(state_name, {})[name] = x.cpu().clone()
    assert len(losses) == steps, f"{len(losses)} batches for {steps} steps"
    return Outcome(losses, norms, initial, gradients, _copies(reference.parameters), states)


@torch.no_grad()
def with_first_weights(first: Reference, batch: Batch) -> Batch:
    """Return a batch of pairs with the log-probabilities under a reference's first weights, which do not change."""
    model = first.model
    assert isinstance(model, PreferenceChain), type(model)
    model.eval()
    for name in first.narrow:
        first.parameters[name].data = first.parameters[name].data.to(first.dtype)
    rows = model.prepared({name: x.to(first.device) for name, x in batch.items()})
    with torch.autocast(first.device.type, first.dtype, enabled=first.level == "O1"):
        (h,) = model.hidden_states(rows)
        return batch | {REFERENCE: model.log_probabilities(h, rows).cpu()}


def trace_reference(config: Config, batch: Batch, device: torch.device) -> tuple[Trace, dict[str, Any]]:
    """Return the trace of the reference's first step, and the fields of ReferenceFacts that describe the trace."""
    # All rows in one pass, so that a module's output is one tensor and layouts hold copies, cuts or partial sums.
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
    """Record one forward and backward pass. `rounding`: the seed of a perturbed pass; None: an exact one."""
    reference, recording = Reference(config, device), StepRecording()
    if config.loss is not None:
        batch = with_first_weights(Reference(config, device), batch)
    if rounding is not None:
        # Move weights and every output by one rounding: correct layouts may differ by as much as the results change.
        hooks = Rounding(reference.model, rounding)
        with torch.no_grad():
            for parameter in reference.parameters.values():
                parameter.copy_(hooks.rounded(parameter))
    recording.traces[PASSES[1]] = Trace(reference.model)
    with recording.traces[PASSES[1]]:
        recording.losses.append(reference.backward(batch))
    return recording
