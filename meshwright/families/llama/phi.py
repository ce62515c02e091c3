"""The section of Phi-3 and Phi-4 (arXiv 2404.14219): Llama's decoder under names of its own in Hugging Face's form."""

from __future__ import annotations

from typing import Literal

from meshwright.families.llama.section import Llama


class Phi(Llama):
    """Llama's decoder; a Hugging Face folder has one tensor of queries, keys and values, and one of gates and ups."""

    family: Literal["phi"]  # type: ignore[assignment]
