"""The section of GPT-2. No torch."""

from __future__ import annotations

from typing import ClassVar, Literal

from meshwright.compute.models.section import TextTransformer


class Gpt2(TextTransformer):
    """A GPT-2 style decoder."""

    family: Literal["gpt2"] = "gpt2"
    chain: ClassVar[str] = "meshwright.families.gpt.model:GPT"
    cuts_context: ClassVar[bool] = True
    separates: ClassVar[bool] = True
    spreads_head: ClassVar[bool] = True
    table_fields: ClassVar[tuple[str, ...]] = ("vocabulary", "positions")
    tied: bool = True
    """The head's weight is the table of tokens."""
