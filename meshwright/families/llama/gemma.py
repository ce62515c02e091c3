"""The section of Gemma 2 (arXiv 2408.00118) and Gemma 3 (arXiv 2503.19786), text alone: Llama's chain with other norms,
GELU, scaled embeddings and soft caps. No torch."""

from __future__ import annotations

import math
from typing import ClassVar, Literal

from meshwright.compute.models.rotary_section import AboveZero, NormPlaces
from meshwright.config.section import Positive
from meshwright.families.llama.section import Llama


class Gemma(Llama):
    """A decoder with norms before and behind its sub-layers, GELU gates, scaled embeddings and soft caps."""

    norm_kind: ClassVar[Literal["rms", "rms-around-one"]] = "rms-around-one"

    family: Literal["gemma"]  # type: ignore[assignment]
    activation: Literal["geglu"] = "geglu"
    norms: NormPlaces = "both"
    tied: bool = True
    norm_epsilon: AboveZero = 1e-6
    query_scalar: Positive = 256
    """Scores are divided by the square root of this number."""
    score_cap: AboveZero | None = None
    """The soft cap of attention's scores, cap · tanh(score / cap); null: none. Gemma 2 has 50."""
    logit_cap: AboveZero | None = None
    """The soft cap of the head's logits; null: none. Gemma 2 has 30."""

    @property
    def score_scale(self) -> float | None:
        return float(self.query_scalar) ** -0.5

    @property
    def score_bound(self) -> float | None:
        return self.score_cap

    @property
    def head_cap(self) -> float | None:
        return self.logit_cap

    @property
    def embedding_scale(self) -> float:
        return math.sqrt(self.hidden)
