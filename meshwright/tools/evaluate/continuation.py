"""Greedy continuations of many prompts at once, for requests of lm-evaluation-harness (tools/harness.py).

Prompts of equal length form a batch, so that no row is padded and every continuation is the same as without batching.
A row that has ended is removed from the batch. generate.py continues a prompt separately if tokens are drawn at
random, or if the continuation may not fit into the context, which then slides.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from meshwright.compute.models.decoder import KeyValueCache
from meshwright.tools.evaluate.load import BATCH_TOKENS, LoadedText
from meshwright.tools.generate import Sampling, generate_tokens, whole_characters


@dataclass(frozen=True)
class Opening:
    """A prompt and the end of its continuation."""

    prompt: Sequence[int]
    """The prompt's tokens."""
    most: int
    """Largest number of new tokens."""
    stops: tuple[str, ...] = ()
    """Texts that end the continuation and are left out."""
    ends: tuple[int, ...] = ()
    """Tokens that end the continuation, in addition to the tokenizer's own stop tokens."""
    sampling: Sampling = field(default_factory=Sampling)


def continuations(loaded: LoadedText, openings: Sequence[Opening], rows: int | None = None) -> list[str]:
    """Return the continuation of each prompt. `rows`: the largest batch."""
    together: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    answers: dict[int, str] = {}
    for at, opening in enumerate(openings):
        length = len(opening.prompt)
        if length and length + opening.most <= loaded.context and opening.sampling.temperature == 0:
            together[length, opening.most].append(at)
        else:
            # The context slides, or tokens are drawn with the prompt's own generator: a batch would give other tokens.
            prompt, answers[at] = list(opening.prompt), ""
            tokens = generate_tokens(loaded, prompt, opening.most, opening.sampling, opening.ends)
            for text in accumulate(whole_characters(loaded.tokenizer, prompt, tokens)):
                ended = _before_stop(text, opening.stops)
                answers[at] = text if ended is None else ended
                if ended is not None:
                    break
    for (length, most), places in together.items():
        size = min(rows or len(places), max(1, BATCH_TOKENS // (length + most)))
        for start in range(0, len(places), size):
            chosen = places[start : start + size]
            answers |= zip(chosen, _together(loaded, [openings[at] for at in chosen]), strict=True)
    return [answers[at] for at in range(len(openings))]


@torch.inference_mode()
def _together(loaded: LoadedText, openings: Sequence[Opening]) -> list[str]:
    """Continue prompts of equal length in one batch, each by the same number of tokens at most."""
    tokenizer, cache = loaded.tokenizer, KeyValueCache()
    made: list[list[int]] = [[] for _ in openings]
    texts = ["" for _ in openings]
    alive = list(range(len(openings)))
    fresh = torch.tensor([list(opening.prompt) for opening in openings], device=loaded.device)  # [B, T]
    for _ in range(openings[0].most):
        h = loaded.model.hidden(fresh, cache)[:, -1]  # [B, H]
        chosen = loaded.head.logits(h)[:, : tokenizer.vocabulary_size].argmax(-1).tolist()
        stays = []
        for index, (row, token) in enumerate(zip(alive, chosen, strict=True)):
            opening = openings[row]
            if token in tokenizer.marks.stops or token in opening.ends:
                continue
            made[row].append(token)
            texts[row] = "".join(whole_characters(tokenizer, list(opening.prompt), iter(made[row])))
            if (ended := _before_stop(texts[row], opening.stops)) is not None:
                texts[row] = ended
            else:
                stays.append(index)
        if not stays:
            break
        if len(stays) < len(alive):
            # Remove rows that have ended from the batch, and their keys and values from the cache.
            cache.select(stays)
        alive = [alive[index] for index in stays]
        fresh = torch.tensor([[made[row][-1]] for row in alive], device=loaded.device)
    return texts


def _before_stop(text: str, stops: Sequence[str]) -> str | None:
    """Return the text before the first stop word; None if the text has no stop word."""
    ends = [text.index(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else None
