"""The base of the config sections of Llama's and DeepSeek's families: decoders with rotary positions, RMS norms and
gated feed-forwards, optionally of experts. No torch.

| rope.kind | frequencies                                                      | after                         |
|-----------|------------------------------------------------------------------|-------------------------------|
| plain     | theta^(-2i/E)                                                    | Su et al., arXiv 2104.09864   |
| linear    | all divided by `factor`                                          | Chen et al., arXiv 2306.15595 |
| llama3    | long waves divided by `factor`, short ones kept, a ramp between  | Llama 3.1                     |
| yarn      | the same with a ramp over dims, and scores have a temperature    | Peng et al., arXiv 2309.00071 |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.compute.models.experts_section import ExpertsSection
from meshwright.compute.models.section import Routing, TextTransformer
from meshwright.config.section import Layers, Positive, Section, Share, rule, union_of
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config

AboveZero = Annotated[float, Field(gt=0)]
Factor = Annotated[float, Field(ge=1)]


class PlainRope(Section):
    """Rotary positions in the original form: frequencies do not depend on the length."""

    score_factor: ClassVar[float] = 1.0
    """The factor of latent attention's scores."""
    kind: Literal["plain"] = "plain"
    """How frequencies are scaled for longer sequences."""
    theta: AboveZero = 10000.0
    """The base of the frequencies' powers."""


class LinearRope(PlainRope):
    """Positions divided by a factor."""

    kind: Literal["linear"]  # type: ignore[assignment]
    factor: Factor
    """The length of sequences, relative to the original training's."""


class Llama3Rope(PlainRope):
    """Frequencies of long waves are divided by the factor, of short waves kept, between mixed (Llama 3.1)."""

    kind: Literal["llama3"]  # type: ignore[assignment]
    factor: Factor
    """The divisor of the frequencies of long waves."""
    original: Positive
    """Positions of the original training, with shorter sequences."""
    low_frequency: AboveZero = 1.0
    """Frequencies of waves longer than original / low_frequency are divided by the factor."""
    high_frequency: AboveZero = 4.0
    """Waves shorter than original / high_frequency are kept."""


class YarnRope(PlainRope):
    """Frequencies of slow dims are divided by the factor, of fast dims kept, between mixed (arXiv 2309.00071)."""

    kind: Literal["yarn"]  # type: ignore[assignment]
    factor: Factor
    """The divisor of the frequencies of slow dims."""
    original: Positive
    """Positions of the original training, with shorter sequences."""
    slow: AboveZero = 1.0
    """Dims with fewer turns than this within the original positions are divided by the factor."""
    fast: AboveZero = 32.0
    """Dims with more turns than this within the original positions are kept."""
    attention_factor: AboveZero | None = None
    """The factor of queries and keys; null: 0.1 ln(factor) + 1."""
    truncate: bool = True
    """Whether the ramp begins and ends at whole dims."""
    mscale: AboveZero | None = None
    """DeepSeek's: with mscale_all_dim, queries and keys are multiplied by the ratio of both temperatures instead."""
    mscale_all_dim: AboveZero | None = None
    """The divisor of mscale's ratio; latent attention multiplies scores by the square of this temperature."""

    def temperature(self, weight: float = 1.0) -> float:
        """Return YaRN's factor of queries and keys, 0.1 · weight · ln(factor) + 1."""
        return 0.1 * weight * math.log(self.factor) + 1.0

    @property
    def score_factor(self) -> float:  # type: ignore[override]
        return 1.0 if self.mscale_all_dim is None else self.temperature(self.mscale_all_dim) ** 2

    @property
    def multiplier(self) -> float:
        """The factor of queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self.temperature(self.mscale) / self.temperature(self.mscale_all_dim)
        return self.temperature()


ROPES: dict[str, type[PlainRope]] = {"plain": PlainRope, "linear": LinearRope, "llama3": Llama3Rope, "yarn": YarnRope}

NormPlaces = Literal["before", "behind", "both"]
"""The places of RMS norms around a block's sub-layers."""

if TYPE_CHECKING:
    Rope = PlainRope
else:
    Rope = union_of(ROPES, "kind", default="plain")


@rule("model.rope")
def rope_has_a_ramp(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, RotaryTransformer), model
    rope = model.rope
    if isinstance(rope, Llama3Rope) and rope.low_frequency >= rope.high_frequency:
        rule_text = f"is not below model.rope.high_frequency={rope.high_frequency}"
        yield Problem(
            "model.rope.low_frequency", rope.low_frequency, rule_text, f"{rope.high_frequency / 4:g}, any lower number"
        )
    if isinstance(rope, YarnRope) and rope.slow > rope.fast:  # Kimi-K2's are equal: a ramp of one dim
        yield Problem("model.rope.slow", rope.slow, f"is above model.rope.fast={rope.fast}", f"{rope.fast:g} or less")


class RotaryTransformer(TextTransformer):
    """A decoder with rotary positions, RMS norms at the input of each sub-layer, and SwiGLUs."""

    norm_kind: ClassVar[Literal["rms", "rms-around-one"]] = "rms"
    """The kind of the norms (tensor/kit.py)."""
    cuts_context: ClassVar[bool] = True
    separates: ClassVar[bool] = True

    adapter_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "query_key_value": ("query", "key", "value"),
        "expand": ("gate", "up"),
    }
    width_fields: ClassVar[tuple[str, ...]] = ("hidden", "feed_forward")
    feed_forward: Positive = 2048
    """N: the inner width of a feed-forward, or of each expert."""
    activation: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    """Between a feed-forward's linears: swiglu, geglu of gate and number; gelu, relu2 (squared ReLU) of a number."""
    experts: ExpertsSection | None = None
    """A mixture of experts; null: one feed-forward for all tokens."""
    positions: Positive = 2048
    """The most tokens of a sequence; there is no table of positions."""
    vocabulary: Positive = 32000
    norm_epsilon: AboveZero = 1e-5
    dropout: Share = 0.0
    rope: Rope = PlainRope()
    """Rotary positions."""
    tied: bool = False
    """The head's weight is the table of tokens."""
    layers: Layers = 12

    @property
    def expand_groups(self) -> int:
        """Outputs of a feed-forward's first linear for each input of the second."""
        return 2 if self.activation in ("swiglu", "geglu") else 1

    @property
    def expert_biases(self) -> bool:
        """Whether the linears of routers and experts have biases."""
        return False

    @property
    def clamp(self) -> tuple[float, float] | None:
        """Slope and limit of the experts' clamped SwiGLU; None: `activation`."""
        return None

    @property
    def embedding_scale(self) -> float:
        """The factor of the embeddings."""
        return 1.0

    @property
    def head_cap(self) -> float | None:
        """The soft cap of the head's logits; None: no cap."""
        return None

    @property
    def ropes(self) -> tuple[PlainRope, ...]:
        """The model's kinds of rotary positions; blocks name one by its index."""
        return (self.rope,)

    @property
    def inner(self) -> int:
        return self.feed_forward

    @property
    def expert_width(self) -> int:
        """The inner width of each expert."""
        width = self.experts.width if self.experts is not None else None
        return self.feed_forward if width is None else width

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        return max(0, self.layers - self.experts.dense_layers) if self.experts is not None else 0

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and layer >= self.experts.dense_layers

    @property
    def routing(self) -> Routing:  # type: ignore[override]
        experts = self.experts
        if experts is None:
            return Routing()
        # Dropless experts have no capacity, and no count to report.
        droppable = self.expert_layers * experts.per_token if experts.capacity is not None else 0
        by_batch = experts.balance > 0 and experts.balance_over == "batch"
        return Routing(experts.count, droppable, "model.experts", experts.bias_rate or 0.0, by_batch)

    @property
    def router_losses(self) -> str:
        """The field that adds losses to routers; empty without such losses."""
        experts = self.experts
        if experts is None or not (experts.balance or experts.router_z):
            return ""
        return "model.experts.balance" if experts.balance else "model.experts.router_z"

    @property
    def losses_in_layers(self) -> str:  # type: ignore[override]
        return self.router_losses

    @property
    def widths(self) -> tuple[tuple[str, int], ...]:
        experts, widths = self.experts, [*super().widths]
        if experts is not None and experts.width is not None:
            widths.append(("model.experts.width", experts.width))
        if experts is not None and experts.shared:
            widths.append(("model.experts.shared", experts.shared))
        return tuple(widths)
