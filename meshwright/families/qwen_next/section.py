"""The section of Qwen3-Next's family: Qwen3-Next, Qwen3.5's text models. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.compute.models.experts_section import EXPERT_RULES
from meshwright.compute.models.rotary_section import AboveZero, RotaryTransformer, rope_has_a_ramp
from meshwright.compute.models.section import Branches
from meshwright.config.section import Positive, Rule, at_most, divisors, even_near, listed, rule, shown
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


@rule("model.heads", "model.key_value_heads", "model.linear_key_heads", "model.linear_value_heads")
def heads_are_in_groups(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, QwenNext), model
    if model.heads % model.num_key_value_heads:
        rule_text = f"does not divide model.heads={model.heads}"
        yield Problem("model.key_value_heads", model.num_key_value_heads, rule_text, listed(divisors(model.heads)))
    if model.linear_value_heads % model.linear_key_heads:
        rule_text = f"does not divide model.linear_value_heads={model.linear_value_heads}"
        valid = listed(divisors(model.linear_value_heads))
        yield Problem("model.linear_key_heads", model.linear_key_heads, rule_text, valid)


@rule("model.rotary_width", "model.head_width")
def rotary_numbers_are_in_the_head(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, QwenNext), model
    if model.rotary_width % 2:
        rule_text = "is odd, and rotary positions turn pairs of a head's numbers"
        yield Problem("model.rotary_width", model.rotary_width, rule_text, even_near(model.rotary_width))
    elif model.rotary_width > model.head_width:
        rule_text = f"is more than model.head_width={model.head_width}"
        yield Problem("model.rotary_width", model.rotary_width, rule_text, at_most(model.head_width, 2))


@rule("model.attention_layers", "model.layers")
def some_layers_attend(config: Config) -> Iterator[Problem]:
    """Refuse a pattern with one kind of layers: positions are in attention alone, and Llama has attention alone."""
    model = config.model
    assert isinstance(model, QwenNext), model
    pattern, kinds = model.attention_layers, {model.attends(layer) for layer in range(model.layers)}
    if len(pattern) > model.layers:
        rule_text = f"has {len(pattern)} layers, more than model.layers={model.layers}"
        valid = f"model.layers={len(pattern)}; or a pattern of at most {model.layers} layers, which is repeated"
        yield Problem("model.attention_layers", shown(pattern), rule_text, valid)
    elif len(kinds) < 2:
        every = "attention" if kinds == {True} else "a gated delta net"
        valid = "a pattern with true and false; model.family=llama has attention alone"
        yield Problem("model.attention_layers", shown(pattern), f"gives every layer {every}", valid)


@rule("layout.tensor", "model.linear_key_heads")
def linear_heads_are_cut_equally(config: Config) -> Iterator[Problem]:
    """Require whole key heads of the delta nets on each rank, with all value heads of these."""
    model, tensor = config.model, config.layout.tensor
    assert isinstance(model, QwenNext), model
    if model.linear_key_heads % tensor.inner_size:
        rule_text = f"does not divide model.linear_key_heads={model.linear_key_heads}"
        yield Problem(tensor.inner_field, tensor.inner_size, rule_text, listed(divisors(model.linear_key_heads)))


@rule("layout.context", "model.convolution", "data")
def parts_hold_the_convolution(config: Config) -> Iterator[Problem]:
    """Require parts of sequences with the tokens that the convolutions of the next part read."""
    model, context = config.model, config.layout.context
    assert isinstance(model, QwenNext), model
    length = config.data.lengths.source // (context.size * (context.strategy.chunks if context.size > 1 else 1))
    if context.size > 1 and length < model.convolution - 1:
        rule_text = (
            f"cuts sequences into parts of {length}, and model.convolution={model.convolution} reads more before"
        )
        yield Problem("layout.context.size", context.size, rule_text, "1, or a longer data.sequence")


class QwenNext(RotaryTransformer):
    """A decoder with gated delta nets, and attention with output gates in every fourth layer."""

    rules: ClassVar[tuple[Rule, ...]] = (
        heads_are_in_groups, rotary_numbers_are_in_the_head, some_layers_attend, linear_heads_are_cut_equally,
        parts_hold_the_convolution, rope_has_a_ramp, *EXPERT_RULES,
    )  # fmt: skip
    norm_kind: ClassVar[Literal["rms", "rms-around-one"]] = "rms-around-one"
    uncut_because: ClassVar[str] = "whose states are sums over tokens without parts"

    family: Literal["qwen3-next"]
    chain: ClassVar[str] = "meshwright.families.qwen_next.model:QwenNextModel"
    spreads_head: ClassVar[bool] = True
    balance_of_folders: ClassVar[str] = "config.json has output_router_logits=false, and true trains with one"
    activation: Literal["swiglu"] = "swiglu"
    key_value_heads: Positive | None = None
    """K: key-value heads of attention; each serves heads / K queries. null: the number of heads."""
    head_width: Positive = 256
    """E: the numbers of a head's query, key and value in attention."""
    rotary_width: Positive = 64
    """The first numbers of a head's query and key, which are turned; the others have no positions."""
    attention_layers: tuple[bool, ...] = (False, False, False, True)
    """Layers with attention, a pattern repeated over all layers; other layers have a gated delta net."""
    linear_key_heads: Positive = 16
    """Key heads of a gated delta net; each serves linear_value_heads / linear_key_heads value heads."""
    linear_value_heads: Positive = 32
    """Value heads of a gated delta net; each has a state [linear_key_width, linear_value_width]."""
    linear_key_width: Positive = 128
    """The numbers of a delta net's query, and key."""
    linear_value_width: Positive = 128
    """The numbers of a delta net's value."""
    convolution: Annotated[int, Field(ge=2)] = 4
    """Tokens that a delta net's convolution of queries, keys and values reads, the token itself the last."""
    norm_epsilon: AboveZero = 1e-6

    def attends(self, layer: int) -> bool:
        """Return whether a layer has attention."""
        pattern = self.attention_layers
        return bool(pattern) and pattern[layer % len(pattern)]

    def layer_form(self, layer: int) -> tuple[object, ...]:
        return (self.attends(layer),)

    @property
    def num_key_value_heads(self) -> int:
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def branches(self) -> Branches:
        """The branches of a layer with attention: each is a key-value head with its queries."""
        field = "model.heads" if self.key_value_heads is None else "model.key_value_heads"
        return Branches(field, self.num_key_value_heads, self.heads // self.num_key_value_heads, "a norm of heads")


class Qwen35(QwenNext):
    """Qwen3-Next's decoder; a Hugging Face folder has separate tensors of a delta net's columns."""

    family: Literal["qwen3.5"]  # type: ignore[assignment]
