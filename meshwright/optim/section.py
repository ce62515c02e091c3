"""The optimizers as the config, the states and the reference see them: fields, states, one step. No torch.

| name     | fields         | states                          | a step of                  |
|----------|----------------|---------------------------------|----------------------------|
| adamw    | betas, epsilon | exp_avg, exp_avg_sq             | torch's fused AdamW        |
| sgd      | -              | -                               | torch's fused SGD          |
| momentum | momentum       | momentum_buffer                 | torch's fused SGD          |

All have lr, weight_decay (of matrices only), clip and schedule. One is added by an `Update` and its line in the
registry (docs/extending.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    skips: bool = False


ADAMW = Update(
    "meshwright.optim.updates:adamw_step",
    "torch.optim:AdamW",
    lambda settings: {"betas": settings.betas, "eps": settings.epsilon},
    fields=("betas", "epsilon"),
    states=("exp_avg", "exp_avg_sq"),
    skips=True,
)
SGD = Update("meshwright.optim.updates:sgd_step", "torch.optim:SGD", lambda settings: {}, skips=True)
MOMENTUM = Update(
    "meshwright.optim.updates:sgd_step",
    "torch.optim:SGD",
    lambda settings: {"momentum": settings.momentum},
    fields=("momentum",),
    states=("momentum_buffer",),
    skips=True,
)
