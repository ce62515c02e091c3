"""The one reader: each suffix of the table gives the same records, splits are chosen, others are refused by reason."""

from __future__ import annotations

import bz2
import csv
import gzip
import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import parse_config
from meshwright.data.corpus import documents, source_identity, text_corpus
from meshwright.data.dialogues import read_dialogues
from meshwright.data.files import silent
from meshwright.data.forms_section import SUFFIXES, form_of
from meshwright.data.packing import pack, prepare
from meshwright.data.records_section import Picks
from meshwright.data.source_files import choose_files, split_of
from meshwright.data.told import printable, read_lines
from meshwright.ranks.errors import ConfigError, DataError

TEXTS = ["one", "two, with a comma", 'a "quote"', "naïve 日本", "x" * 200_000]
RECORDS = [{"id": number, "text": text, "empty": None} for number, text in enumerate(TEXTS)]
TALK = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]}


def lines(records: list[Any], end: str = "\n") -> bytes:
    return "".join(json.dumps(record, ensure_ascii=False) + end for record in records).encode()


def csv_text(delimiter: str) -> bytes:
    if delimiter == "\t":
        return "".join(f"{a}\t{b}\n" for a, b in [("id", "text"), *enumerate(TEXTS)]).encode()
    rows = ["id,text", *(f'{number},"{text.replace(chr(34), chr(34) * 2)}"' for number, text in enumerate(TEXTS))]
    return "".join(f"{row}\r\n" for row in rows).encode()


BYTES: dict[str, bytes] = {
    "a.jsonl": lines(RECORDS),
    "a.ndjson": lines(RECORDS),
    "a.jsonlines": lines(RECORDS),
    "A.JSONL": lines(RECORDS),
    "bom.jsonl": b"\xef\xbb\xbf" + lines(RECORDS),
    "windows.jsonl": lines(RECORDS, "\r\n"),
    "blank.jsonl": b"\n \n" + lines(RECORDS) + b"\n\r\n  \n",
    "strings.jsonl": lines(TEXTS),
    "list.json": json.dumps(RECORDS).encode(),
    "texts.json": json.dumps(TEXTS).encode(),
    "bom.json": b"\xef\xbb\xbf" + json.dumps(RECORDS).encode(),
    "lines.json": lines(RECORDS),
    "a.csv": csv_text(","),
    "bom.csv": b"\xef\xbb\xbf" + csv_text(","),
    "a.tsv": csv_text("\t"),
    "a.tab": csv_text("\t"),
}
PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("name", BYTES)
@pytest.mark.parametrize("suffix", ["", *PACKED])
def test_every_form_gives_the_same_records(name: str, suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"{name}{suffix}"
    path.write_bytes(PACKED.get(suffix, bytes)(BYTES[name]))
    assert list(documents(str(path))) == TEXTS


def test_zstandard(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    path = tmp_path / "a.jsonl.zst"
    with pyarrow.output_stream(str(path), compression="zstd") as file:
        file.write(lines(RECORDS))
    assert list(documents(str(path))) == TEXTS
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"a\.jsonl\.zst"):
        list(documents(str(path)))


def test_text_files_lose_their_mark_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert list(documents(str(tmp_path / "a.txt"))) == ["one\r\ntwo"]
    (tmp_path / "text8.gz").write_bytes(gzip.compress(b"one"))
    assert list(documents(str(tmp_path / "text8.gz"))) == ["one"]


@pytest.mark.parametrize(
    "name, reason",
    [
        ("a.xyz", "has the suffix .xyz, which is not read; rename it after its form: text .txt"),
        ("a.jsn", "has the suffix .jsn, which is not read"),
        ("a.pdf", "has the suffix .pdf, which is not read"),
        ("a.html", "has the suffix .html, which is not read"),
        ("a.docx", "has the suffix .docx, which is not read"),
        ("a.pkl", "has the suffix .pkl, which is not read"),
        ("a.jsonl.lz4", "has the suffix .lz4, which is not read"),
        ("a.xyz.gz", "has the suffix .xyz, which is not read"),
        ("a.tar.gz", "is an archive; unpack it"),
        ("a.zip", "is an archive; unpack it"),
        ("a.arrow", "is a part of a Hugging Face dataset; give the folder that save_to_disk wrote"),
        ("a.parquet.gz", "compressed once more; unpack the .gz"),
    ],
)
def test_unknown_suffixes_are_refused_alone_and_in_a_folder(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(lines(RECORDS))
    with pytest.raises(DataError) as alone:
        list(documents(str(tmp_path / name)))
    assert reason in str(alone.value)
    with pytest.raises(ConfigError) as configured:
        parse_config({"data": {"source": str(tmp_path / name)}})
    assert reason.split(";", maxsplit=1)[0] in str(configured.value)
    (tmp_path / "b.jsonl").write_bytes(lines(RECORDS))
    with pytest.raises(DataError, match=f"{name}: .*move it out of"):
        list(documents(str(tmp_path)))


@pytest.mark.parametrize(
    "name, data, reason",
    [
        ("a.json", b'{"text": "one"}', "is one JSON object of the keys text; wanted a list of records"),
        ("a.json", b'{"data": [{"text": "a"}], "version": 1}', "is one JSON object of the keys data, version"),
        ("a.json", b"3", "is no JSON list"),
        ("a.jsonl", b'{"text": "a"}\n{"text": ', "line 2: is no JSON"),
        ("a.jsonl", b"[" * 100_000, "line 1: is no JSON"),
        ("a.json", b"[" * 100_000, "is no JSON"),
        ("a.jsonl", '{"text": "a"}'.encode("utf-16"), "line 1: is no JSON"),
        ("a.csv", b"\xff\xfe", "is no UTF-8 text"),
        ("a.csv", b"text,text\na,b\n", "has the column `text` twice; rename one"),
        ("a.tsv", b"0\tone\tun\n1\ttwo\tdeux\n", "has no column `text`; its columns: 1, 2, 3; name one as data.column"),
        ("a.csv", b"0,1\n2,3\n", "has no column `text`; its columns: 1, 2; name one as data.column"),
        ("a.tsv", b"id\ttext\n1\n", "line 2: has fewer fields than the first line"),
        ("a.jsonl.gz", b"no gzip", "cannot be read"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 9, mtime=0)[:-9], "cannot be read"),
        ("a.jsonl.xz", b"no xz", "cannot be read"),
        ("a.jsonl", b'{"content": "a", "title": "b"}', "its keys: content, title; name one as data.column"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(name: str, data: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError) as refusal:
        list(documents(str(tmp_path / name)))
    assert f"{name}" in str(refusal.value)
    assert reason in str(refusal.value)


def test_a_column_by_name(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("title,body\nx,one\ny,two\n")
    assert list(documents(str(path), Picks(column="body"))) == ["one", "two"]
    for words in ({"source": "stdlib"}, {"source": str(tmp_path / "a.txt")}):
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(ConfigError, match=r"data.column=body has no effect: data.source="):
            parse_config({"data": words | {"column": "body"}})
    (tmp_path / "b.json").write_text('["one"]')
    with pytest.raises(DataError, match=r"record 1: is a text and has no keys: data.column=body has no effect"):
        list(documents(str(tmp_path / "b.json"), Picks(column="body")))


@pytest.mark.parametrize("name, mark", [("a.csv", ","), ("a.tsv", "\t")])
def test_a_table_whose_first_row_has_a_number_has_no_names(name: str, mark: str, tmp_path: Path) -> None:
    path = tmp_path / name

    def write(*rows: tuple[str, ...]) -> None:
        path.write_text("".join(f"{mark.join(row)}\n" for row in rows))

    for rows in ((("0", "one"), ("1", "two")), (("one", "-1.5"), ("two", "2e3")), (("5 ", "one"), ("x", "two"))):
        write(*rows)
        assert list(documents(str(path))) == ["one", "two"]
    write(("0", "one", "un"), ("1", "two", "deux"))
    assert list(documents(str(path), Picks(column="3"))) == ["un", "deux"]
    for picks, lacks in ((Picks(), "text"), (Picks(column="4"), "4")):
        with pytest.raises(DataError, match=f"has no column `{lacks}`; its columns: 1, 2, 3"):
            list(documents(str(path), picks))
    write(("2023", "text"), ("1", "two"))
    assert list(documents(str(path))) == ["two"], "a wanted name is a name"
    for names in (("name", "inf"), ("nan", "body"), ("infinity", "1_0")):  # numbers to Python, and names in a table
        write(names, ("one", "two"))
        with pytest.raises(DataError, match=f"has no column `text`; its columns: {names[0]}, {names[1]}"):
            list(documents(str(path)))


def test_dialogues_of_every_form(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    filled = {**TALK, "id": None, "tools": None}
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n" + lines([filled, TALK]) + b"\n"))
    (tmp_path / "a.ndjson").write_bytes(lines([TALK, TALK]))
    (tmp_path / "a.json").write_text(json.dumps([TALK, TALK]))
    (tmp_path / "b.json").write_text(json.dumps([{"talk": TALK["messages"], "messages": []}] * 2))
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]
    (tmp_path / "c.json").write_text(json.dumps([{"talk": turns}] * 2))
    parquet.write_table(pyarrow.Table.from_pylist([TALK, TALK]), tmp_path / "a.parquet")
    for name in ("a.jsonl.gz", "a.ndjson", "a.json", "a.parquet", "b.json", "c.json"):
        picks = Picks(column="talk" if name[0] in "bc" else None)
        told = [dialogue.messages for dialogue in read_dialogues(str(tmp_path / name), (), picks)]
        assert [list(messages) for messages in told] == [TALK["messages"]] * 2, name
        words = {"source": str(tmp_path / name), "column": picks.column, "kind": "messages"}
        with pytest.raises(ConfigError, match="gives no chat template"):  # claimed as dialogues without data.kind
            parse_config({"model": {"family": "llama"}, "data": {key: words[key] for key in ("source", "column")}})
    (tmp_path / "two.json").write_text(json.dumps([TALK | {"conversations": turns}]))
    with pytest.raises(DataError, match=r"has messages and conversations; name the one to learn as data.column"):
        list(read_dialogues(str(tmp_path / "two.json"), ()))


@pytest.mark.parametrize(
    "name, split",
    [
        ("train.jsonl", "train"), ("train-00000-of-00002.parquet", "train"),
        ("data/test-00000-of-00001.parquet", "test"),
        ("validation_1.csv", "validation"), ("dev.tsv", "validation"), ("wiki.valid.tokens", "validation"),
        ("wiki.train.raw", "train"), ("c4-train.00000-of-01024.json.gz", "train"), ("data/train/0001.parquet", "train"),
        ("en-test/part.jsonl", "test"), ("train_sft-00000-of-00003.parquet", "train_sft"), ("TEST.jsonl.gz", "test"),
        ("part-00000-of-00008.parquet", "part"), ("contest.jsonl", None), ("trainee.jsonl", None), ("a.jsonl", None),
        ("test_names.py", None), ("src/test/a.java", None), ("wiki.train", "train"), ("latest.txt", None),
    ],
)  # fmt: skip
def test_names_show_splits(name: str, split: str | None) -> None:
    assert split_of(Path(name)) == split


def write(folder: Path, *names: str) -> str:
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = f"{name} text"
        path.write_text(text if form_of(path) in ("text", None) else json.dumps({"text": text}) + "\n")
    return str(folder)


@pytest.mark.parametrize(
    "names, split, read",
    [
        (["train.jsonl", "README.md", "LICENSE", "dataset_infos.json", ".gitattributes"], None, ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "train", ["train.jsonl"]),
        (["train.jsonl", "test.jsonl"], "test", ["test.jsonl"]),
        (["train.jsonl", "dev.jsonl"], "validation", ["dev.jsonl"]),
        (["train.jsonl", "dev.jsonl"], "dev", ["dev.jsonl"]),
        (["train.jsonl", "extra.jsonl"], "train", ["train.jsonl"]),
        (["train/1.jsonl", "train/0.jsonl.gz", "test/0.jsonl"], "train", ["train/1.jsonl"]),
        (["train_sft-0-of-1.jsonl", "test_sft-0-of-1.jsonl"], "train_sft", ["train_sft-0-of-1.jsonl"]),
        (["a.jsonl", "b.jsonl"], None, ["a.jsonl", "b.jsonl"]),
        (["notes.md", "test.md", "README.md"], None, ["notes.md", "test.md"]),
        (["train.py", "test_train.py", "lib/eval.py"], None, ["lib/eval.py", "test_train.py", "train.py"]),
        (["train.txt", "valid.txt", "test.txt"], "train", ["train.txt"]),
        (["part-0-of-2.jsonl", "part-1-of-2.jsonl"], None, ["part-0-of-2.jsonl", "part-1-of-2.jsonl"]),
    ],
)  # fmt: skip
def test_a_folder_is_its_data(names: list[str], split: str | None, read: list[str], tmp_path: Path) -> None:
    source = write(tmp_path, *(name for name in names if not name.endswith(".gz")))
    told = list(documents(source, Picks(split)))
    assert told == [f"{name} text" for name in read]
    corpus = text_corpus(source, Picks(split))
    hidden = {name for name in names if name.startswith(".") or name.endswith(".gz")}
    assert set(corpus.names) | set(corpus.left_out) == {*names} - hidden


@pytest.mark.parametrize(
    "names, split, reason",
    [
        (["train.jsonl", "test.jsonl"], None, "holds the splits train, test: give one of them, as data.split=train"),
        (["data/train-00000-of-00001.jsonl", "data/test-00000-of-00001.jsonl"], None, "splits train, test"),
        (["train.jsonl", "extra.jsonl"], None, "holds the splits train and files of none"),
        (["train.txt", "valid.txt", "test.txt"], None, "holds the splits train, validation, test"),
        (["wiki.train.tokens", "wiki.test.tokens"], None, "holds the splits train, test"),
        (["test.jsonl", "more.jsonl"], None, "holds the splits test and files of none"),
        (["train_sft-0-of-1.jsonl", "train_gen-0-of-1.jsonl"], None, "holds the splits train_gen, train_sft"),
        (["train.jsonl", "test.jsonl"], "dev", "data.split=dev: is no split of"),
        (["a.jsonl"], "train", "shows a split by its name; leave it out"),
        (["a.jsonl", "b.csv"], None, "holds files of several forms: jsonl (a.jsonl), csv (b.csv)"),
        (["a.jsonl", "notes.md"], None, "holds files of several forms"),
        (["main/train-0-of-1.jsonl", "socratic/train-0-of-1.jsonl"], None, "several data sets, in main, socratic"),
        (["README.md", "LICENSE"], None, "holds no file to read but LICENSE, README.md, which is no data"),
    ],
)  # fmt: skip
def test_a_split_is_never_guessed(names: list[str], split: str | None, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as refusal:
        list(documents(write(tmp_path, *names), Picks(split)))
    assert reason in str(refusal.value)


def test_a_split_without_an_effect_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "a.jsonl")
    for source in ("stdlib", str(tmp_path / "a.jsonl")):
        with pytest.raises(ConfigError, match=r"data.split=train has no effect: data.source="):
            parse_config({"data": {"source": source, "split": "train"}})


def test_links_of_the_hubs_cache_keep_their_names(tmp_path: Path) -> None:
    """In the Hub's cache, a file is a link to a file named by a hash."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "0a1b").write_bytes(lines([{"text": "one"}]))
    (tmp_path / "a.jsonl").symlink_to(tmp_path / "blobs" / "0a1b")
    assert list(documents(str(tmp_path / "a.jsonl"))) == ["one"]


def test_other_picks_are_another_corpus(tmp_path: Path) -> None:
    source = write(tmp_path, "train.jsonl", "test.jsonl")
    every = [source_identity(source, picks) for picks in (Picks("train"), Picks("test"), Picks("train", "body"))]
    assert len({json.dumps(one) for one in every}) == 3
    # 0.1.0 read a.ndjson as one text, so its prepared data must not pass for the records.
    (tmp_path / "a.ndjson").write_text("{}")
    assert source_identity(str(tmp_path / "a.ndjson"))[-1] == "as jsonl"


def test_the_header_and_two_lines_say_what_was_read(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "train.jsonl", "test.jsonl", "README.md")
    texts = [{"text": f"document {number}\x1b[31m of some"} for number in range(30)]
    (tmp_path / "in" / "train.jsonl").write_bytes(lines(texts))
    packed = pack(text_corpus(source, Picks("train")), "bytes", tmp_path / "out", 0.2)
    read = json.loads((tmp_path / "out" / "header.json").read_text())["read"]
    assert (read["files"], read["names"], read["split"], read["records"]) == (1, ["train.jsonl"], "train", 30)
    assert read["left_out"] == ["README.md", "test.jsonl"]
    assert (read["first"], read["last"]) == tuple(printable(texts[at]["text"]) for at in (0, -1))
    first, last = read_lines(packed)
    tokens = packed.header.train.tokens + packed.header.validation.tokens
    assert first.startswith(f"read: in: 30 documents of 1 file (train.jsonl), split train: {tokens:,} tokens (")
    assert first.endswith("; left out README.md, test.jsonl")
    assert last == f'first "{read["first"]}", last "{read["last"]}"'
    assert "\x1b" not in last


def test_nothing_held_out(tmp_path: Path) -> None:
    packed = prepare(write(tmp_path / "in", "a.jsonl"), "bytes", tmp_path / "out", 0)
    assert (packed.header.validation.tokens, len(packed.tokens("validation"))) == (0, 0)
    assert (tmp_path / "out" / "validation.bin").stat().st_size == 0
    assert "(none held out)" in next(iter(read_lines(packed)))
    again = prepare(str(tmp_path / "in"), "bytes", tmp_path / "out", 0)
    again.check_files(tmp_path / "cache")
    config = parse_config({"data": {"source": str(tmp_path / "out"), "validation": 0, "sequence": 8}})
    assert config.data.open(config, config.data.prepare(config, silent)).held_out is None


def test_a_text_of_one_line_is_cut_at_a_space(tmp_path: Path) -> None:
    words = "the cat sat on a mat " * 12000
    for name, text in (("one.txt", words), ("end.txt", words + "\n"), ("title.txt", "title\n" + words)):
        (tmp_path / name).write_text(text)
        packed = prepare(str(tmp_path / name), "bytes", tmp_path / f"out-{name}", 0.05)
        held_out = packed.tokens("validation").tobytes().decode("utf-16-le")[:-1]
        assert len(held_out) == pytest.approx(0.05 * len(text), rel=0.01)
        assert held_out.startswith(" ")
        assert held_out.split()[0] in words.split()[:6]
    (tmp_path / "no-space.txt").write_text("天地玄黃" * 1000)
    packed = prepare(str(tmp_path / "no-space.txt"), "bytes", tmp_path / "out", 0.05)
    assert packed.header.validation.tokens == pytest.approx(0.05 * 12000, rel=0.02)


def test_the_table_of_forms_is_whole() -> None:
    every = [suffix for suffixes in SUFFIXES.values() for suffix in suffixes]
    assert len(every) == len(set(every))
    assert all(form_of(Path(f"a{suffix}")) == form for form, suffixes in SUFFIXES.items() for suffix in suffixes)


def test_pythons_limit_of_a_field_is_no_limit(tmp_path: Path) -> None:
    csv.field_size_limit(131_072)
    (tmp_path / "a.csv").write_text(f'text\n"{"word " * 40_000}"\n')
    assert [len(text) for text in documents(str(tmp_path / "a.csv"))] == [200_000]
    assert choose_files(str(tmp_path)).form == "csv"
