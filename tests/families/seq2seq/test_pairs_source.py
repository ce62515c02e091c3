"""Pairs of every form: the pairs read and their order, and the message for a bad line."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.families.seq2seq.data_section import PairData
from meshwright.families.seq2seq.pairs import MOST_CHARACTERS, docstring_pairs, function_pairs, pair_corpus
from meshwright.ranks.errors import DataError

PAIRS = [("one house", "ein Haus"), ("two\u2028houses", "zwei\x0cHäuser"), ("  three", "drei  ")]
BLANK = [("", "nothing"), ("nothing", " ")]


def data(source: Path | str, **fields: Any) -> PairData:
    return PairData(
        kind="pairs",
        source=str(source),
        **{name: str(at) if isinstance(at, Path) else at for name, at in fields.items()},
    )


def read(given: PairData) -> list[tuple[str, str]]:
    return [tuple(pair) for pair in pair_corpus(given).read()]


def two_files(folder: Path, left: list[str], right: list[str]) -> PairData:
    for name, lines in (("a.en", left), ("a.de", right)):
        (folder / name).write_bytes("".join(line + "\n" for line in lines).encode())
    return data(folder / "a.en", target=folder / "a.de")


def test_two_text_files(tmp_path: Path) -> None:
    both = [*PAIRS[:1], *BLANK, *PAIRS[1:]]
    given = two_files(tmp_path, [left for left, _ in both], [right for _, right in both])
    assert read(given) == PAIRS
    source = pair_corpus(given)
    assert source.name == "a.en, a.de"
    assert list(source.read()) == list(source.read())


def test_lines_that_end_as_on_windows_and_a_last_one_that_does_not(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\r\ntwo")
    (tmp_path / "b").write_bytes(b"eins\nzwei\n")
    assert read(data(tmp_path / "a", target=tmp_path / "b")) == [("one", "eins"), ("two", "zwei")]


@pytest.mark.parametrize("longer, left, right", [("a.en", 4, 2), ("a.de", 2, 3)])
def test_unequal_numbers_of_lines(tmp_path: Path, longer: str, left: int, right: int) -> None:
    given = two_files(tmp_path, ["x"] * left, ["y"] * right)
    with pytest.raises(DataError, match=rf"{longer} line 3: has no partner, .* ends after 2 lines"):
        read(given)


@pytest.mark.parametrize("name", ["a.tsv", "a.TSV", "a.tsv.gz"])
def test_tsv(tmp_path: Path, name: str) -> None:
    text = "".join(f"{left}\t{right}\n" for left, right in [*PAIRS, *BLANK]).encode() + b"\n"
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith("gz") else text)
    assert read(data(tmp_path / name)) == PAIRS


@pytest.mark.parametrize("line, columns", [("no tab", 1), ("a\tb\tc", 3)])
def test_a_tsv_line_of_another_number_of_columns(tmp_path: Path, line: str, columns: int) -> None:
    (tmp_path / "a.tsv").write_text(f"a\tb\n{line}\n")
    with pytest.raises(DataError, match=rf"a.tsv line 2: has {columns} columns; wanted: source, tab, target"):
        read(data(tmp_path / "a.tsv"))


RECORDS: list[tuple[dict[str, Any], tuple[str, str] | None]] = [
    ({"source": "one", "target": "eins", "more": 1}, None),
    ({"en": "one", "de": "eins"}, ("en", "de")),
    ({"translation": {"de": "eins", "en": "one"}}, ("en", "de")),
]


@pytest.mark.parametrize("record, languages", RECORDS)
def test_jsonl(tmp_path: Path, record: dict[str, Any], languages: tuple[str, str] | None) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n\n" + json.dumps(record) + "\n")
    assert read(data(tmp_path / "a.jsonl", languages=languages)) == [("one", "eins")] * 2
    if languages:
        assert read(data(tmp_path / "a.jsonl", languages=("de", "en"))) == [("eins", "one")] * 2


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"translation": {"en": "x", "de": "y"}}', r"has no key `source`; its keys: en, de; name two .*languages="),
        ('{"source": "x"}', r"has no key `target`; its keys: source; name"),
        ('{"translation": "x"}', r"`translation` is no JSON object; wanted"),
        ('{"source": "x", "target": 3}', r"`target` holds no string but 3"),
        ('{"source": "x", "target": "\\ud800"}', r"`target` has a lone surrogate at character 0"),
        ("[1]", r'is no JSON object; wanted {"source": ..., "target": ...}'),
        ("{", r"is no JSON: "),
    ],
)
def test_a_bad_jsonl_line(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"source": "x", "target": "y"}\n' + line + "\n")
    with pytest.raises(DataError, match=rf"a.jsonl line 2: {message}"):
        read(data(tmp_path / "a.jsonl"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b"a\tb\n\xff\t\n")
    with pytest.raises(DataError, match=r"a.tsv line 2: is no UTF-8 text"):
        read(data(tmp_path / "a.tsv"))
    whole = gzip.compress("".join(f"{number}\t{number}\n" for number in range(20000)).encode())
    for damaged in (whole[: len(whole) // 2], b"no gzip", whole[:5000] + b"\0\0\0\0" + whole[5004:]):
        (tmp_path / "b.tsv.gz").write_bytes(damaged)
        with pytest.raises(DataError, match=r"b.tsv.gz: cannot be read from line \d+ on"):
            read(data(tmp_path / "b.tsv.gz"))
    with pytest.raises(DataError, match=r"c.tsv: no such file or folder"):
        pair_corpus(data(tmp_path / "c.tsv"))
    with pytest.raises(DataError, match=r"is no file; pairs are in a tsv file, in records, or in two text files"):
        pair_corpus(data(tmp_path, target=str(tmp_path / "a.tsv")))
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match=r"a.txt: is a text without its partner"):
        pair_corpus(data(tmp_path / "a.txt"))


def test_an_identity_changes_with_every_file_and_with_the_languages(tmp_path: Path) -> None:
    given = two_files(tmp_path, ["x"], ["y"])
    first = pair_corpus(given).identity
    (tmp_path / "a.de").write_text("longer\n")
    assert first != pair_corpus(given).identity
    (tmp_path / "a.jsonl").write_text("{}")
    turned = [pair_corpus(data(tmp_path / "a.jsonl", languages=keys)).identity for keys in (("a", "b"), ("b", "a"))]
    assert turned[0] != turned[1]


MODULE = '''
import this

class Thing:
    """Not a function."""

    @property
    def size(self) -> int:
        """Its size,
        in elements.

        More of it.
        """
        # why
        return self.n  # of them

    async def wait(self):
        "Waits."
        def inner():
            \'\'\'Inner one.\'\'\'
            return 1
        return inner()

def nothing():
    """Only words."""

def undocumented():
    return 2

def blank():
    """  """
    return 3

def long():
    """Too long."""
    x = "{}"
    return x
'''


def test_functions_and_their_docstrings() -> None:
    assert list(function_pairs(MODULE.format("x" * MOST_CHARACTERS))) == [
        ("def size(self) -> int:\n    # why\n    return self.n  # of them", "Its size, in elements."),
        (
            "async def wait(self):\n    def inner():\n        '''Inner one.'''\n        return 1\n    return inner()",
            "Waits.",
        ),
        ("def inner():\n    return 1", "Inner one."),
    ]
    assert [summary for _, summary in function_pairs(MODULE.format("x"))][-1] == "Too long."
    assert list(function_pairs("def wrong(:\n    '''Doc.'''\n    return 1\n")) == []


def test_the_standard_library_is_pairs() -> None:
    pairs = list(itertools.islice(docstring_pairs(), 30))
    assert len(pairs) == 30
    assert all(code.startswith(("def ", "async def ")) and summary and "\n" not in summary for code, summary in pairs)
    assert not any(f'"""{summary}' in code for code, summary in pairs)
    assert pair_corpus(PairData(kind="pairs")).name.startswith("stdlib of Python 3.")
