"""Beam search (Sutskever et al., arXiv 1409.3215, section 3.2) for the likeliest answers to several sources at once.

A source has `beams` places for hypotheses. Each step continues every open hypothesis by every token and keeps the
continuations with the highest sums of log-probabilities. A hypothesis that ends closes its place; one place is greedy
search. The answer is the ended hypothesis with the highest score: the sum divided by the length penalty (Wu et al.,
arXiv 1609.08144, equation 14)

    lp(n) = ((5 + n) / 6)^alpha,   n tokens with the end token

The search of a source stops when no open hypothesis can win: sums only fall, and lp is largest at the limit.

Letters: S sources that are still searched, K places a source, R = S·K rows, n tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from meshwright.ranks.errors import ConfigError

_Step = Callable[[Tensor, Tensor], Tensor]
"""step(tokens [R, n], origins [R]): the log-probabilities [R, V] of the next token of each row.

origins: for each row, the number of the previous call's row that it continues (first call: the source), for a cache.
"""


@dataclass(frozen=True)
class Beam:
    """The settings of the search, by default as in Vaswani et al., section 6.1. Raises ConfigError for invalid ones.

    beams: places for hypotheses of one source.
    length_penalty: alpha; 0 prefers short answers, as plain probabilities do.
    """

    beams: int = 4
    length_penalty: float = 0.6

    def __post_init__(self) -> None:
        if self.beams < 1:
            raise ConfigError.of("--beams", self.beams, "keeps no hypothesis", "1 (greedy) or more, such as 4")
        if not 0 <= self.length_penalty < float("inf"):
            rule, valid = "is no exponent of a length penalty", "0 (none) or more, such as 0.6"
            raise ConfigError.of("--length-penalty", self.length_penalty, rule, valid)

    def penalty(self, length: int | Tensor) -> Any:
        """Return lp(n), element-wise for a tensor."""
        return ((5 + length) / 6) ** self.length_penalty


def beam_of(beams: int | None, length_penalty: float | None) -> Beam:
    """Return the settings of a user; None means the default. Raises ConfigError for a setting without effect."""
    options = {"beams": beams, "length_penalty": length_penalty}
    beam = Beam(**{name: value for name, value in options.items() if value is not None})  # type: ignore[arg-type]
    if length_penalty is not None and beams == 1:
        raise ConfigError.of("--length-penalty", length_penalty, "has no effect on one hypothesis", "with --beams 2")
    return beam


@dataclass(frozen=True)
class Answer:
    """An answer: the tokens between the start token and the end token, and the score."""

    tokens: list[int]
    score: float
    ended: bool
    """False: cut at the limit, since no hypothesis had ended."""


@dataclass(frozen=True)
class _Search:
    """The sources that are still searched, each with open hypotheses, best first."""

    sources: Tensor
    """The sources' numbers [S]."""
    limits: Tensor
    """The most tokens of each source's answer [S]."""
    tokens: Tensor
    """[S, K, n], the start token first."""
    sums: Tensor
    """Sums of log-probabilities [S, K]; -inf: no hypothesis in this place."""
    open: Tensor
    """The number of places that no ended hypothesis has closed [S]."""
    best: Tensor
    """The best score of the ended hypotheses [S]."""


def beam_search(step: _Step, start: int, end: int, limits: Tensor, beam: Beam) -> list[Answer]:
    """Search the answer to each source.

    Args:
        step: the model, as described at `_Step`.
        start: the start token of every answer.
        end: the end token.
        limits: the most tokens of each answer, including the end token [number of sources], >= 1.
        beam: the settings of the search.

    Returns:
        One answer a source. A hypothesis cut at the limit is an answer only if no hypothesis has ended.
    """
    count, places = len(limits), beam.beams
    device = limits.device
    search = _Search(
        torch.arange(count, device=device),
        limits,
        torch.full((count, places, 1), start, device=device),
        torch.full((count, places), -torch.inf, device=device),
        torch.full((count,), places, device=device),
        torch.full((count,), -torch.inf, device=device),
    )
    # Only one place is open at first: K equal hypotheses would find the same K continuations K times.
    search.sums[:, 0] = 0.0
    answers = [Answer([], -torch.inf, False)] * count
    origins = torch.arange(count, device=device).repeat_interleave(places)
    while len(search.sources):
        log_probabilities = step(search.tokens.flatten(0, 1), origins)
        search, origins = _advanced(search, log_probabilities)
        search = _collected(search, answers, end, beam)
        length = search.tokens.shape[2] - 1
        # A sum only falls, and the penalty is largest at the limit: a hypothesis that cannot win there cannot win.
        within_reach = search.sums.amax(1) / beam.penalty(search.limits)
        going = (length < search.limits) & (within_reach > search.best)
        search, origins = _Search(*(value[going] for value in vars(search).values())), origins[going].flatten()
    return answers


def _advanced(search: _Search, log_probabilities: Tensor) -> tuple[_Search, Tensor]:
    """Continue each source's hypotheses by one token, keeping one continuation for each open place.

    Returns the search with the best continuations, ended ones included, and the rows [S, K] that were continued.
    """
    num_sources, places = search.sums.shape
    vocabulary = log_probabilities.shape[1]
    sums, chosen = (search.sums.flatten().unsqueeze(1) + log_probabilities).view(num_sources, -1).topk(places)
    numbers = torch.arange(places, device=chosen.device)
    # topk is sorted, so the places beyond the open ones are the least likely.
    sums = sums.masked_fill(numbers >= search.open.unsqueeze(1), -torch.inf)
    first = torch.arange(num_sources, device=chosen.device).unsqueeze(1) * places
    rows = first + chosen // vocabulary
    tokens = torch.cat([search.tokens.flatten(0, 1)[rows], (chosen % vocabulary).unsqueeze(2)], 2)
    return replace(search, tokens=tokens, sums=sums), rows


def _collected(search: _Search, answers: list[Answer], end: int, beam: Beam) -> _Search:
    """Close the places of ended hypotheses, and store new best ones in `answers`.

    At the limit of a source without an ended hypothesis, the best open hypothesis is stored.
    """
    length = search.tokens.shape[2] - 1
    scores = search.sums / beam.penalty(length)
    ended = (search.tokens[:, :, -1] == end) & (search.sums > -torch.inf)
    ended_best, hypothesis = scores.masked_fill(~ended, -torch.inf).max(1)
    best = torch.maximum(search.best, ended_best)
    # A cut answer has no end token, so its score is not comparable: used only if no hypothesis has ended.
    cut = (search.limits <= length) & (best == -torch.inf)
    hypothesis = torch.where(cut, scores.argmax(1), hypothesis)
    for index in ((ended_best > search.best) | cut).nonzero().flatten().tolist():
        tokens = search.tokens[index, hypothesis[index], 1:].tolist()
        score = float(scores[index, hypothesis[index]])
        answers[int(search.sources[index])] = (
            Answer(tokens, score, False) if cut[index] else Answer(tokens[:-1], score, True)
        )
    sums = search.sums.masked_fill(ended, -torch.inf)
    return replace(search, sums=sums, open=search.open - ended.sum(1), best=best)
