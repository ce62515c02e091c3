"""Cloze accuracy: all sub-tokens of the last word, from a context cut on the left."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from meshwright.ranks.errors import DataError
from meshwright.tools.evaluate.lambada import cloze_accuracy, passages
from meshwright.tools.evaluate.load import load_text
from tests.tools.evaluate.tiny import rigged_checkpoint, tiny_checkpoint

# After the letter b: a space, then cat.
FOLLOWS = {ord("b"): ord(" "), ord(" "): ord("c"), ord("c"): ord("a"), ord("a"): ord("t")}


def written(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def test_right_only_where_every_sub_token_is(tmp_path: Path) -> None:
    loaded = load_text(rigged_checkpoint(tmp_path, FOLLOWS))
    texts = {
        "see b cat": True,
        "b cat\n": True,  # the line's end is no part of the word
        "b cab": False,  # the last sub-token differs
        "b hat": False,  # the first sub-token differs
        "see z cat": False,  # the space before the word is a sub-token of the word
        "x" * 50 + "b cat": True,  # longer than the context: cut on the left
        "b   cat": True,  # all spaces but one before the word are dropped
    }
    result = cloze_accuracy(loaded, written(tmp_path / "all.jsonl", list(texts)))
    assert (result["passages"], result["correct"]) == (len(texts), sum(texts.values()))
    for number, (text, right) in enumerate(texts.items()):
        single = cloze_accuracy(loaded, written(tmp_path / f"{number}.jsonl", [text]))
        assert single["accuracy"] == float(right), text


def test_perplexity_is_of_the_whole_word(tmp_path: Path) -> None:
    loaded = load_text(tiny_checkpoint(tmp_path))
    source = written(tmp_path / "one.jsonl", ["on the mat"])
    tokens = torch.tensor([list(b"on the mat")])[:, -9:]  # context 8: eight inputs, and the last target
    with torch.no_grad():
        losses = loaded.head.token_losses(loaded.model.hidden(tokens[:, :-1]), tokens[:, 1:])
    found = cloze_accuracy(loaded, source)["perplexity_per_word"]
    assert found == pytest.approx(math.exp(float(losses[0, -4:].sum())), rel=1e-9)


def test_padding_changes_nothing(tmp_path: Path) -> None:
    loaded = load_text(tiny_checkpoint(tmp_path))
    texts = ["a b", "on the mat", "ab cde f"]
    together = cloze_accuracy(loaded, written(tmp_path / "all.jsonl", texts))
    alone = [cloze_accuracy(loaded, written(tmp_path / "one.jsonl", [text])) for text in texts]
    total = math.log(together["perplexity_per_word"]) * len(texts)
    assert total == pytest.approx(sum(math.log(single["perplexity_per_word"]) for single in alone), rel=1e-10)


def test_passages_of_each_form(tmp_path: Path) -> None:
    (tmp_path / "lines.txt").write_text("one a\n\ntwo b\n")
    assert list(passages(str(tmp_path / "lines.txt"))) == ["one a", "two b"]
    assert list(passages(written(tmp_path / "a.jsonl", ["one\na", "two b"]))) == ["one\na", "two b"]


def test_mistakes(tmp_path: Path) -> None:
    loaded = load_text(tiny_checkpoint(tmp_path / "run"))
    with pytest.raises(DataError, match="passage 2: is a single word"):
        cloze_accuracy(loaded, written(tmp_path / "a.jsonl", ["a b", "word"]))
    with pytest.raises(DataError, match="passage 1: its last word has 10 tokens, and the model sees 8"):
        cloze_accuracy(loaded, written(tmp_path / "a.jsonl", ["a wordiness"[:10] + "x"]))
