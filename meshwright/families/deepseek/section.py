"""The section of DeepSeek-V3's family: DeepSeek-V3, DeepSeek-R1, Moonlight, Kimi-K2. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.compute.models.experts_section import EXPERT_RULES
from meshwright.compute.models.rotary_section import AboveZero, RotaryTransformer, rope_has_a_ramp
from meshwright.config.section import Count, Positive, Rule, at_most, even_near, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


LATER_WEIGHT = 0.3
"""DeepSeek-V3's, for its first ten trillion tokens."""


@rule("model.rotary_width")
def rotary_widths_are_even(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, DeepSeek), model
    if model.rotary_width % 2:
        rule_text = "is odd, and rotary positions turn pairs of a head's numbers"
        yield Problem("model.rotary_width", model.rotary_width, rule_text, even_near(model.rotary_width))


@rule("model.later_tokens", "model.later_weight", "data.sequence")
def later_tokens_are_in_the_sequence(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, DeepSeek), model
    sequence = config.data.lengths.source
    if not model.later_tokens and model.later_weight != LATER_WEIGHT:
        rule_text = "has no effect with model.later_tokens=0"
        yield Problem(
            "model.later_weight", model.later_weight, rule_text, "leave it out, or model.later_tokens=1 or more"
        )
    if model.later_tokens >= sequence:
        rule_text = f"looks past the last of data.sequence={sequence} tokens"
        yield Problem("model.later_tokens", model.later_tokens, rule_text, at_most(sequence - 1, 0))


@rule("model.later_tokens", "loss")
def later_tokens_are_of_texts(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, DeepSeek), model
    if config.loss is not None and model.later_tokens:
        rule_text = f"adds losses of single tokens, and loss.kind={config.loss.kind} is a loss over pairs of answers"
        yield Problem("model.later_tokens", model.later_tokens, rule_text, "0")


class DeepSeek(RotaryTransformer):
    """A decoder whose keys and values are made of one narrow vector a token (multi-head latent attention)."""

    rules: ClassVar[tuple[Rule, ...]] = (
        rotary_widths_are_even, rope_has_a_ramp, later_tokens_are_in_the_sequence, later_tokens_are_of_texts,
        *EXPERT_RULES,
    )  # fmt: skip

    family: Literal["deepseek"]
    chain: ClassVar[str] = "meshwright.families.deepseek.model:DeepSeekModel"
    balance_of_folders: ClassVar[str] = "config.json asks for none, and the biases that choose experts stay as they are"
    latent_fields: ClassVar[tuple[str, ...]] = ("query_rank", "key_value_rank", "rotary_width")
    query_rank: Positive | None = None
    """The width of the vector that all heads' queries are made of; null: they are made of the hidden states."""
    key_value_rank: Positive = 512
    """The width of the vector that all heads' keys and values are made of."""
    head_width: Positive = 128
    """The numbers of a head's query and key that have no positions."""
    rotary_width: Positive = 64
    """The numbers of a head's query that are turned, and of the one key with positions, which all heads share."""
    value_width: Positive = 128
    """The numbers of a head's value."""
    later_tokens: Count = 0
    """Tokens behind the next one that training predicts as well, by one more layer each (multi-token prediction)."""
    later_weight: Annotated[float, Field(ge=0)] = LATER_WEIGHT
    """The coefficient of their losses' mean."""
    norm_epsilon: AboveZero = 1e-6

    @property
    def losses_in_layers(self) -> str:  # type: ignore[override]
        return self.router_losses or ("model.later_tokens" if self.later_tokens else "")

    @property
    def table_uses(self) -> int:  # type: ignore[override]
        return 2 * (1 + self.later_tokens)

    @property
    def expert_layers(self) -> int:
        return super().expert_layers + (self.later_tokens if self.experts is not None else 0)

    @property
    def query_width(self) -> int:
        """The numbers of a head's query, and key."""
        return self.head_width + self.rotary_width
