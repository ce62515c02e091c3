"""The optimizers as the config, the states and the reference use them: fields, states, one step. No torch.

| name     | fields         | states                          | a step of                  |
|----------|----------------|---------------------------------|----------------------------|
| adamw    | betas, epsilon | exp_avg, exp_avg_sq             | torch's fused AdamW        |
| sgd      | -              | -                               | torch's fused SGD          |
| momentum | momentum       | momentum_buffer                 | torch's fused SGD          |
| muon     | all three      | exp_avg; exp_avg_sq of elements | ours (muon.py), and AdamW  |

All have lr, weight_decay (of matrices only), clip and schedule. To add an optimizer, write an `Update` and a line in
the registry (docs/extending.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from meshwright.config.registry import entries
from meshwright.config.section import Rule, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.compute.parameters.role import By, Role, StepRule
    from meshwright.config import Config
    from meshwright.config.schema import OptimizerSection

OWN_FIELDS = ("betas", "epsilon", "momentum")
"""The fields of the optimizer section that only some optimizers read."""


@dataclass(frozen=True)
class StateSpec:
    """A tensor that an optimizer keeps for each parameter: begins as zeros, read and written by each step."""

    name: str
    """The name in checkpoints, and in the `state` of the reference."""
    of: tuple[By, ...] = ("elements", "matrices")
    """The rules of parameters that have the state."""
    shape: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None
    """shape(the matrix's shape): the state's shape, for matrices only; a number is (1,). None: the weight's shape."""
    dtype: Literal["master", "float32", "bfloat16", "float16"] = "master"
    """master: the dtype of the weight that is stepped, float32 or float64."""

    def __post_init__(self) -> None:
        if self.shape is not None and self.of != ("matrices",):
            raise TypeError(f"state {self.name} has a shape of its own: it can be of matrices alone, of=('matrices',)")

    def elements(self, weights: int, matrices: Sequence[tuple[int, ...]]) -> int:
        """Return the number of the state's elements. `weights`: elements of the weights; `matrices`: the shape of each
        matrix."""
        return weights if self.shape is None else sum(math.prod(self.shape(matrix)) for matrix in matrices)


@dataclass(frozen=True)
class Update:
    """An optimizer."""

    step: str
    """Names the function that steps some weights at once, such as updates.adamw_step. Steps are element by element: an
    offloaded optimizer calls the function for pieces."""
    reference: str
    """Names the torch.optim.Optimizer that `verify` compares with, made from parameter groups, lr and `arguments`."""
    arguments: Callable[[OptimizerSection], dict[str, Any]]
    """arguments(section): keyword arguments of the reference."""
    fields: tuple[str, ...] = ()
    """The fields among OWN_FIELDS that the optimizer reads."""
    states: tuple[StateSpec, ...] = ()
    """The optimizer's tensors, in the order of a step's list."""
    rates: tuple[float, float] = (1e-7, 10.0)
    """Learning rates between which a run is plausible (config/sense.py)."""
    skips: bool = False
    """Whether `step` and `matrix_step` take a last argument `skip`, a float32 scalar on the weights' device, and write
    nothing if `skip` is 1. If not, the host waits for the norm of the gradients before calling a step."""
    matrix_step: str = ""
    """The function that steps hidden layers' matrices, each whole and as [rows, columns]; empty: `step` is used."""
    rules: tuple[Rule, ...] = ()
    """Rules on combinations that are refused, and why; checked if the optimizer is chosen."""

    def __post_init__(self) -> None:
        if self.matrix_step:
            object.__setattr__(self, "rules", (needs_whole_matrices, *self.rules))
        if any(state.dtype != "master" for state in self.states):
            object.__setattr__(self, "rules", (needs_states_in_place, *self.rules))

    def rule_of(self, role: Role) -> StepRule:
        """Return the rule by which parameters of a role are stepped."""
        # A bucket has one rule: without `matrix_step`, matrices and tables have the same rule.
        return role.rule if self.matrix_step else role.by_elements()

    def states_of(self, rule: StepRule) -> tuple[StateSpec, ...]:
        """Return the states of parameters that are stepped by a rule, in the order of `states`."""
        return tuple(state for state in self.states if rule.by in state.of)


ADAMW = Update(
    "meshwright.strategies.optim.updates:adamw_step",
    "torch.optim:AdamW",
    lambda settings: {"betas": settings.betas, "eps": settings.epsilon},
    fields=("betas", "epsilon"),
    states=(StateSpec("exp_avg"), StateSpec("exp_avg_sq")),
    rates=(1e-7, 0.1),
    skips=True,
)
"""Adam with decoupled weight decay: reads betas and epsilon."""
SGD = Update("meshwright.strategies.optim.updates:sgd_step", "torch.optim:SGD", lambda settings: {}, skips=True)
"""The gradient times the rate."""
MOMENTUM = Update(
    "meshwright.strategies.optim.updates:sgd_step",
    "torch.optim:SGD",
    lambda settings: {"momentum": settings.momentum},
    fields=("momentum",),
    states=(StateSpec("momentum_buffer"),),
    skips=True,
)
"""SGD with a running sum of gradients: reads momentum."""


@rule("optimizer.name", "model", "layout.data", "layout.context.size", "layout.tensor", "memory.offload.to")
def needs_whole_matrices(config: Config) -> Iterator[Problem]:
    """An optimizer that makes matrices orthogonal needs each of them whole on a rank."""
    name, sync, layout = config.optimizer.name, config.layout.data.sync, config.layout
    why = f"cuts the matrices that optimizer.name={name} steps whole"
    others = ", ".join(optimizer for optimizer, update in entries("optimizers").items() if not update.matrix_step)
    instead = f"; or optimizer.name={others}"
    strategy = layout.data.strategy
    cuts = strategy.cuts_parameters and not strategy.deals_matrices
    if max(layout.data.size, layout.context.size) > 1 and cuts:
        whole = [name for name, entry in entries("syncs").items() if not entry.cuts_parameters or entry.deals_matrices]
        plain = sorted(whole, key=lambda name: not entries("syncs")[name].candidate)  # for any layout first
        yield Problem("layout.data.sync", sync, why, ", ".join(plain) + instead)
    # One tensor [n, H, 2, N] of all experts is no matrix; its n matrices would each need a separate step.
    if field := config.model.routing.stacked_matrices:
        rule_text = f"steps a matrix a parameter, and {field} has one of all experts"
        yield Problem("optimizer.name", name, rule_text, others)
    # Every kit shards matrices: having its axes is reason enough.
    if layout.tensor.axes:
        yield Problem("layout.tensor.kind", layout.tensor.kind, why, "none" + instead)
    if config.memory.offload.to != "none":
        yield Problem("memory.offload.to", config.memory.offload.to, why, "none" + instead)


@rule("optimizer.name", "memory.offload.to")
def needs_states_in_place(config: Config) -> Iterator[Problem]:
    """Offloaded states are float32."""
    if config.memory.offload.to != "none":
        why = f"keeps float32 states alone, and optimizer.name={config.optimizer.name} has others"
        yield Problem("memory.offload.to", config.memory.offload.to, why, "none")


MUON = Update(
    "meshwright.strategies.optim.updates:adamw_step",
    "meshwright.strategies.optim.muon:Muon",
    lambda settings: {"betas": settings.betas, "eps": settings.epsilon, "momentum": settings.momentum},
    fields=("betas", "epsilon", "momentum"),
    states=(StateSpec("exp_avg"), StateSpec("exp_avg_sq", of=("elements",))),
    rates=(1e-7, 1.0),
    skips=True,
    matrix_step="meshwright.strategies.optim.muon:muon_step",
)
"""Hidden matrices by their momentum made orthogonal, all else by AdamW: reads all three; needs whole matrices."""
