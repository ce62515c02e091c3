"""Beam search (Sutskever et al., arXiv 1409.3215, section 3.2): the likeliest answers to several sources at once.

A source has `beams` places. Each step continues all that live by every token and keeps the best, by the sum of their
log-probabilities; one that ends gives up its place, so one place is greedy search. The answer is the ended hypothesis
with the highest score, the sum divided by the length penalty (Wu et al., arXiv 1609.08144, equation 14)

    lp(n) = ((5 + n) / 6)^alpha,   n tokens with the end token

A search stops as soon as no living hypothesis can win any more: sums only fall, and lp is largest at the limit.

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
"""step(tokens [R, n], origins [R]): the log-probabilities [R, V] of what follows each row.

`origins`: the row of the call before (at first: the source) that each row continues, for those who keep a cache.
"""


@dataclass(frozen=True)
class Beam:
    """The settings of the search, by default as by Vaswani et al., section 6.1. Raises ConfigError on what cannot be.

    `length_penalty`: alpha; 0 prefers short answers, as probabilities do.
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
        """lp(n), of a number or of each one."""
        return ((5 + length) / 6) ** self.length_penalty


def beam_of(beams: int | None, length_penalty: float | None) -> Beam:
    """The settings that a user gave; None: the default. Raises ConfigError on one that would have no effect."""
    options = {"beams": beams, "length_penalty": length_penalty}
    beam = Beam(**{name: value for name, value in options.items() if value is not None})  # type: ignore[arg-type]
    if length_penalty is not None and beams == 1:
        raise ConfigError.of("--length-penalty", length_penalty, "has no effect on one hypothesis", "with --beams 2")
    return beam


@dataclass(frozen=True)
class Answer:
    """The tokens behind the start token, without the end token; and the score."""

    tokens: list[int]
    score: float
    ended: bool
    """False: cut at the limit, where no hypothesis had ended."""


@dataclass(frozen=True)
class _Search:
    """The sources that are still searched, and what lives of each, best first."""

    sources: Tensor
    """The sources' numbers [S]."""
    limits: Tensor
    """The most tokens of each source's answer [S]."""
    tokens: Tensor
    """[S, K, n], the start token first."""
    sums: Tensor
    """Sums of log-probabilities [S, K]; -inf: no one lives here."""
    open: Tensor
    """Places that no ended hypothesis has taken [S]."""
    best: Tensor
    """The best score of what has ended [S]."""


def beam_search(step: _Step, start: int, end: int, limits: Tensor, beam: Beam) -> list[Answer]:
    """An answer to each source, of at most limits [number of sources] >= 1 tokens with the end token.

    One that has not ended at its limit counts only where none has.
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
    # One place lives at first: K equal ones would find the same K continuations K times.
    search.sums[:, 0] = 0.0
    answers = [Answer([], -torch.inf, False)] * count
    origins = torch.arange(count, device=device).repeat_interleave(places)
    while len(search.sources):
        log_probabilities = step(search.tokens.flatten(0, 1), origins)
        search, origins = _advanced(search, log_probabilities)
        search = _collected(search, answers, end, beam)
        length = search.tokens.shape[2] - 1
        # A living sum only falls, and the penalty is largest at the limit: what cannot win there can win nowhere.
        within_reach = search.sums.amax(1) / beam.penalty(search.limits)
        going = (length < search.limits) & (within_reach > search.best)
        search, origins = _Search(*(value[going] for value in vars(search).values())), origins[going].flatten()
    return answers


def _advanced(search: _Search, log_probabilities: Tensor) -> tuple[_Search, Tensor]:
    """Each source's best continuations, as many as it has open places, those that end among them; and the rows [S, K]
    that they continue."""
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
    """A hypothesis that has ended leaves its place and, where it is the best so far, becomes the answer; so does the
    best that lives at the limit, where none has ended."""
    length = search.tokens.shape[2] - 1
    scores = search.sums / beam.penalty(length)
    ended = (search.tokens[:, :, -1] == end) & (search.sums > -torch.inf)
    ended_best, place = scores.masked_fill(~ended, -torch.inf).max(1)
    best = torch.maximum(search.best, ended_best)
    # A cut answer has no end to be judged by: it counts where nothing else does.
    cut = (search.limits <= length) & (best == -torch.inf)
    place = torch.where(cut, scores.argmax(1), place)
    for index in ((ended_best > search.best) | cut).nonzero().flatten().tolist():
        tokens = search.tokens[index, place[index], 1:].tolist()
        score = float(scores[index, place[index]])
        answers[int(search.sources[index])] = (
            Answer(tokens, score, False) if cut[index] else Answer(tokens[:-1], score, True)
        )
    sums = search.sums.masked_fill(ended, -torch.inf)
    return replace(search, sums=sums, open=search.open - ended.sum(1), best=best)
