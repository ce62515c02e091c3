"""A large text file is packed piece by piece into the same bytes as a small file, in little memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from meshwright.data import long_text, records
from meshwright.data.files import Rate
from meshwright.data.long_text import LongText
from meshwright.data.packing import prepare
from meshwright.data.tokenizer import LONG_PIECE, SHORT_PIECE, byte_tokenizer, pieces, splits_at_spaces, train_bpe
from meshwright.ranks.errors import DataError

LINES = [f"line {number}: naïve 日本 and {'word ' * (number % 30)}" for number in range(3000)]
TEXT = "\n".join(LINES) + "\n"


def chunk_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make files of 1,000 bytes large, and let chunks end inside of characters."""
    monkeypatch.setattr(records, "LARGE_BYTES", 1000)
    monkeypatch.setattr(long_text, "_CHUNK_BYTES", 997)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    path = tmp_path / "in" / "a.txt"
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:400"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["", "marked"])
def test_the_prepared_bytes_are_those_of_a_string(
    tokenizer: str, mark: bytes, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.write_bytes(mark + TEXT.encode())
    prepare(str(source), tokenizer, tmp_path / "whole")
    chunk_finely(monkeypatch)
    prepare(str(source), tokenizer, tmp_path / "parts")
    for name in sorted(path.name for path in (tmp_path / "whole").iterdir()):
        assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name


def test_a_slice_has_its_characters(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_finely(monkeypatch)
    text = LongText.of_file(source)
    assert (len(text), str(text)) == (len(TEXT), TEXT)
    for start, stop in ((0, 0), (0, 60), (995, 1003), (5000, 70_000), (len(TEXT) - 3, len(TEXT) + 9), (9, 5)):
        assert str(text[start:stop]) == TEXT[start:stop]
        assert len(text[start:stop]) == len(TEXT[start:stop])
    assert list(pieces(text, 100)) == list(pieces(TEXT, 100))


def test_a_large_file_that_is_no_text_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunk_finely(monkeypatch)
    source.write_bytes(TEXT.encode() + b"\xff\xfe" + TEXT.encode())
    at = len(TEXT.encode())
    with pytest.raises(DataError, match=rf"a\.txt: is no UTF-8 text \(byte {at}\)"):
        prepare(str(source), "bytes", tmp_path / "out")
    source.write_text(" \n" * 2000)
    with pytest.raises(DataError, match=r"a\.txt: holds no text"):
        prepare(str(source), "bytes", tmp_path / "out")


MEMORY = """
import re, sys
from pathlib import Path
from meshwright.data import records
from meshwright.data.packing import prepare
records.LARGE_BYTES = 2**20
def most():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024
prepare(sys.argv[1], "bytes", Path(sys.argv[2]) / "small")
before = most()
prepare(sys.argv[3], "bytes", Path(sys.argv[2]) / "large")
print(most() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the memory")
def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    sizes = []
    for name, copies in (("small", 20), ("large", 120)):
        path = tmp_path / f"{name}.txt"
        path.write_text(TEXT * copies)
        sizes.append(path.stat().st_size)
    assert sizes[0] > 2**20
    command = [sys.executable, "-c", MEMORY, str(tmp_path / "small.txt"), str(tmp_path), str(tmp_path / "large.txt")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert int(found.stdout) < sizes[1] - sizes[0], "a string of the whole text takes four times that"


LLAMA_3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
PLAIN_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False)
SPLITTING: dict[str, tuple[Any, Any, list[AddedToken], bool]] = {
    "GPT-2": (BYTES, None, [], True),
    "Llama 3": (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA_3), "isolated"), PLAIN_BYTES]),
        None,
        [],
        True,
    ),
    "Metaspace": (pre_tokenizers.Metaspace(), None, [], True),
    "pairs across words": (PLAIN_BYTES, None, [], False),
    "only digits are split": (pre_tokenizers.Sequence([pre_tokenizers.Digits(True), PLAIN_BYTES]), None, [], False),
    "a normalizer that begins a text": (BYTES, normalizers.Prepend("_"), [], False),
    "added runs of spaces": (BYTES, None, [AddedToken("  ", special=False)], False),
    "added, with the space before": (BYTES, None, [AddedToken("q", special=False, lstrip=True)], False),
    "nothing": (None, None, [], False),
}


@pytest.mark.parametrize("name", SPLITTING)
def test_texts_are_cut_often_where_no_token_spans_a_space(name: str) -> None:
    splitting, normalizer, added, wanted = SPLITTING[name]
    trained = train_bpe([TEXT + "  q  q"], 400)
    library = tokenizers.Tokenizer.from_str(trained.to_json())
    library.add_tokens(added)
    for part, value in (("pre_tokenizer", splitting), ("normalizer", normalizer)):
        setattr(library, part, value)
    assert splits_at_spaces(library) == wanted
    text = "line 12:  q naïve 日本 and\n\n word  q" * 40
    cut = [token for part in pieces(text, 5) for token in library.encode(part).ids]
    assert not wanted or cut == library.encode(text).ids
    assert byte_tokenizer().piece_characters == LONG_PIECE
    assert trained.piece_characters == SHORT_PIECE


def test_a_rate_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, float | None]] = []
    clock = iter([0.0, 0.1, 2.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    rate = Rate(lambda text, share: told.append((text, share)), "tokenizing", 8_000_000)
    assert rate.counted("x" * 1_000_000) == "x" * 1_000_000
    rate.counted("x" * 3_000_000)
    assert told == [("tokenizing", None), ("tokenizing: 4.0 M characters, 2.00 M a second", 0.5)]
