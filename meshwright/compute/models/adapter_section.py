"""The section `model.adapter`: low-rank adapters next to frozen linears (LoRA, DoRA). No torch."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Annotated, Literal

from pydantic import Field

from meshwright.config.section import Positive, Section, Share

ALL = "all-linear"
"""The pattern of every linear of the layers, as in peft."""
INSIDE = ".adapter."
"""The part of every adapter parameter's name that no other parameter's name has."""

PEFT: dict[str, tuple[str, ...]] = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "o_proj": ("output",),
    "gate_proj": ("expand.gate",),
    "up_proj": ("expand.up",),
    "down_proj": ("feed_forward.contract", "shared_expert.contract"),
    "shared_expert_gate": ("shared_expert.gate",),
    "c_attn": ("query_key_value",),
    "c_fc": ("feed_forward.expand",),
    "c_proj": ("attention.output", "feed_forward.contract"),
}
"""Names of linears in transformers' Llamas and GPT-2, and the patterns of our names."""


class Adapter(Section):
    """Low-rank adapters: y = x W + (alpha / rank) x A B, with W frozen (LoRA, Hu et al., arXiv 2106.09685)."""

    rank: Positive = 8
    """Columns of A and rows of B."""
    on: tuple[str, ...] = (ALL,)
    """The linears with an adapter, by patterns of names or ends of names: query, value, feed_forward.*, blocks.0.*."""
    alpha: Annotated[float, Field(gt=0)] | None = None
    """The factor of x A B, times the rank; null: twice the rank."""
    dropout: Share = 0.0
    """The share of an adapter's inputs that training sets to zero."""
    dora: bool = False
    """Whether magnitudes of W's columns are trained separately from directions (DoRA, Liu et al., arXiv 2402.09353)."""
    rslora: bool = False
    """Whether alpha is divided by the square root of the rank (Kalajdzievski, arXiv 2312.03732)."""
    begin: Literal["zero", "random"] = "zero"
    """First values of B; random as in peft's init_lora_weights=false: gradients of A are zero while B is zero."""
    from_: str | None = Field(default=None, alias="from")
    """The folder of peft with the fields and first values of the adapters; null: A is random, and B zero."""

    @property
    def scale(self) -> float:
        """The factor of x A B."""
        alpha = 2.0 * self.rank if self.alpha is None else self.alpha
        return alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    @property
    def patterns(self) -> tuple[str, ...]:
        """`on`, with our names in place of transformers'."""
        return tuple(ours for pattern in self.on for ours in PEFT.get(pattern, (pattern,)))

    def is_on(self, *names: str) -> bool:
        """Return whether a pattern matches one of the full names of a linear, or the end of one after a dot."""
        return any(matches(pattern, names) for pattern in self.patterns)


def matches(pattern: str, names: Iterable[str]) -> bool:
    """Return whether a pattern matches one of some names, or the end of one after a dot."""
    return pattern == ALL or any(fnmatchcase(name, each) for name in names for each in (pattern, f"*.{pattern}"))
