"""The config section of experts, for every family with expert layers: numbers, routing and load balance. No torch.

| `scores` | a token's share of an expert | used by                                                     |
|----------|------------------------------|-------------------------------------------------------------|
| softmax  | exp(x r) over their sum      | Mixtral, Qwen2-MoE, Qwen3-MoE                               |
| sigmoid  | 1 / (1 + exp(-x r))          | DeepSeek-V3 (arXiv 2412.19437, equations 12 to 20), Kimi-K2 |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from meshwright.config.registry import entries
from meshwright.config.section import Count, Positive, Section, at_most, divisors, listed, rule
from meshwright.ranks.errors import Problem
from meshwright.strategies.data_parallel.section import EXPERT_FIELD

if TYPE_CHECKING:
    from meshwright.config import Config

AtLeastZero = Annotated[float, Field(ge=0)]
AboveZero = Annotated[float, Field(gt=0)]


class ExpertsSection(Section):
    """Feed-forward layers of several experts; a router sends each token to a few of these."""

    count: Positive
    """Experts of a layer."""
    per_token: Positive = 2
    """Experts that compute each token."""
    width: Positive | None = None
    """The inner width of each expert; null: model.feed_forward."""
    dense_layers: Count = 0
    """Number of first layers without experts; the feed-forwards of these are model.feed_forward wide."""
    shared: Count = 0
    """The inner width of a feed-forward for every token, in addition to the experts; 0: there is none."""
    shared_gate: bool = False
    """The shared feed-forward's output is multiplied by the sigmoid of a linear of the token (Qwen2-MoE)."""
    scores: Literal["softmax", "sigmoid"] = "softmax"
    """The function that turns router logits into shares of experts."""
    renormalise: bool = True
    """The weights of a token's experts add up to 1."""
    scale: AboveZero = 1.0
    """The factor of the weights of a token's experts."""
    groups: Positive = 1
    """Equal groups of experts. A token first chooses groups, by the sum of the two best scores in each."""
    groups_per_token: Positive = 1
    """Number of groups that a token chooses; experts of other groups are excluded."""
    bias_rate: AtLeastZero | None = None
    """Change per step of each expert's bias, which evens loads and is used only to choose experts; null: no bias."""
    balance: AtLeastZero = 0.0
    """The coefficient of the load-balancing loss: the mean over layers and the batch's sequences."""
    balance_over: Literal["sequence", "microbatch", "batch"] = "sequence"
    """The tokens that the load-balancing loss counts together; batch: the step's global batch."""
    router_z: AtLeastZero = 0.0
    """The coefficient of the router's z-loss: the mean over tokens and layers of log(sum(exp(logits)))²."""
    capacity: AboveZero | None = None
    """The most tokens of a sequence per expert in training, relative to an even router's; null: all (dropless)."""


def experts_of(config: Config) -> ExpertsSection | None:
    """Return the experts section of the model; None for a model without experts."""
    model: Any = config.model
    return model.experts if config.model.routing.num_experts else None


@rule("model.experts")
def tokens_have_experts(config: Config) -> Iterator[Problem]:
    experts = experts_of(config)
    if experts is None:
        return
    count, groups, chosen = experts.count, experts.groups, experts.groups_per_token
    if experts.per_token > count:
        rule_text = f"is more than model.experts.count={count}"
        yield Problem("model.experts.per_token", experts.per_token, rule_text, at_most(count))
    if count % groups:
        rule_text = f"does not divide model.experts.count={count}"
        yield Problem("model.experts.groups", groups, rule_text, listed(divisors(count)))
    elif groups > 1 and count == groups:
        # A group is scored by the sum of its two best experts.
        rule_text = f"leaves one of model.experts.count={count} in each, and a group is chosen by its best two"
        yield Problem("model.experts.groups", groups, rule_text, listed(divisors(count)[:-1]))
    elif chosen > groups:
        yield Problem(
            "model.experts.groups_per_token", chosen, f"is more than model.experts.groups={groups}", at_most(groups)
        )
    elif experts.per_token > (held := chosen * count // groups):
        rule_text = f"is more than the {held} experts of model.experts.groups_per_token={chosen}"
        yield Problem("model.experts.per_token", experts.per_token, rule_text, at_most(held))


@rule("model.experts")
def fields_have_an_effect(config: Config) -> Iterator[Problem]:
    experts = experts_of(config)
    if experts is None:
        return
    if experts.balance_over != "sequence" and not experts.balance:
        rule_text = "has no effect with model.experts.balance=0"
        yield Problem(
            "model.experts.balance_over",
            experts.balance_over,
            rule_text,
            "sequence, or a model.experts.balance above 0",
        )
    if experts.shared_gate and not experts.shared:
        rule_text = "has no effect with model.experts.shared=0"
        yield Problem("model.experts.shared_gate", "true", rule_text, "false, or a model.experts.shared above 0")
    if experts.per_token == 1 and experts.renormalise and not (experts.balance or experts.router_z):
        rule_text = "makes the one weight of model.experts.per_token=1 a 1, by which a router learns nothing"
        valid = "false, model.experts.per_token=2, or a model.experts.balance above 0"
        yield Problem("model.experts.renormalise", "true", rule_text, valid)


@rule("model.experts", "model.layers")
def a_layer_has_experts(config: Config) -> Iterator[Problem]:
    experts, layers = experts_of(config), config.model.num_blocks
    if experts is not None and experts.dense_layers >= layers:
        rule_text = f"leaves none of model.layers={layers} for experts"
        yield Problem("model.experts.dense_layers", experts.dense_layers, rule_text, at_most(layers - 1, 0))


@rule("model.experts", "layout.data.expert")
def ranks_have_whole_experts(config: Config) -> Iterator[Problem]:
    count, expert = config.model.routing.num_experts, config.layout.data.expert
    if count % expert:
        # Experts are distributed over ranks of the data axis, so the data size must be a multiple, too.
        valid = listed([size for size in divisors(count) if config.layout.data.size % size == 0])
        yield Problem(EXPERT_FIELD, expert, f"does not divide model.experts.count={count}", valid)


@rule("model.experts", "layout.tensor")
def kit_holds_experts(config: Config) -> Iterator[Problem]:
    experts, tensor = experts_of(config), config.layout.tensor
    if experts is not None and not tensor.holds_experts:
        holding = ", ".join(name for name, section in entries("tensor").items() if section.holds_experts)
        rule_text = f"does not cut the experts of model.experts.count={experts.count}"
        yield Problem("layout.tensor.kind", tensor.kind, rule_text, holding)


@rule("model.experts", "bits")
def balance_is_a_samples(config: Config) -> Iterator[Problem]:
    """Refuse a balance over a microbatch with `bits: layout-free`: a microbatch is a part of the layout."""
    experts = experts_of(config)
    if experts is None or not config.bits.layout_free:
        return
    if experts.balance and experts.balance_over == "microbatch":
        rule_text = "goes by batch.micro, which belongs to the layout"
        yield Problem("model.experts.balance_over", experts.balance_over, rule_text, "sequence, batch")


EXPERT_RULES = (
    tokens_have_experts, fields_have_an_effect, a_layer_has_experts, ranks_have_whole_experts, kit_holds_experts,
    balance_is_a_samples,
)  # fmt: skip
"""The rules of every family with experts."""
