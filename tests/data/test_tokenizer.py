"""Text is unchanged after tokens and back, and training gives the same tokenizer every time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.data.tokenizer import (
    END,
    Tokenizer,
    byte_tokenizer,
    load_tokenizer,
    parse_tokenizer,
    pieces,
    tokenizer_kind,
    train_bpe,
)
from meshwright.ranks.errors import DataError

TEXTS = [f"def function_{n}(value):\n    return value + {n}  # naïve ✓\n" for n in range(200)]


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(TEXTS, 400)


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return byte_tokenizer()


@settings(deadline=None)
@given(text=st.text())
def test_bytes_round_trip(plain: Tokenizer, text: str) -> None:
    ids = plain.encode(text)
    assert ids == list(text.encode())
    assert plain.decode(ids) == text


@settings(deadline=None)
@given(text=st.text() | st.lists(st.sampled_from(["def", " ", "\n", "  ", END, "ï", "value"])).map("".join))
def test_bpe_round_trip(bpe: Tokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert bpe.end not in ids


def test_sizes_and_end(bpe: Tokenizer) -> None:
    assert (byte_tokenizer().vocabulary_size, byte_tokenizer().end) == (257, 256)
    assert bpe.vocabulary_size == 400
    assert bpe.decode([bpe.end]) == END
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0].encode()) / 2
    with pytest.raises(DataError, match="token 400 is not in the tokenizer's vocabulary of 400"):
        bpe.decode([400])


def test_training_is_deterministic(bpe: Tokenizer) -> None:
    assert train_bpe(TEXTS, 400).to_json() == bpe.to_json()
    assert train_bpe(TEXTS[:50], 400).to_json() != bpe.to_json()


def test_batches_are_the_texts_one_by_one(bpe: Tokenizer) -> None:
    assert bpe.encode_batch(TEXTS[:3]) == [bpe.encode(text) for text in TEXTS[:3]]


def test_a_saved_tokenizer_is_the_same(bpe: Tokenizer, tmp_path: Path) -> None:
    for tokenizer in (bpe, byte_tokenizer()):
        tokenizer.save(tmp_path / "tokenizer.json")
        loaded = load_tokenizer(tmp_path / "tokenizer.json")
        assert loaded.to_json() == tokenizer.to_json()
        text = f"naïve {END} ✓"
        assert loaded.encode(text) == tokenizer.encode(text)
        assert (loaded.vocabulary_size, loaded.end) == (tokenizer.vocabulary_size, tokenizer.end)


def test_other_end_tokens_are_found(bpe: Tokenizer) -> None:
    assert parse_tokenizer(bpe.to_json().replace(END, "</s>"), "x").end == bpe.end
    with pytest.raises(DataError, match=r"x: has no end-of-text token; looked for <\|endoftext\|>, .*</s>"):
        parse_tokenizer(bpe.to_json().replace(END, "<stop>"), "x")


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer\.json: cannot be read"):
        load_tokenizer(path)
    path.write_text(json.dumps({"not": "a tokenizer"}))
    with pytest.raises(DataError, match=r"tokenizer\.json: is no tokenizer\.json of Hugging Face"):
        load_tokenizer(path)


def test_sizes_of_bpe_are_checked() -> None:
    assert tokenizer_kind("bpe:4096") == "bpe:4096"
    assert tokenizer_kind("bytes") == "bytes"
    for kind in ("bpe:", "bpe:many", "bpe:256"):
        with pytest.raises(DataError, match=f"tokenizer {kind}: .*SIZE >= 257"):
            tokenizer_kind(kind)
    with pytest.raises(DataError, match=r"bpe:100: .*257 or more"):
        train_bpe(TEXTS, 100)


@settings(deadline=None)
@given(
    text=st.lists(st.sampled_from(["def", " ", "\n", "  ", "'s", "ï", "value", "\t", "12", "\u00a0"])).map("".join),
    characters=st.integers(1, 12),
)
def test_pieces_have_the_tokens_of_the_whole(bpe: Tokenizer, text: str, characters: int) -> None:
    parts = list(pieces(text, characters))
    assert "".join(parts) == text
    assert [token for ids in bpe.encode_batch(parts) for token in ids] == bpe.encode(text)
    assert sum(len(part.split()) for part in parts) == len(text.split())


def test_pieces_are_short() -> None:
    parts = list(pieces("word " * 1000, 100))
    assert max(map(len, parts)) <= 110
    assert len(list(pieces("x" * 1000, 100))) == 1
