"""A packed file that differs from the packed bytes is refused once, at the start, with the place of the difference."""

from __future__ import annotations

import json
import os
import random
import re
from hashlib import sha256
from pathlib import Path

import pytest

from meshwright.data import files
from meshwright.data.files import REGION_BYTES, FileSum, check_file, check_once
from meshwright.data.packed import PackedCorpus
from meshwright.data.packing import corpus_for, prepare
from meshwright.data.text_section import TextData
from meshwright.ranks.errors import DataError


@pytest.fixture
def corpus(tmp_path: Path) -> PackedCorpus:
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line number {number}\n" for number in range(1000)))
    return prepare(str(text), "bytes", tmp_path / "corpus", 0.1)


def take_up(corpus: PackedCorpus, cache: Path) -> None:
    corpus_for(TextData(source=str(corpus.folder)), cache)


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)


@pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json"])
def test_any_flipped_bit_is_refused(name: str, corpus: PackedCorpus, tmp_path: Path) -> None:
    """A flipped bit is refused also after a check that found the file whole."""
    path, choose = corpus.folder / name, random.Random(2)
    take_up(corpus, tmp_path / "cache")
    for _ in range(30):
        bit = choose.randrange(8 * path.stat().st_size)
        flip(path, bit)
        with pytest.raises(DataError, match=re.escape(f"{path}: is damaged (its checksum is not the header's)")):
            take_up(corpus, tmp_path / "cache")
        flip(path, bit)
    take_up(corpus, tmp_path / "cache")


@pytest.mark.parametrize("size", [0, 1, REGION_BYTES - 1, REGION_BYTES, REGION_BYTES + 1, 3 * REGION_BYTES])
@pytest.mark.parametrize("at_once", [2**16, 3 * 2**19, 2**30])
def test_sums_do_not_depend_on_how_bytes_come(size: int, at_once: int, tmp_path: Path) -> None:
    content = random.Random(3).randbytes(size)
    found = FileSum()
    for start in range(0, size, at_once):
        found.update(content[start : start + at_once])
    assert found.sha256 == sha256(content).hexdigest()
    assert len(found.regions) == -(-size // REGION_BYTES)
    path = tmp_path / "file"
    path.write_bytes(content)
    check_file(path, found.sha256, found.regions)


def test_region_is_named(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content = random.Random(4).randbytes(4 * REGION_BYTES + 5)
    path.write_bytes(content)
    found = FileSum()
    found.update(content)
    flip(path, 8 * (2 * REGION_BYTES + 77))
    begin = 2 * REGION_BYTES
    with pytest.raises(DataError, match=rf"not the header's\), bytes {begin} to {begin + REGION_BYTES - 1}; move"):
        check_file(path, found.sha256, found.regions)
    flip(path, 8 * (4 * REGION_BYTES + 1))
    with pytest.raises(DataError, match=rf"bytes {begin} to {begin + REGION_BYTES - 1} and 1 more regions; move"):
        check_file(path, found.sha256, found.regions)
    with pytest.raises(DataError, match=r"not the header's\); move"):  # a folder of version 0.1.0
        check_file(path, found.sha256, ())


def test_second_check_reads_nothing(corpus: PackedCorpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    whole = files.check_file
    monkeypatch.setattr(files, "check_file", lambda path, *rest: (checked.append(path.name), whole(path, *rest)))
    for _ in range(3):
        corpus.check_files(tmp_path / "cache")
    assert checked == ["tokenizer.json", "train.bin", "validation.bin"]
    os.utime(corpus.folder / "train.bin")
    corpus.check_files(tmp_path / "cache")
    assert checked[3:] == ["train.bin"]


def test_cache_that_cannot_be_written_costs_a_check(corpus: PackedCorpus, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    corpus.check_files(tmp_path / "cache")
    flip(corpus.folder / "train.bin", 5)
    with pytest.raises(DataError, match=r"train\.bin: is damaged"):
        corpus.check_files(tmp_path / "cache")


def test_id_beyond_the_vocabulary_is_named_by_its_place(corpus: PackedCorpus, tmp_path: Path) -> None:
    """The checksums are right: another program wrote the folder with this id."""
    path = corpus.folder / "train.bin"
    content = bytearray(path.read_bytes())
    content[200:202] = (257).to_bytes(2, "little")
    path.write_bytes(content)
    header = json.loads((corpus.folder / "header.json").read_text())
    header["sha256"]["train.bin"] = sha256(content).hexdigest()
    (corpus.folder / "header.json").write_text(json.dumps(header))
    remedy = "move the folder aside and prepare it again"
    text = f"{path}: holds token 257 at byte 200, and the vocabulary ends at 256; {remedy}"
    with pytest.raises(DataError, match=re.escape(text)):
        take_up(corpus, tmp_path / "cache")


def test_header_of_version_0_1_0_is_read(corpus: PackedCorpus, tmp_path: Path) -> None:
    header = json.loads((corpus.folder / "header.json").read_text())
    assert [len(header["regions"][name]) for name in ("train.bin", "validation.bin")] == [1, 1]
    del header["regions"]
    (corpus.folder / "header.json").write_text(json.dumps(header))
    take_up(corpus, tmp_path / "cache")


def test_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing: cannot be read: No such file or directory"):
        check_file(tmp_path / "nothing", "", ())
    (tmp_path / "file").write_bytes(b"abc")
    with pytest.raises(DataError, match="is damaged"):
        check_once(tmp_path, {"file": "0"}, {}, tmp_path / "cache")
