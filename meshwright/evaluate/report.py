"""A measure's result for a reader: as plain facts for JSON, and as a table of lines."""

from __future__ import annotations

import math

from meshwright.evaluate.lambada import Cloze
from meshwright.evaluate.perplexity import Perplexity

Fact = str | int | float | None


def facts_of(result: Perplexity | Cloze) -> dict[str, Fact]:
    """The result by name. What is not finite is None: JSON has no word for it."""
    if isinstance(result, Perplexity):
        facts: dict[str, Fact] = {
            "data": result.data,
            "tokens": result.tokens,
            "words": result.words,
            "context": result.context,
            "stride": result.stride,
            "loss_per_token": result.loss,
            "perplexity_per_token": result.perplexity,
            "perplexity_per_word": result.word_perplexity,
        }
    else:
        facts = {
            "data": result.data,
            "passages": result.passages,
            "correct": result.correct,
            "context": result.context,
            "accuracy": result.accuracy,
            "perplexity_per_word": result.perplexity,
        }
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in facts.items()
    }


def table_of(facts: dict[str, Fact]) -> str:
    """One fact a line."""
    width = max(map(len, facts))
    return "\n".join(f"{key.replace('_', ' '):<{width}}  {_shown(value)}" for key, value in facts.items())


def _shown(value: Fact) -> str:
    if value is None:
        return "not finite"
    if isinstance(value, float):
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e6 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else value
