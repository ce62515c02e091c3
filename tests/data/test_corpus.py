"""Every form of source gives the right documents; every mistake is named by file, line and key."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from meshwright.config import parse_config
from meshwright.data import corpus
from meshwright.data.corpus import documents, source_identity, source_name
from meshwright.data.records_section import Picks
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.ranks.foreign import RefusedError


def test_stdlib_is_python_source_without_tests() -> None:
    first = next(iter(documents("stdlib")))
    assert "import" in first
    listed = [name for name, _ in source_identity("stdlib")[2]]  # type: ignore[attr-defined]
    assert listed == sorted(listed)
    assert "asyncio/events.py" in listed
    assert not [name for name in listed if "site-packages" in name or "/test/" in name or name.startswith("test/")]
    assert source_name("stdlib").startswith("stdlib of Python 3.")


@pytest.mark.parametrize("name", ["a.txt", "a.md", "README.md", "a.py", "wiki.train.tokens", "wiki.train", "text8"])
def test_a_text_file_is_one_document(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(" = Title = \r\n\n text <unk> é\n".encode())
    assert list(documents(str(tmp_path / name))) == [" = Title = \r\n\n text <unk> é\n"]


def test_jsonl_takes_the_text_of_every_line_and_leaves_out_blanks(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n{"id": 3, "text": "t\\nwo \\ud83d\\ude00"}\n{"text": " \\n"}\n')
    assert list(documents(str(path))) == ["one", "t\nwo 😀"]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"text": ', "line 2: is no JSON"),
        ('["text"]', "line 2: is no JSON object"),
        ('{"body": "x", "id": 1}', "line 2: has no key `text`; its keys: body, id"),
        ('{"text": 7}', "line 2: `text` holds no string but 7"),
        ('{"text": "\\ud800"}', "line 2: `text` has a lone surrogate at character 0"),
    ],
)
def test_jsonl_mistakes_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError) as caught:
        list(documents(str(path)))
    assert str(caught.value).startswith(f"{path} {message}")


def write_parquet(path: Path, **columns: list[object]) -> None:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def test_parquet_takes_the_text_column(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    texts = [f"document {number}" for number in range(3000)]
    write_parquet(path, id=list(range(3000)), text=list(texts))
    assert list(documents(str(path))) == texts


def test_parquet_mistakes_are_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    write_parquet(path, id=[1], body=["x"])
    with pytest.raises(DataError, match=r"a\.parquet: has no column `text`; its columns: id, body"):
        list(documents(str(path)))
    write_parquet(path, text=["x", None])
    with pytest.raises(DataError, match=r"a\.parquet row 1: `text` holds no string but None"):
        list(documents(str(path)))
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match=r"a\.parquet: is no readable parquet file"):
        list(documents(str(path)))


def test_a_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> ModuleType:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", absent)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(DataError, match=r'needs pyarrow: pip install "meshwright\[hf\]"'):
        list(documents(str(tmp_path)))


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.tokens").write_text("first")
    (tmp_path / "sub" / "c.md").write_text("third")
    (tmp_path / ".git" / "config").write_text("hidden")
    assert list(documents(str(tmp_path))) == ["first", "second", "third"]


def test_a_folder_skips_no_file_silently(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="holds no file to read"):
        list(documents(str(tmp_path)))
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.bin").write_bytes(b"ab\xff\xfe")
    with pytest.raises(DataError, match=r"b\.bin: has the suffix \.bin, which is not read; move it out of"):
        list(documents(str(tmp_path)))
    (tmp_path / "b.bin").rename(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt: is no UTF-8 text \(byte 2\)"):
        list(documents(str(tmp_path)))


def test_a_missing_source_is_named() -> None:
    with pytest.raises(DataError, match=r"nowhere/at-all: no such file or folder \(give `stdlib`"):
        list(documents("nowhere/at-all"))


def test_hugging_face_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": ["a b", "c", ""], "id": [1, 2, 3]})
    one.save_to_disk(str(tmp_path / "one"))
    assert list(documents(str(tmp_path / "one"))) == ["a b", "c"]
    datasets.DatasetDict({"train": one}).save_to_disk(str(tmp_path / "dict"))
    assert list(documents(str(tmp_path / "dict"))) == ["a b", "c"]
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(
        DataError, match=r"two: holds the splits train, test: give one of them, as data.split=train, or"
    ):
        list(documents(str(tmp_path / "two")))
    assert list(documents(str(tmp_path / "two"), Picks("test"))) == ["a b", "c"]
    with pytest.raises(DataError, match=r"data.split=dev: is no split of .*two; valid: train, test"):
        list(documents(str(tmp_path / "two"), Picks("dev")))
    assert list(documents(str(tmp_path / "two" / "test"))) == ["a b", "c"]
    one.remove_columns("text").save_to_disk(str(tmp_path / "bare"))
    with pytest.raises(DataError, match="bare: has no column `text`; its columns: id"):
        list(documents(str(tmp_path / "bare")))
    arrow = next((tmp_path / "one").glob("*.arrow"))
    with pytest.raises(DataError, match="give the folder that save_to_disk wrote"):
        list(documents(str(arrow)))
    arrow.write_bytes(b"no arrow")
    with pytest.raises(DataError, match="one: is no readable Hugging Face dataset"):
        list(documents(str(tmp_path / "one")))


def test_identity_changes_with_the_files_and_ignores_hidden_ones(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    before = source_identity(str(tmp_path))
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x").write_text("hidden")
    assert source_identity(str(tmp_path)) == before
    (tmp_path / "a.txt").write_text("longer text")
    assert source_identity(str(tmp_path)) != before
    assert source_name(str(tmp_path)) == tmp_path.name
    assert corpus.STDLIB == "stdlib"


def test_pipes_and_devices_are_refused(tmp_path: Path) -> None:
    """No pipe or device is opened: a pipe waits for ever, and /dev/zero never ends."""
    os.mkfifo(tmp_path / "pipe.jsonl")
    for source in (str(tmp_path / "pipe.jsonl"), "/dev/zero"):
        with pytest.raises(DataError, match=f"{source}: is a pipe or a device, which may never end"):
            list(documents(source))
        with pytest.raises(ConfigError, match=f"data.source={source} is a pipe or a device, which may never end"):
            parse_config({"data": {"source": source}})
    with pytest.raises(ConfigError, match=r"data.tokenizer=/dev/zero is no such file"):
        parse_config({"data": {"tokenizer": "/dev/zero"}})


def test_a_folder_holds_files_alone(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="pipe: is a pipe, a device or a link to nothing; move it out of the source"):
        list(documents(str(tmp_path)))
    (tmp_path / "pipe").unlink()
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(DataError, match="gone: is a pipe, a device or a link to nothing"):
        list(documents(str(tmp_path)))
    (tmp_path / "gone").unlink()
    (tmp_path / "linked.txt").symlink_to(tmp_path / "a.txt")
    with pytest.raises(RefusedError, match=r"linked.txt is a link to .*copy the file into the folder"):
        list(documents(str(tmp_path)))
    assert list(documents(str(tmp_path / "linked.txt"))) == ["text"]  # a source that the user names may be a link


def test_a_folder_that_leads_back_to_itself(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "loop").symlink_to(tmp_path)
    with pytest.raises(DataError, match="loop: is a link to a folder, which is not followed"):
        list(documents(str(tmp_path)))
    (tmp_path / "self").symlink_to(tmp_path / "self")
    with pytest.raises(DataError, match="self: no such file or folder"):
        list(documents(str(tmp_path / "self")))


def test_characters_are_named_in_the_order_of_the_code_charts() -> None:
    texts = list(documents("unicode"))
    assert texts[0].startswith("SPACE\nEXCLAMATION MARK\nQUOTATION MARK\n")
    assert all(text.endswith("\n") for text in texts)
    names = "".join(texts).splitlines()
    assert len(names) > 20_000
    assert len(names) == len(set(names))
    assert not any("IDEOGRAPH" in name or any(letter.isdigit() for letter in name) for name in names)
    assert source_name("unicode").startswith("names of Unicode 1")


def test_json_lists_and_csv_tables(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('[{"text": "one", "more": 1}, "two"]')
    assert list(documents(str(tmp_path / "a.json"))) == ["one", "two"]
    (tmp_path / "b.csv").write_text('id,text\n1,"three, with a ""quote"" and\na line"\n2,four\n')
    assert list(documents(str(tmp_path / "b.csv"))) == ['three, with a "quote" and\na line', "four"]
    with pytest.raises(DataError, match=r"holds files of several forms: json \(a.json\), csv \(b.csv\)"):
        list(documents(str(tmp_path)))


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.json", '{"text": "one"}', r"a.json: is one JSON object of the keys text; wanted a list of records"),
        ("a.json", "[1", r"a.json: is no JSON: "),
        ("a.json", '[{"txt": "one"}]', r"a.json record 1: has no key `text`; its keys: txt"),
        ("a.json", '["one", 2]', r"a.json record 2: is no JSON object; wanted"),
        ("a.csv", "id,txt\n1,one\n", r"a.csv: has no column `text`; its columns: id, txt"),
        ("a.csv", "id,text\n1\n", r"a.csv line 2: has fewer fields than the first line"),
        ("a.csv", "id,text\n1,one,two\n", r"a.csv line 2: has more fields than the first line"),
        ("a.csv", 'id,text\n1,"one\n', r"a.csv: is no csv table: unexpected end of data"),
    ],
)
def test_bad_json_and_csv_are_named_with_their_place(name: str, content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=message):
        list(documents(str(tmp_path / name)))


def test_a_data_set_of_the_hub_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Hub is a fake, without network."""
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(name: str, configuration: str | None, *, split: str, streaming: bool) -> Any:
        asked.append((name, configuration, split, streaming))
        if name == "no/such":
            raise ConnectionError("Couldn't reach the Hub")
        return iter([{"text": "one"}, {"text": " "}, {"text": "two"}])

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert list(documents("hub:me/mine:en")) == ["one", "two"]
    assert asked == [("me/mine", "en", "train", True)]
    with pytest.raises(DataError, match=r"hub:no/such: cannot be read: ConnectionError: Couldn't reach the Hub"):
        list(documents("hub:no/such"))
    assert parse_config({"data": {"source": "hub:me/mine"}}).data.sources == ("hub:me/mine",)
    with pytest.raises(ConfigError, match=r"data.source=hub:me/mine is not what a vit reads"):
        parse_config({"model": {"family": "vit"}, "data": {"source": "hub:me/mine"}})
