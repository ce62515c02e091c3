"""The section of the Llama family: Llama, Qwen2, Qwen3, Mistral, SmolLM, Mixtral, Qwen2-MoE, Qwen3-MoE. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.compute.models.experts_section import EXPERT_RULES
from meshwright.compute.models.rotary_section import NormPlaces, PlainRope, Rope, RotaryTransformer, rope_has_a_ramp
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


@rule("model.window_layers", "model.window_rope", "model.rotary_layers", "model.window", "model.layers")
def patterns_name_layers(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, Llama), model
    field, pattern = "model.window_layers", model.window_layers
    patterns = (field, pattern, "the window"), ("model.rotary_layers", model.rotary_layers, "rotary positions")
    for name, value in ((field, pattern), ("model.window_rope", model.window_rope and model.window_rope.kind)):
        if value and model.window is None:
            rule_text = "has no effect with model.window=null"
            yield Problem(name, shown(value), rule_text, "leave it out, or model.window=4096")
    for field, pattern, given in patterns:
        if pattern and not any(pattern):
            yield Problem(field, shown(pattern), f"gives no layer {given}", "a pattern with at least one true")
        elif len(pattern) > model.layers:
            rule_text = f"has {len(pattern)} layers, more than model.layers={model.layers}"
            valid = f"model.layers={len(pattern)}; or a pattern of at most {model.layers} layers, which is repeated"
            yield Problem(field, shown(pattern), rule_text, valid)


@rule("model.whole_norms", "model.head_norms")
def norms_of_heads_are_one_kind(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, Llama), model
    if model.whole_norms and model.head_norms:
        yield Problem("model.whole_norms", "true", "norms heads again, which model.head_norms norms", "false")


Linears = Literal["query-key-value", "output", "feed-forward"]


def in_pattern(pattern: tuple[bool, ...], layer: int) -> bool:
    """Return the value of a layer in a pattern that is repeated over all layers; True without a pattern."""
    return pattern[layer % len(pattern)] if pattern else True


class Llama(RotaryTransformer):
    """A decoder with rotary positions, RMS norms at the input of each sub-layer, grouped queries and SwiGLU."""

    rules: ClassVar[tuple[Rule, ...]] = (
        key_value_heads_divide_heads, heads_have_a_width, rope_has_a_ramp, experts_have_no_biases, patterns_name_layers,
        norms_of_heads_are_one_kind,
        *EXPERT_RULES,
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

    whole_norms: bool = False
    """RMS norms of the queries, and of the keys, of all heads together before the rotation (OLMo 2)."""
    norms: NormPlaces = "before"
    """Places of a block's norms: before the sub-layers, behind, of their outputs (OLMo 2), or both (Gemma 2)."""
    window: Positive | None = None
    """Tokens that a token sees in a layer with a window, itself the last; null: every layer sees all earlier tokens."""
    window_layers: tuple[bool, ...] = ()
    """Layers with the window, a pattern repeated over all layers: [true, false] the even layers; []: every layer."""

    window_rope: Rope | None = None
    """Rotary positions of the layers with a window; null: those of `rope`."""
    rotary_layers: tuple[bool, ...] = ()
    """Layers with rotary positions, a pattern as window_layers; other layers have no positions (SmolLM3). []: all."""

    @property
    def score_scale(self) -> float | None:
        """The factor of attention's scores; None: 1/√E."""
        return None

    @property
    def score_bound(self) -> float | None:
        """The soft cap of attention's scores; None: no cap."""
        return None

    def rotates(self, layer: int) -> bool:
        """Return whether a layer has rotary positions."""
        return in_pattern(self.rotary_layers, layer)

    def window_of(self, layer: int) -> int | None:
        """Return a layer's window; None without one."""
        return self.window if in_pattern(self.window_layers, layer) else None

    def layer_form(self, layer: int) -> tuple[object, ...]:
        return self.window_of(layer), self.rotates(layer)

    @property
    def ropes(self) -> tuple[PlainRope, ...]:
        return (self.rope,) if self.window_rope is None else (self.rope, self.window_rope)

    @property
    def layer_forms(self) -> list[tuple[object, ...]]:
        """`layer_form` of each layer, and its rotary positions."""
        return [(*self.layer_form(layer), self.ropes[self.rope_of(layer)]) for layer in range(self.layers)]

    def rope_of(self, layer: int) -> int:
        """Return the index of a layer's rotary positions in `ropes`."""
        return int(self.window_rope is not None and self.window_of(layer) is not None)

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
        # Ranks with copies of a key would count the squares of the key's norm several times.
        members = 1 if self.whole_norms else self.heads // self.num_key_value_heads
        return Branches(field, self.num_key_value_heads, members, shared)
