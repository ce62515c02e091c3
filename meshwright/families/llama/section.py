"""The section of the Llama family: Llama, Qwen2, Qwen3, Mistral, SmolLM, Mixtral, Qwen3-MoE. No torch.

| rope.kind | frequencies                                                      | after                         |
|-----------|------------------------------------------------------------------|-------------------------------|
| plain     | theta^(-2i/E)                                                    | Su et al., arXiv 2104.09864   |
| linear    | all divided by `factor`                                          | Chen et al., arXiv 2306.15595 |
| llama3    | long waves divided by `factor`, short ones kept, a ramp between  | Llama 3.1                     |
| yarn      | the same with a ramp over dims, and scores have a temperature    | Peng et al., arXiv 2309.00071 |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.data_parallel.section import EXPERT_FIELD
from meshwright.errors import Problem
from meshwright.models.section import TextTransformer
from meshwright.registry import entries
from meshwright.section import Layers, Positive, Rule, Section, Share, divisors, listed, rule, shown, union_of

if TYPE_CHECKING:
    from meshwright.config import Config

AboveZero = Annotated[float, Field(gt=0)]
Factor = Annotated[float, Field(ge=1)]


class PlainRope(Section):
    """Rotary positions as they were first: the same angles at any length."""

    kind: Literal["plain"] = "plain"
    """How the frequencies are lengthened."""
    theta: AboveZero = 10000.0
    """The base of the frequencies' powers."""


class LinearRope(PlainRope):
    """Positions divided by a factor."""

    kind: Literal["linear"]  # type: ignore[assignment]
    factor: Factor
    """How many times longer sequences are than the first training's."""


class Llama3Rope(PlainRope):
    """Long waves are divided by the factor, short ones kept, and what is between is mixed (Llama 3.1)."""

    kind: Literal["llama3"]  # type: ignore[assignment]
    factor: Factor
    """The divisor of long waves."""
    original: Positive
    """Positions of the training before it was lengthened."""
    low_frequency: AboveZero = 1.0
    """Waves longer than original / low_frequency are divided by the factor."""
    high_frequency: AboveZero = 4.0
    """Waves shorter than original / high_frequency are kept."""


class YarnRope(PlainRope):
    """Slow dims are divided by the factor, fast ones kept, and what is between is mixed (arXiv 2309.00071)."""

    kind: Literal["yarn"]  # type: ignore[assignment]
    factor: Factor
    """The divisor of slow dims."""
    original: Positive
    """Positions of the training before it was lengthened."""
    slow: AboveZero = 1.0
    """Dims that turn fewer times than this within the original positions are divided by the factor."""
    fast: AboveZero = 32.0
    """Dims that turn more often than this are kept."""
    attention_factor: AboveZero | None = None
    """Queries and keys are multiplied by it; null: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole dims."""


ROPES: dict[str, type[PlainRope]] = {"plain": PlainRope, "linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}

if TYPE_CHECKING:
    Rope = PlainRope
else:
    Rope = union_of(ROPES, "kind", default="plain")


@rule("model.heads", "model.key_value_heads")
def key_value_heads_divide_heads(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, Llama), model
    if model.heads % model.num_key_value_heads:
        rule_text = f"does not divide model.heads={model.heads}"
        yield Problem("model.key_value_heads", model.num_key_value_heads, rule_text, listed(divisors(model.heads)))


@rule("model.hidden", "model.heads", "model.head_width")
def heads_have_a_width(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, Llama), model
    if model.head_width is None and model.hidden % model.heads:
        rule_text = f"does not divide model.hidden={model.hidden}, and no model.head_width is given"
        yield Problem("model.heads", model.heads, rule_text, listed(divisors(model.hidden)))
    elif model.width_of_head % 2:
        rule_text = "is odd, and rotary positions turn pairs of a head's numbers"
        yield Problem("model.head_width", model.width_of_head, rule_text, "an even number")


@rule("model.rope")
def rope_has_a_ramp(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, Llama), model
    rope = model.rope
    if isinstance(rope, Llama3Rope) and rope.low_frequency >= rope.high_frequency:
        rule_text = f"is not below model.rope.high_frequency={rope.high_frequency}"
        yield Problem("model.rope.low_frequency", rope.low_frequency, rule_text, "a lower number")
    if isinstance(rope, YarnRope) and rope.slow >= rope.fast:
        yield Problem("model.rope.slow", rope.slow, f"is not below model.rope.fast={rope.fast}", "a lower number")


class ExpertsSection(Section):
    """Feed-forwards of several experts, each model.feed_forward wide, of which a router gives each token a few."""

    count: Positive
    """Experts of a layer."""
    per_token: Positive = 2
    """Experts that each token goes to."""
    renormalise: bool = True
    """The weights of a token's experts add up to 1."""
    balance: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient of the loss that keeps experts equally busy: the mean over layers and the batch's sequences."""
    capacity: AboveZero | None = None
    """Tokens of a sequence that an expert takes in training, in those of an even router; null: all (dropless)."""


@rule("model.experts")
def tokens_have_experts(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, Llama), model
    if model.experts is not None and model.experts.per_token > model.experts.count:
        rule_text = f"is more than model.experts.count={model.experts.count}"
        yield Problem("model.experts.per_token", model.experts.per_token, rule_text, f"1 to {model.experts.count}")


@rule("model.experts", "layout.data.expert")
def ranks_have_whole_experts(config: Config) -> Iterator[Problem]:
    count, expert = config.model.num_experts, config.layout.data.expert
    if count % expert:
        # Experts are dealt over ranks of the data axis, so its size must be a multiple, too.
        valid = listed([size for size in divisors(count) if config.layout.data.size % size == 0])
        yield Problem(EXPERT_FIELD, expert, f"does not divide model.experts.count={count}", valid)


@rule("model.experts", "model.biases")
def experts_have_no_biases(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, Llama), model
    if model.experts is not None and "feed-forward" in model.biases:
        rule_text = "has feed-forward, and the linears of model.experts have none"
        yield Problem("model.biases", shown(model.biases), rule_text, "query-key-value, output")


@rule("model.experts", "layout.tensor")
def kit_holds_experts(config: Config) -> Iterator[Problem]:
    model, tensor = config.model, config.layout.tensor
    assert isinstance(model, Llama), model
    if model.experts is not None and not tensor.holds_experts:
        holding = ", ".join(kind for kind, section in entries("tensor").items() if section.holds_experts)
        rule_text = f"does not cut the experts of model.experts.count={model.experts.count}"
        yield Problem("layout.tensor.kind", tensor.kind, rule_text, holding)


Linears = Literal["query-key-value", "output", "feed-forward"]


class Llama(TextTransformer):
    """A decoder with rotary positions, RMS norms at the input of each sub-layer, grouped queries and SwiGLU."""

    rules: ClassVar[tuple[Rule, ...]] = (
        key_value_heads_divide_heads, heads_have_a_width, rope_has_a_ramp, tokens_have_experts,
        ranks_have_whole_experts, experts_have_no_biases, kit_holds_experts,
    )  # fmt: skip

    family: Literal["llama"]
    chain: ClassVar[str] = "meshwright.families.llama.model:LlamaModel"
    cuts_context: ClassVar[bool] = True
    separates: ClassVar[bool] = True
    key_value_heads: Positive | None = None
    """K, each of which serves heads / K queries; null: as many as heads."""
    head_width: Positive | None = None
    """E; null: hidden / heads."""
    feed_forward: Positive = 2048
    """N: the inner width of a feed-forward, or of each expert."""
    experts: ExpertsSection | None = None
    """A mixture of experts; null: one feed-forward for all tokens."""
    positions: Positive = 2048
    """Tokens that a sequence may have; there is no table of them."""
    vocabulary: Positive = 32000
    norm_epsilon: AboveZero = 1e-5
    dropout: Share = 0.0
    rope: Rope = PlainRope()
    """Rotary positions."""
    head_norms: bool = False
    """RMS norms of each head's queries and keys before they are turned, with one weight for all heads (Qwen3)."""
    biases: tuple[Linears, ...] = ()
    """Which linears have biases: Qwen2's are [query-key-value]."""
    tied: bool = False
    """The head's weight is the table of tokens."""
    layers: Layers = 12

    @property
    def num_key_value_heads(self) -> int:
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def width_of_head(self) -> int:
        return self.hidden // self.heads if self.head_width is None else self.head_width

    @property
    def inner(self) -> int:
        return self.feed_forward

    @property
    def branches(self) -> tuple[str, int]:
        """A key-value head with its queries."""
        # A message names the field that the user wrote.
        field = "model.heads" if self.key_value_heads is None else "model.key_value_heads"
        return field, self.num_key_value_heads

    @property
    def members_of_branch(self) -> int:
        return self.heads // self.num_key_value_heads

    @property
    def num_experts(self) -> int:
        return self.experts.count if self.experts is not None else 0

    @property
    def droppable_pairs(self) -> int:
        experts = self.experts
        # Dropless experts have no capacity, and no count to report.
        return self.layers * experts.per_token if experts is not None and experts.capacity is not None else 0

    @property
    def stacked_matrices(self) -> str:
        return "model.experts" if self.experts is not None else ""

    @property
    def losses_in_layers(self) -> str:
        return "model.experts.balance" if self.experts is not None and self.experts.balance else ""

    @property
    def shared_in_branches(self) -> str:
        return "model.head_norms" if self.head_norms else ""

    @property
    def widths(self) -> tuple[tuple[str, int], ...]:
        return *super().widths, ("model.feed_forward", self.feed_forward)
