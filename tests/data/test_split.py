"""The held-out share is met, by content, for any documents."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from meshwright.data.corpus import text_corpus
from meshwright.data.files import silent
from meshwright.data.split import Split, plan_split, split_records
from meshwright.ranks.errors import DataError


def write(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def split(source: str, share: float) -> dict[Split, list[str]]:
    found: dict[Split, list[str]] = {"train": [], "validation": []}
    corpus = text_corpus(source)
    for name, [text] in split_records(corpus, plan_split(corpus, share, silent)):
        found[name].append(text)
    return found


def test_the_share_is_met_by_whole_documents(tmp_path: Path) -> None:
    draw = random.Random(1)
    texts = [f"{number} " + "word " * draw.randrange(1, 400) for number in range(300)]
    found = split(write(tmp_path / "a.jsonl", texts), 0.1)
    assert sorted(found["train"] + found["validation"]) == sorted(texts)
    share = sum(map(len, found["validation"])) / sum(map(len, texts))
    assert 0.1 <= share <= 0.15


def test_the_split_is_by_content_so_that_repeats_stay_together(tmp_path: Path) -> None:
    texts = [f"document {number} has some words in it" for number in range(100)]
    once = split(write(tmp_path / "a.jsonl", texts), 0.2)
    twice = split(write(tmp_path / "b.jsonl", texts[::-1] + texts), 0.2)
    assert set(once["validation"]) == set(twice["validation"])
    assert not set(twice["validation"]) & set(twice["train"])


def test_one_document_is_cut_at_a_line(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    text = "".join(f"line {number}\n" for number in range(1000))
    path.write_text(text)
    found = split(str(path), 0.05)
    [train], [validation] = found["train"], found["validation"]
    assert train + validation == text
    assert train.endswith("\n")
    assert validation.startswith("line ")
    assert len(validation) == pytest.approx(0.05 * len(text), rel=0.05)


def test_a_tiny_document_beside_huge_ones_is_no_validation_split(tmp_path: Path) -> None:
    huge = ["".join(f"{letter} {number}\n" for number in range(500)) for letter in "ab"]
    found = split(write(tmp_path / "a.jsonl", ["tiny", *huge]), 0.1)
    share = len("".join(found["validation"])) / len("".join(huge))
    assert share == pytest.approx(0.1, rel=0.1)
    assert "".join(sorted(found["train"] + found["validation"])).count("tiny") == 1


@pytest.mark.parametrize("text", ["one-word-without-an-end", "word\n", "words\n\n\n  \n"])
def test_too_small_a_corpus_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(DataError, match=r"a\.txt: is too small to hold out a validation split"):
        split(str(tmp_path / "a.txt"), 0.05)
    (tmp_path / "a.txt").write_text(" \n")
    with pytest.raises(DataError, match=r"a\.txt: holds no text"):
        split(str(tmp_path / "a.txt"), 0.05)


def test_a_source_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    texts = [f"document {number}" for number in range(50)]
    source = write(tmp_path / "a.jsonl", texts)
    corpus = text_corpus(source)
    plan = plan_split(corpus, 0.1, silent)
    write(tmp_path / "a.jsonl", texts[:40])
    with pytest.raises(DataError, match=r"changed while it was read \(50 documents, then 40\)"):
        list(split_records(corpus, plan))
