"""Beam search against all possible sequences of made-up models. A prefix's hash gives the next probabilities."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.families.seq2seq.beam import Answer, Beam, beam_search
from meshwright.ranks.errors import ConfigError

END, START, VOCABULARY = 0, 7, 3


def following(source: int, prefix: list[int]) -> Tensor:
    """Return the log-probabilities [V] of a made-up model; some sources make an end unlikely."""
    generator = torch.Generator().manual_seed(hash((source, *prefix)) % 2**31)
    logits = 2 * torch.randn(VOCABULARY, generator=generator, dtype=torch.float64)
    logits[END] -= source % 3
    return logits.log_softmax(0)


class Model:
    """A step that stores each row's tokens, as a cache does, and counts the calls."""

    def __init__(self, sources: list[int]) -> None:
        self.rows: list[tuple[int, list[int]]] = [(source, []) for source in sources]
        self.calls = 0

    def __call__(self, tokens: Tensor, origins: Tensor) -> Tensor:
        newest = tokens[:, -1].tolist()
        before = [self.rows[origin] for origin in origins.tolist()]
        self.rows = [(source, [*seen, token]) for (source, seen), token in zip(before, newest, strict=True)]
        assert [seen for _, seen in self.rows] == tokens.tolist()
        self.calls += 1
        return torch.stack([following(source, seen) for source, seen in self.rows])


def score_of(source: int, tokens: list[int], alpha: float) -> float:
    prefix, total = [START], 0.0
    for token in tokens:
        total += float(following(source, prefix)[token])
        prefix.append(token)
    return total / ((5 + len(tokens)) / 6) ** alpha


def best_of_all(source: int, limit: int, alpha: float) -> Answer:
    """Return the best of all sequences that end within the limit."""
    words = [word for word in range(VOCABULARY) if word != END]
    bodies = [list(body) for length in range(limit) for body in product(words, repeat=length)]
    body = max(bodies, key=lambda body: score_of(source, [*body, END], alpha))
    return Answer(body, score_of(source, [*body, END], alpha), True)


def searched(sources: list[int], limits: list[int], beam: Beam) -> list[Answer]:
    return beam_search(Model(sources), START, END, torch.tensor(limits), beam)


def same(found: Answer, wanted: Answer) -> bool:
    return (found.tokens, found.ended) == (wanted.tokens, wanted.ended) and abs(found.score - wanted.score) < 1e-12


@pytest.mark.parametrize("alpha", [0.0, 0.6, 3.0])
def test_a_wide_beam_finds_the_best_of_all(alpha: float) -> None:
    sources, limits = list(range(8)), [5, 1, 4, 5, 3, 2, 5, 4]
    found = searched(sources, limits, Beam(2**5, alpha))
    for source, limit, answer in zip(sources, limits, found, strict=True):
        assert same(answer, best_of_all(source, limit, alpha))
    assert len({len(answer.tokens) for answer in found}) > 2, "answers of like length show little"


def test_one_place_is_greedy() -> None:
    found = searched(list(range(12)), [6] * 12, Beam(1))
    for source, answer in enumerate(found):
        tokens: list[int] = []
        while len(tokens) < 6 and (token := int(following(source, [START, *tokens]).argmax())) != END:
            tokens.append(token)
        ended = len(tokens) < 6
        wanted = Answer(tokens, score_of(source, [*tokens, END] if ended else tokens, 0.6), ended)
        assert same(answer, wanted)
    assert {answer.ended for answer in found} == {True, False}


@pytest.mark.parametrize("alpha", [0.0, 0.6, 4.0])
def test_the_early_stop_is_exact_and_early(alpha: float) -> None:
    """The reference searches a source at a time until no place is open or the limit is reached."""
    limit, places, steps = 7, 3, 0
    for source in range(40):
        live: list[list[int]] = [[]]
        ended: list[list[int]] = []
        while live and len(live[0]) < limit:
            longer = [[*tokens, token] for tokens in live for token in range(VOCABULARY)]
            longer.sort(key=lambda tokens: -score_of(source, tokens, 0.0))
            longer = longer[: places - len(ended)]
            ended += [tokens for tokens in longer if tokens[-1] == END]
            live = [tokens for tokens in longer if tokens[-1] != END]
            steps += 1
        tokens = max(ended or live, key=lambda tokens: score_of(source, tokens, alpha))
        model = Model([source])
        (found,) = beam_search(model, START, END, torch.tensor([limit]), Beam(places, alpha))
        wanted = Answer(tokens[:-1] if ended else tokens, score_of(source, tokens, alpha), bool(ended))
        assert same(found, wanted), source
        steps -= model.calls
    assert steps > 0


def test_sources_know_nothing_of_each_other() -> None:
    sources, limits = [4, 9, 4, 2, 11], [3, 7, 6, 1, 7]
    together = searched(sources, limits, Beam(3))
    for source, limit, answer in zip(sources, limits, together, strict=True):
        assert same(answer, searched([source], [limit], Beam(3))[0])


def test_no_source_no_answer() -> None:
    assert searched([], [], Beam()) == []


@pytest.mark.parametrize(
    "values,message",
    [
        ((0,), "--beams=0 keeps no hypothesis; valid: 1"),
        ((4, -0.5), "--length-penalty=-0.5 is no exponent of a length penalty; valid: 0"),
        ((4, float("nan")), "--length-penalty=nan"),
    ],
)
def test_mistakes(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Beam(*values)
