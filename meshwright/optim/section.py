"""The optimizers as the config, the states and the reference see them: fields, states, one step. No torch.

| name     | fields         | states                          | a step of                  |
|----------|----------------|---------------------------------|----------------------------|
| adamw    | betas, epsilon | exp_avg, exp_avg_sq             | torch's fused AdamW        |
| sgd      | -              | -                               | torch's fused SGD          |
| momentum | momentum       | momentum_buffer                 | torch's fused SGD          |
| muon     | all three      | exp_avg, exp_avg_sq             | ours (muon.py), and AdamW  |

All have lr, weight_decay (of matrices only), clip and schedule. One is added by an `Update` and its line in the
registry (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from meshwright.errors import Problem
from meshwright.registry import entries
from meshwright.section import Rule, rule

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.config.schema import OptimizerSection

OWN_FIELDS = ("betas", "epsilon", "momentum")
"""The fields of the optimizer section that only some optimizers read."""


@dataclass(frozen=True)
class Update:
    """An optimizer. `fields`: those of OWN_FIELDS that it reads; `states`: names of its tensors, each like the weight.

    `step`: names the function that steps some weights at once, as updates.adamw_step. Element by element: an offloaded
    optimizer calls it for pieces. `reference`: names the torch.optim.Optimizer that `verify` holds it against, which is
    made of parameter groups, lr and the `arguments` of the section.

    `skips`: `step` takes a last argument `skip`, a float32 scalar beside the weights, and writes nothing where it is 1.
    Without it the host waits for the norm of the gradients before it asks for a step.
    """

    step: str
    reference: str
    arguments: Callable[[OptimizerSection], dict[str, Any]]
    fields: tuple[str, ...] = ()
    states: tuple[str, ...] = ()
    rates: tuple[float, float] = (1e-7, 10.0)
    """Learning rates between which a run makes sense (config/sense.py)."""
    skips: bool = False
    matrices: bool = False
    """Whether `step` takes a hidden layer's matrix as [rows, columns], which must be whole; all else is flat."""
    rules: tuple[Rule, ...] = ()
    """Rules on what it does not go with, and why; checked where it is chosen."""


ADAMW = Update(
    "meshwright.optim.updates:adamw_step",
    "torch.optim:AdamW",
    lambda settings: {"betas": settings.betas, "eps": settings.epsilon},
    fields=("betas", "epsilon"),
    states=("exp_avg", "exp_avg_sq"),
    rates=(1e-7, 0.1),
    skips=True,
)
"""Adam with decoupled weight decay: reads betas and epsilon."""
SGD = Update("meshwright.optim.updates:sgd_step", "torch.optim:SGD", lambda settings: {}, skips=True)
"""The gradient times the rate."""
MOMENTUM = Update(
    "meshwright.optim.updates:sgd_step",
    "torch.optim:SGD",
    lambda settings: {"momentum": settings.momentum},
    fields=("momentum",),
    states=("momentum_buffer",),
    skips=True,
)
"""SGD with a running sum of gradients: reads momentum."""


@rule("optimizer.name", "model", "layout.data", "layout.context.size", "layout.tensor", "memory.offload.to")
def needs_whole_matrices(config: Config) -> Iterator[Problem]:
    """An optimizer that makes matrices orthogonal needs each of them whole on a rank."""
    name, sync, layout = config.optimizer.name, config.layout.data.sync, config.layout
    why = f"cuts the matrices that optimizer.name={name} steps whole"
    others = ", ".join(other for other, update in entries("optimizers").items() if not update.matrices)
    instead = f"; or optimizer.name={others}"
    if max(layout.data.size, layout.context.size) > 1 and layout.data.strategy.cuts_parameters:
        whole = [other for other, entry in entries("syncs").items() if not entry.cuts_parameters]
        plain = sorted(whole, key=lambda name: not entries("syncs")[name].candidate)  # those that suit any layout first
        yield Problem("layout.data.sync", sync, why, ", ".join(plain) + instead)
    # One tensor [n, H, 2, N] of all experts is no matrix; its n matrices would each need a step of their own.
    if field := config.model.routing.stacked_matrices:
        rule_text = f"steps a matrix a parameter, and {field} has one of all experts"
        yield Problem("optimizer.name", name, rule_text, others)
    # Every kit cuts matrices, which is what a kit is for: its axes are reason enough.
    if layout.tensor.axes:
        yield Problem("layout.tensor.kind", layout.tensor.kind, why, "none" + instead)
    if config.memory.offload.to != "none":
        yield Problem("memory.offload.to", config.memory.offload.to, why, "none" + instead)


MUON = Update(
    "meshwright.optim.muon:muon_step",
    "meshwright.optim.muon:Muon",
    lambda settings: {"betas": settings.betas, "eps": settings.epsilon, "momentum": settings.momentum},
    fields=("betas", "epsilon", "momentum"),
    states=("exp_avg", "exp_avg_sq"),
    rates=(1e-7, 1.0),
    matrices=True,
    rules=(needs_whole_matrices,),
)
"""Hidden matrices by their momentum made orthogonal, all else by AdamW: reads all three; needs whole matrices."""
