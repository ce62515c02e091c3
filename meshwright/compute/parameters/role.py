"""Roles: the purpose of a parameter, and the facts that follow from the purpose. No torch.

| role          | a step changes it by           | weight decay | stored at O2 |
|---------------|--------------------------------|--------------|--------------|
| hidden matrix | the optimizer's rule, matrices | yes          | half         |
| table         | the optimizer's rule, elements | yes          | half         |
| norm          | the optimizer's rule, elements | no           | float32      |
| bias          | the optimizer's rule, elements | no           | half         |
| router bias   | the signs of its gradient      | no           | float32      |
| taps          | the optimizer's rule, elements | yes          | half         |
| decay         | the optimizer's rule, elements | no           | float32      |
| any, frozen   | nothing                        | no           | as the role  |

A layer declares the role with the placement (shard.py: ShardSpec). `model.frozen` freezes parameters by name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

By = Literal["matrices", "elements", "signs", "nothing"]


@dataclass(frozen=True)
class StepRule:
    """The change that a step makes to parameters. All parameters of a bucket have one rule."""

    by: By
    """matrices: the optimizer's step of whole matrices. elements: the optimizer's step of each element. signs: a fixed
    amount against the sign of the gradient, under every optimizer; neither norm nor clipping counts these gradients.
    nothing: the parameters are frozen."""
    decays: bool = False
    """Whether weight decay acts."""

    @property
    def trained(self) -> bool:
        """Whether steps change the parameters; frozen ones have no gradients and no states."""
        return self.by != "nothing"


FROZEN = StepRule("nothing")


@dataclass(frozen=True)
class Role:
    """The purpose of a parameter."""

    name: str
    rule: StepRule
    stored: Literal["run", "float32"] = "run"
    """float32: the parameter stays in float32 at O2, which stores weights in half precision."""

    def by_elements(self) -> StepRule:
        """Return the rule under an optimizer that has no step of matrices."""
        return replace(self.rule, by="elements") if self.rule.by == "matrices" else self.rule


HIDDEN_MATRIX = Role("hidden matrix", StepRule("matrices", decays=True))
"""A matrix of a hidden layer, which multiplies activations."""
TABLE = Role("table", StepRule("elements", decays=True))
"""An embedding or output matrix: one row per token, position or class."""
NORM = Role("norm", StepRule("elements"), stored="float32")
"""A weight or bias of a norm."""
BIAS = Role("bias", StepRule("elements"))
"""An addend of a product or of attention's scores."""
ROUTER_BIAS = Role("router bias", StepRule("signs"), stored="float32")
"""An addend of a router's scores for the choice of experts. In half precision a step of 0.001 would be lost."""
TAPS = Role("taps", StepRule("elements", decays=True))
"""The taps of a convolution of each channel with the last tokens."""
DECAY = Role("decay", StepRule("elements"), stored="float32")
"""A parameter of the decay of a recurrent state: half precision would round decays near one to one."""

RuleOf = Callable[[Role], StepRule]
"""rule_of(role): the optimizer's step rule for parameters of the role (Update.rule_of)."""
