"""Greedy continuations of many prompts at once: what lm-evaluation-harness asks beside likelihoods (tools/harness.py).

Prompts of equal length go through the model together, so that no row is padded and each gets the tokens that it would
get alone. A row that has ended leaves the batch. A prompt whose continuation may not fit into the context, or is drawn
at random, goes through generate.py alone, where the context slides.
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
    """A prompt's tokens and its limits: at most `most` new tokens, up to a token of `ends` (besides the tokenizer's
    own) or a text of `stops`, which the continuation leaves out."""

    prompt: Sequence[int]
    most: int
    stops: tuple[str, ...] = ()
    ends: tuple[int, ...] = ()
    sampling: Sampling = field(default_factory=Sampling)


def continuations(loaded: LoadedText, openings: Sequence[Opening], rows: int | None = None) -> list[str]:
    """The continuation of each prompt. `rows`: the largest batch."""
    together: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    answers: dict[int, str] = {}
    for at, one in enumerate(openings):
        length = len(one.prompt)
        if length and length + one.most <= loaded.context and one.sampling.temperature == 0:
            together[length, one.most].append(at)
        else:
            # Its context slides, or each token is drawn with its own seed: no batch would give it the same tokens.
            prompt, answers[at] = list(one.prompt), ""
            tokens = generate_tokens(loaded, prompt, one.most, one.sampling, one.ends)
            for text in accumulate(whole_characters(loaded.tokenizer, prompt, tokens)):
                ended = _before_stop(text, one.stops)
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
    """The continuations of prompts of one length, for as many tokens, in one batch."""
    tokenizer, cache = loaded.tokenizer, KeyValueCache()
    made: list[list[int]] = [[] for _ in openings]
    texts = ["" for _ in openings]
    alive = list(range(len(openings)))
    fresh = torch.tensor([list(one.prompt) for one in openings], device=loaded.device)  # [B, T]
    for _ in range(openings[0].most):
        h = loaded.model.hidden(fresh, cache)[:, -1]  # [B, H]
        chosen = loaded.head.logits(h)[:, : tokenizer.vocabulary_size].argmax(-1).tolist()
        stays = []
        for place, (row, token) in enumerate(zip(alive, chosen, strict=True)):
            one = openings[row]
            if token in tokenizer.marks.stops or token in one.ends:
                continue
            made[row].append(token)
            texts[row] = "".join(whole_characters(tokenizer, list(one.prompt), iter(made[row])))
            if (ended := _before_stop(texts[row], one.stops)) is not None:
                texts[row] = ended
            else:
                stays.append(place)
        if not stays:
            break
        if len(stays) < len(alive):
            # Rows that have ended leave the batch, and their keys and values the cache.
            cache.select(stays)
        alive = [alive[place] for place in stays]
        fresh = torch.tensor([[made[row][-1]] for row in alive], device=loaded.device)
    return texts


def _before_stop(text: str, stops: Sequence[str]) -> str | None:
    """The text before the first stop word in it; None where it has no stop word."""
    ends = [text.index(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else None
