"""A checkpoint as a model of lm-evaluation-harness (the extra `harness`), whose tasks then measure it.

    import lm_eval
    from meshwright.tools.harness import CheckpointLM

    results = lm_eval.simple_evaluate(model=CheckpointLM("out/first"), tasks=["lambada_openai"])

The harness knows tasks, prompts and metrics; it asks a model how likely a text is behind another, how likely a text is,
and for a continuation up to a word that ends it.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from meshwright.errors import DataError
from meshwright.tools.evaluate.likelihood import likelihoods, text_likelihoods
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.generate import Sampling, generate_text

try:
    from lm_eval.api.model import LM
except ImportError as error:
    raise DataError('lm-evaluation-harness is not installed: pip install "meshwright[harness]"') from error

HARNESS_TOKENS = 256
"""Tokens of a continuation where a task does not say how many."""


class CheckpointLM(LM):
    """A decoder's step folder, or its run's newest checkpoint."""

    def __init__(self, checkpoint: str | Path, device: str = "auto", context: int | None = None) -> None:
        """`context`: tokens that it sees at once; by default those of its training. Raises as `load_text`."""
        super().__init__()
        self.loaded = load_text(Path(checkpoint), device, context)

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """(log probability, whether greedy decoding gives it) of each request's (context, continuation)."""
        asked = [request.args for request in requests]
        return [(one.log, one.greedy) for one in likelihoods(self.loaded, asked)]

    def loglikelihood_rolling(self, requests: list[Any]) -> list[float]:
        """The log probability of each request's whole text."""
        return text_likelihoods(self.loaded, [request.args[0] for request in requests])

    def generate_until(self, requests: list[Any]) -> list[str]:
        """A continuation of each request's context, up to what ends it."""
        return [self._continuation(*request.args) for request in requests]

    def _continuation(self, context: str, options: dict[str, Any]) -> str:
        """Stops are words that are not part of it; only greedy decoding, or a temperature with the seed 1."""
        until = options.get("until") or []
        stops = [until] if isinstance(until, str) else list(until)
        sampled = options.get("do_sample", False) or options.get("temperature", 0) > 0
        sampling = Sampling(float(options.get("temperature") or 1.0)) if sampled else Sampling()
        most = int(options.get("max_gen_toks") or options.get("max_tokens") or HARNESS_TOKENS)
        text = ""
        for text in accumulate(generate_text(self.loaded, context, most, sampling)):
            ends = [text.index(stop) for stop in stops if stop and stop in text]
            if ends:
                return text[: min(ends)]
        return text
