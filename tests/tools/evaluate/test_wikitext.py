"""Wikitext's perplexity by definition, on a text with a known plain form and loss; likelihoods for the harness."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from meshwright.ranks.errors import ConfigError, DataError
from meshwright.tools.evaluate.likelihood import likelihoods, text_likelihoods
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.evaluate.tasks import Question, measure
from meshwright.tools.evaluate.wikitext import plain_text
from tests.tools.evaluate.tiny import rigged_checkpoint, tiny_checkpoint

PUBLISHED = (
    " \n = = Sea = = \n \n The 1 @,@ 000 @-@ metre \" run \" ( in 7 @.@ 5 min ) , Tom 's dogs ' <unk> ; ended . \n"
)
PLAIN = "\n== Sea ==\n\nThe 1,000-metre \"run\" (in 7.5 min), Tom's dogs' <unk>; ended. \n"


def test_markup_is_taken_back() -> None:
    assert plain_text(PUBLISHED) == PLAIN.replace(". \n", ".\n")


def test_perplexity_by_its_definition(tmp_path: Path) -> None:
    (tmp_path / "wiki.test.tokens").write_text(PUBLISHED)
    run = tiny_checkpoint(tmp_path / "run")
    _, facts = measure("wikitext", Question(run, "cpu", str(tmp_path / "wiki.test.tokens"), stride=1), lambda *_: None)
    loaded = load_text(run, "cpu")
    text = torch.tensor([list(plain_text(PUBLISHED).encode())])
    total = 0.0
    with torch.no_grad():
        for place in range(1, text.shape[1]):
            seen = text[:, max(0, place - loaded.context) : place]
            if place <= loaded.context:
                seen = text[:, :place]
            h = loaded.model.hidden(seen)[:, -1:]
            total += float(loaded.head.token_losses(h, text[:, place : place + 1]))
    words = len(PUBLISHED.strip().split(" "))
    assert facts["perplexity_per_word"] == pytest.approx(math.exp(total / (words - 1)), rel=1e-9)
    assert facts["tokens"] == text.shape[1] - 1
    with pytest.raises(ConfigError, match=r"--task=wikitext needs --data; valid: the published file"):
        measure("wikitext", Question(run, "cpu"), lambda *_: None)
    with pytest.raises(DataError, match=r"nowhere: cannot be read as a file of Wikitext"):
        measure("wikitext", Question(run, "cpu", "nowhere"), lambda *_: None)


FOLLOWS = {ord("b"): ord(" "), ord(" "): ord("c"), ord("c"): ord("a"), ord("a"): ord("t")}


def test_likelihoods(tmp_path: Path) -> None:
    loaded = load_text(rigged_checkpoint(tmp_path / "rigged", FOLLOWS))
    pairs = [("see b", " cat"), ("see b ", "cat"), ("see b", " cab"), ("", "x"), ("x" * 50 + "b", " cat")]
    told = likelihoods(loaded, pairs)
    assert [one.greedy for one in told] == [True, True, False, False, True]
    assert told[0].log == pytest.approx(told[1].log), "a space at the context's end belongs to what follows"
    random = load_text(tiny_checkpoint(tmp_path / "tiny"))
    text = "on the mat it sat"
    stream = torch.tensor([[random.tokenizer.end, *text.encode()]])
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(text), random.context):
            length = min(random.context, len(text) - start)
            begin = max(0, min(start, len(text) - random.context))  # the last window has the most context
            h = random.model.hidden(stream[:, begin : start + length])[:, start - begin :]
            total -= float(random.head.token_losses(h, stream[:, start + 1 : start + length + 1]).sum())
    assert text_likelihoods(random, [text, ""]) == [pytest.approx(total, rel=1e-9), 0.0]
