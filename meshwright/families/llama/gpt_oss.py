"""The section of gpt-oss (arXiv 2508.10925): Llama's decoder with sinks, and experts with biases. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.compute.models.experts_section import ExpertsSection
from meshwright.compute.models.rotary_section import AboveZero
from meshwright.config.section import Rule, rule, shown
from meshwright.families.llama.section import Linears, Llama, experts_have_no_biases
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config

_OTHERS = ("dense_layers", "shared", "bias_rate")
"""Fields of experts that would add a feed-forward without a clamp, or a second bias to the router."""


@rule("model.experts")
def experts_are_all_alike(config: Config) -> Iterator[Problem]:
    model = config.model
    assert isinstance(model, GptOss), model
    for field in _OTHERS:
        value, usual = getattr(model.experts, field), ExpertsSection.model_fields[field].default
        if value != usual:
            rule_text = "is no field of model.family=gpt-oss, whose layers have experts alone, and routers one bias"
            yield Problem(f"model.experts.{field}", shown(value), rule_text, shown(usual))


class GptOss(Llama):
    """A decoder with attention sinks, and experts with biases and clamped SwiGLUs."""

    rules: ClassVar[tuple[Rule, ...]] = (
        *(entry for entry in Llama.rules if entry is not experts_have_no_biases),
        experts_are_all_alike,
    )
    has_sinks: ClassVar[bool] = True

    family: Literal["gpt-oss"]  # type: ignore[assignment]
    experts: ExpertsSection = ExpertsSection(count=32, per_token=4)
    """The mixture of experts of each layer."""
    activation: Literal["swiglu"] = "swiglu"
    """Between an expert's linears: a clamped SwiGLU."""
    biases: tuple[Linears, ...] = ("query-key-value", "output", "feed-forward")
    """Which linears have biases; feed-forward: those of routers and experts."""
    gate_slope: AboveZero = 1.702
    """The factor of a gate inside of its sigmoid."""
    gate_limit: AboveZero = 7.0
    """The bound of gates from above, and of ups from both sides."""

    @property
    def expert_biases(self) -> bool:
        return "feed-forward" in self.biases

    @property
    def clamp(self) -> tuple[float, float] | None:
        return self.gate_slope, self.gate_limit
