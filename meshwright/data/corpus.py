"""The corpora that are packed: records of one text (documents), or of two (pairs: pairs.py).

Documents come out of the standard library's source, text, jsonl, parquet, a folder of these, or a Hugging Face dataset
folder. A document is a non-empty string. The order is the same on every machine that has the same files: folders are
walked sorted by relative path. Documents of white space alone carry nothing to learn and are left out.

Text and jsonl are read here, not by `datasets`: its readers copy the corpus into a cache of their own, take a second to
import, name no line in a mistake, and take some lines that are no JSON ({"text": 3, }) without a word.
"""

from __future__ import annotations

import importlib
import json
import platform
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from meshwright.data.section import STDLIB
from meshwright.errors import DataError

TEXT_KEY = "text"

# Python's own tests are three fifths of the library's bytes (19 of 31 MB), hold files that are wrong on purpose, and
# some distributions leave them out: without them the corpus is smaller, cleaner and the same everywhere.
# `encodings` is tables of code points that a generator wrote.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """A source that can be read again and again."""

    kind: Literal["text", "pairs"]
    where: str
    """The source as given, for messages."""
    name: str
    """A short name that has no path of this machine in it."""
    identity: list[object]
    """Facts that change when the source does, known without reading it."""
    read: Callable[[], Iterator[tuple[str, ...]]]
    """Every record, in the same order each time."""


def text_corpus(source: str) -> Corpus:
    """The documents of a source."""

    def read() -> Iterator[tuple[str, ...]]:
        return ((document,) for document in documents(source))

    return Corpus("text", source, source_name(source), source_identity(source), read)


def documents(source: str) -> Iterator[str]:
    """Every document of `source`: `stdlib`, or the path of a file or folder.

    Raises DataError naming the file, the line (jsonl) or row (parquet), and the key that is missing.
    """
    if source == STDLIB:
        texts = _stdlib_documents()
    else:
        path = _existing(source)
        texts = _folder_documents(path) if path.is_dir() else _file_documents(path)
    return (document for document in texts if document.strip())


def source_name(source: str) -> str:
    """A short name of the source that has no path of this machine in it."""
    return f"stdlib of Python {platform.python_version()}" if source == STDLIB else _existing(source).resolve().name


def source_identity(source: str) -> list[object]:
    """Facts that change when the source does, known without reading it: names, sizes and, of paths, times of change."""
    if source == STDLIB:
        listed = [(name, path.stat().st_size) for name, path in _stdlib_files()]
        return [STDLIB, platform.python_version(), listed]
    path = _existing(source).resolve()
    files = [path] if path.is_file() else _folder_files(path)
    return [str(path), [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]]


def _existing(source: str) -> Path:
    path, valid = Path(source).expanduser(), f"(give `{STDLIB}`, a file, or a folder)"
    if not path.exists():
        raise DataError(f"{source}: no such file or folder {valid}")
    if not path.is_file() and not path.is_dir():
        raise DataError(f"{source}: is a pipe or a device, which may never end {valid}")
    return path


def _stdlib_files() -> list[tuple[str, Path]]:
    """(name within the library, path), sorted by name."""
    root = Path(sysconfig.get_path("stdlib"))
    named = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return sorted((name.as_posix(), path) for name, path in named if not _LEFT_OUT.intersection(name.parts))


def _stdlib_documents() -> Iterator[str]:
    for _, path in _stdlib_files():
        # A source file in another encoding (PEP 263) is left out: nothing the user could mend.
        with suppress(UnicodeDecodeError):
            yield path.read_bytes().decode()


def _folder_documents(folder: Path) -> Iterator[str]:
    """The folder's files, hidden ones aside. Every other file must be readable: none is skipped silently."""
    if (folder / "state.json").is_file():
        yield from _dataset_documents(folder)
        return
    if (folder / "dataset_dict.json").is_file():
        yield from _dataset_documents(_only_split(folder))
        return
    files = _folder_files(folder)
    if not files:
        raise DataError(f"{folder}: holds no file to read (text, .jsonl or .parquet)")
    for path in files:
        yield from _file_documents(path)


def _folder_files(folder: Path) -> list[Path]:
    files = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        if any(part.startswith(".") or part == "__pycache__" for part in name.parts):
            continue
        if path.is_dir() and path.is_symlink():  # it may lead back to where it lies
            raise DataError(f"{path}: is a link to a folder, which is not followed; put the folder in its place")
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{path}: is a pipe, a device or a link to nothing; move it out of the source")
        if path.is_file():
            files[name.as_posix()] = path
    return [files[name] for name in sorted(files)]


def _file_documents(path: Path) -> Iterator[str]:
    match path.suffix.lower():
        case ".jsonl":
            yield from _jsonl_documents(path)
        case ".parquet":
            yield from _parquet_documents(path)
        case ".arrow":
            raise DataError(f"{path}: is a part of a Hugging Face dataset; give the folder that save_to_disk wrote")
        case _:
            try:
                yield path.read_bytes().decode()
            except UnicodeDecodeError as error:
                hint = "convert it to UTF-8, unpack it, or move it out of the source"
                raise DataError(f"{path}: is no UTF-8 text (byte {error.start}): {hint}") from error
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _jsonl_documents(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:
        for where, record in json_records(lines, path, f'{{"{TEXT_KEY}": ...}}'):
            if TEXT_KEY not in record:
                raise DataError(f"{where}: has no key `{TEXT_KEY}`; its keys: {', '.join(record) or 'none'}")
            yield checked_text(record[TEXT_KEY], where)


def json_records(lines: Iterable[str | bytes], path: Path, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(its place, the object) of every line that is not blank. Raises DataError where one is no object."""
    for number, line in enumerate(lines, start=1):
        where = f"{path} line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise DataError(f"{where}: is no JSON: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: is no JSON object; wanted {wanted}")
        yield where, record


def checked_text(value: object, where: str, key: str = TEXT_KEY) -> str:
    """A string that has a UTF-8 form: JSON may hold lone surrogates, which have none."""
    if not isinstance(value, str):
        raise DataError(f"{where}: `{key}` holds no string but {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: `{key}` has a lone surrogate at character {error.start}") from error
    return value


def _parquet_documents(path: Path) -> Iterator[str]:
    pyarrow = _library("pyarrow", path)
    parquet = _library("pyarrow.parquet", path)
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: is no readable parquet file: {error}") from error
    with file:
        _check_column(path, list(file.schema_arrow.names))
        row = 0
        try:
            for batch in file.iter_batches(batch_size=1024, columns=[TEXT_KEY]):
                for value in batch.column(0).to_pylist():
                    yield checked_text(value, f"{path} row {row}")
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: is damaged behind row {row}: {error}") from error


def _dataset_documents(folder: Path) -> Iterator[str]:
    pyarrow, datasets = _library("pyarrow", folder), _library("datasets", folder)
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: is no readable Hugging Face dataset: {error}") from error
    _check_column(folder, list(dataset.column_names))
    for row, record in enumerate(dataset.select_columns([TEXT_KEY])):
        yield checked_text(record[TEXT_KEY], f"{folder} row {row}")


def _only_split(folder: Path) -> Path:
    """The one split of a saved dataset dictionary. Which of several to train on is the user's to say."""
    try:
        splits = [str(name) for name in json.loads((folder / "dataset_dict.json").read_text())["splits"]]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder / 'dataset_dict.json'}: does not list the dataset's splits") from error
    if len(splits) != 1:
        raise DataError(f"{folder}: holds the splits {', '.join(splits)}: give one of them, as {folder}/{splits[0]}")
    return folder / splits[0]


def _check_column(path: Path, columns: list[str]) -> None:
    if TEXT_KEY not in columns:
        raise DataError(f"{path}: has no column `{TEXT_KEY}`; its columns: {', '.join(columns) or 'none'}")


def _library(module: str, path: Path) -> ModuleType:
    """A library of the `hf` extra, or what to install to get it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise DataError(f'{path}: reading it needs {name}: pip install "meshwright[hf]"') from error
