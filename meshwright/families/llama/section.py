"""The section of the Llama family: Llama, Qwen2, Qwen3, Mistral, SmolLM, Mixtral, Qwen2-MoE, Qwen3-MoE. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.compute.models.experts_section import EXPERT_RULES
from meshwright.compute.models.rotary_section import RotaryTransformer, rope_has_a_ramp
from meshwright.compute.models.section import Branches
from meshwright.config.section import Positive, Rule, divisors, even_near, listed, rule, shown
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


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
        yield Problem("model.head_width", model.width_of_head, rule_text, even_near(model.width_of_head))


@rule("model.experts", "model.biases")
def experts_have_no_biases(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, Llama), model
    if model.experts is not None and "feed-forward" in model.biases:
        rule_text = "has feed-forward, and the linears of model.experts have none"
        yield Problem("model.biases", shown(model.biases), rule_text, "query-key-value, output")


Linears = Literal["query-key-value", "output", "feed-forward"]


class Llama(RotaryTransformer):
    """A decoder with rotary positions, RMS norms at the input of each sub-layer, grouped queries and SwiGLU."""

    rules: ClassVar[tuple[Rule, ...]] = (
        key_value_heads_divide_heads, heads_have_a_width, rope_has_a_ramp, experts_have_no_biases, *EXPERT_RULES,
    )  # fmt: skip

    family: Literal["llama"]
    chain: ClassVar[str] = "meshwright.families.llama.model:LlamaModel"
    spreads_head: ClassVar[bool] = True
    balance_of_folders: ClassVar[str] = "config.json has output_router_logits=false, and true trains with one"
    key_value_heads: Positive | None = None
    """K: number of key-value heads; each serves heads / K queries. null: the number of heads."""
    head_width: Positive | None = None
    """E; null: hidden / heads."""
    head_norms: bool = False
    """RMS norms of each head's queries and keys before the rotation, with one weight for all heads (Qwen3)."""
    biases: tuple[Linears, ...] = ()
    """Which linears have biases: Qwen2's are [query-key-value]."""

    @property
    def num_key_value_heads(self) -> int:
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def width_of_head(self) -> int:
        return self.hidden // self.heads if self.head_width is None else self.head_width

    @property
    def branches(self) -> Branches:
        """The branches of a layer: each is a key-value head with its queries."""
        # Error texts name the field that the user wrote.
        field = "model.heads" if self.key_value_heads is None else "model.key_value_heads"
        shared = "model.head_norms" if self.head_norms else ""
        return Branches(field, self.num_key_value_heads, self.heads // self.num_key_value_heads, shared)
