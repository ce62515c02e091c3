"""Gated feed-forward layers: one for all tokens, or several experts, with an optional shared one for every token."""

from __future__ import annotations

import math
from typing import cast

from torch import Tensor, nn

from meshwright.compute.models.rotary_section import RotaryTransformer
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.kit import ExpertsKit, Kit
from meshwright.compute.tensor.router import ExpertsShape
from meshwright.compute.tensor.swiglu import ACTIVATIONS
from meshwright.compute.tensor.whole_vectors import InWholeVectors, in_whole_vectors


class FeedForward(nn.Module, InWholeVectors):
    """contract(activation(expand(x))); with `gated`, times sigmoid(x w), as in Qwen2-MoE's shared expert.

    SwiGLU: silu(gate) · up, with gate and up from one linear.
    """

    def __init__(
        self, model: RotaryTransformer, inner: int, kit: Kit, *, bias: bool = False, gated: bool = False
    ) -> None:
        """Make the layer. `gated`: multiply the output by sigmoid(x w)."""
        super().__init__()
        hidden, groups = model.hidden, model.expand_groups
        self.activate, self.groups = ACTIVATIONS[model.activation], groups
        self.expand = kit.expand(hidden, groups * inner, Initial(0.02), groups=groups, bias=bias)
        self.contract = kit.contract(inner, hidden, last_initial(model), bias=bias)
        self.gate = kit.linear("transform", hidden, 1, Initial(0.02), bias=False) if gated else None

    def forward(self, h: Tensor) -> Tensor:
        inside = self.expand(h)
        activated = in_whole_vectors(self.activate, inside, self.groups) if self.padded else self.activate(inside)
        y: Tensor = self.contract(activated)
        return y if self.gate is None else y * self.gate(h).sigmoid()


def last_initial(model: RotaryTransformer) -> Initial:
    """Return the initial values of a linear that ends in the residual stream: std 0.02 / sqrt(2 · layers)."""
    return Initial(0.02 / math.sqrt(2 * model.layers))


def experts_of(model: RotaryTransformer, kit: Kit) -> nn.Module:
    """Make a feed-forward of experts."""
    experts = model.experts
    assert experts is not None, "a model without experts"
    shape = ExpertsShape(
        model.hidden, model.expert_width, experts.count, experts.per_token, experts.renormalise, experts.balance,
        experts.capacity, Initial(0.02), last_initial(model), scores=experts.scores, groups=experts.groups,
        groups_chosen=experts.groups_per_token, scale=experts.scale, biased=experts.bias_rate is not None,
        balance_over=experts.balance_over, router_z=experts.router_z, activation=model.activation,
        expand_groups=model.expand_groups, linear_biases=model.expert_biases, clamp=model.clamp,
    )  # fmt: skip
    return cast(ExpertsKit, kit).experts(shape)
