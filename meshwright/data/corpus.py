"""Corpora to pack: records of one text (documents), or of two (pairs: families/seq2seq/pairs.py).

| source                       | its documents                                                    | read by  |
|------------------------------|------------------------------------------------------------------|----------|
| stdlib                       | the files of Python's standard library                           | us       |
| unicode                      | names of Unicode's characters, in runs of neighbours, one a line | us       |
| a text file                  | the file                                                         | us       |
| .jsonl, .json, .csv          | the key or column `text` of each record                          | us       |
| .parquet, a saved data set   | the column `text` of each row                                    | pyarrow, datasets |
| a folder                     | the documents of its files, sorted by relative path              |          |
| hub:OWNER/NAME               | the column `text` of its train split, streamed                   | datasets |

A document is a non-empty string; documents of white space alone are left out. The order is the same on every machine
that has the same files. A source is packed once (packing.py), after which order, mixtures and resuming do not depend on
its form.

Text, json and csv are not read by `datasets`, whose readers copy the corpus into their own cache, take 1 s to import,
name no line in an error, and accept some lines that are no JSON ({"text": 3, }).
"""

from __future__ import annotations

import csv
import importlib
import json
import platform
import re
import sysconfig
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from meshwright.data.section import HUB, STDLIB, UNICODE, TokenSection
from meshwright.errors import DataError

TEXT_KEY = "text"

# Python's tests are 19 of the library's 31 MB, hold files that are wrong on purpose, and are missing in some
# distributions. `encodings` holds generated tables of code points.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """A source that can be read repeatedly."""

    kind: Literal["text", "pairs", "messages"]
    where: str
    """The source as the user wrote it, for errors."""
    name: str
    """A short name without a path of this machine."""
    identity: list[object]
    """Facts that change with the source, found without reading it (names, sizes, times)."""
    read: Callable[[], Iterator[tuple[str, ...]]]
    """Yields every record, in the same order each time."""
    ignored: set[str] = field(default_factory=set)
    """Keys of messages that mean nothing to the chat template, filled as records are read."""


def text_corpus(source: str) -> Corpus:
    """The documents of a source."""
    name, identity = source_name(source), source_identity(source)
    return Corpus("text", source, name, identity, lambda: ((document,) for document in documents(source)))


def source_corpus(data: TokenSection) -> Corpus:
    """The documents of a run's source."""
    return text_corpus(data.source)


def documents(source: str) -> Iterator[str]:
    """Yields the documents of `source`: a name (stdlib, unicode, hub:...), or the path of a file or folder.

    Raises DataError naming the file, the line (jsonl) or row (parquet), and the missing key.
    """
    if source == STDLIB:
        texts = _stdlib_documents()
    elif source == UNICODE:
        every = (unicodedata.name(chr(code), "") for code in range(0x110000))
        names = [name for name in every if name and not _NUMBERED.search(name)]
        runs = (names[start : start + _RUN] for start in range(0, len(names), _RUN))
        texts = ("\n".join(run) + "\n" for run in runs)
    elif source.startswith(HUB):
        texts = _hub_documents(source)
    else:
        path = _existing(source)
        texts = _folder_documents(path) if path.is_dir() else _file_documents(path)
    return (document for document in texts if document.strip())


def source_name(source: str) -> str:
    """A short name of the source, without a path of this machine."""
    if source == STDLIB:
        return f"stdlib of Python {platform.python_version()}"
    if source == UNICODE:
        return f"names of Unicode {unicodedata.unidata_version}"
    return source if source.startswith(HUB) else _existing(source).resolve().name


def source_identity(source: str) -> list[object]:
    """Facts that change with the source, found without reading it: names, sizes and, of paths, modification times."""
    if source == STDLIB:
        listed = [(name, path.stat().st_size) for name, path in _stdlib_files()]
        return [STDLIB, platform.python_version(), listed]
    if source == UNICODE or source.startswith(HUB):
        return [source_name(source)]
    path, files = _existing(source).resolve(), source_files(source)
    return [str(path), [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]]


def source_files(source: str, suffix: str = "") -> list[Path]:
    """The files of a source that is a path, sorted. Raises DataError for a file without the suffix, if one is given."""
    path = _existing(source).resolve()
    files = [path] if path.is_file() else _folder_files(path)
    for file in files:
        if suffix and file.suffix.lower() != suffix:
            raise DataError(f"{file}: is no {suffix} file; move it out of the source")
    if not files:
        raise DataError(f"{path}: holds no file to read")
    return files


def _existing(source: str) -> Path:
    path, valid = Path(source).expanduser(), f"(give `{STDLIB}`, a file, or a folder)"
    if not path.exists():
        raise DataError(f"{source}: no such file or folder {valid}")
    if not path.is_file() and not path.is_dir():
        raise DataError(f"{source}: is a pipe or a device, which may never end {valid}")
    return path


def _stdlib_files() -> list[tuple[str, Path]]:
    """(name within the library, path), sorted by name, since the order of rglob differs between machines."""
    root = Path(sysconfig.get_path("stdlib"))
    named = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return sorted((name.as_posix(), path) for name, path in named if not _LEFT_OUT.intersection(name.parts))


def _stdlib_documents() -> Iterator[str]:
    for _, path in _stdlib_files():
        # Source files in other encodings (PEP 263) are left out: the user cannot mend them.
        with suppress(UnicodeDecodeError):
            yield path.read_bytes().decode()


_RUN = 32
"""Names of characters in a document, neighbours in the code charts."""
_NUMBERED = re.compile(r"\d|IDEOGRAPH|HANGUL SYLLABLE|-[0-9A-F]+$")
"""Names made of numbers or syllables, 100,000 that repeat each other."""


def _hub_documents(source: str) -> Iterator[str]:
    """The train split of a data set on the Hub, streamed without a local copy."""
    name, _, configuration = source.removeprefix(HUB).partition(":")
    datasets = _library("datasets", Path(source))
    try:
        rows = datasets.load_dataset(name, configuration or None, split="train", streaming=True)
        for number, record in enumerate(rows):
            if TEXT_KEY not in record:
                raise DataError(f"{source}: has no column `{TEXT_KEY}`; its columns: {', '.join(record)}")
            yield checked_text(record[TEXT_KEY], f"{source} row {number}")
    except DataError:
        raise
    except Exception as error:  # the libraries raise many kinds: no network, no such data set, a server's error
        cause = " ".join(str(error).split())
        raise DataError(f"{source}: cannot be read: {type(error).__name__}: {cause[:300]}") from error


def _folder_documents(folder: Path) -> Iterator[str]:
    """The documents of a folder's files but hidden ones. Raises DataError for a file that cannot be read."""
    if (folder / "state.json").is_file():
        yield from _dataset_documents(folder)
        return
    if (folder / "dataset_dict.json").is_file():
        try:
            splits = [str(name) for name in json.loads((folder / "dataset_dict.json").read_text())["splits"]]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder / 'dataset_dict.json'}: does not list the dataset's splits") from error
        if len(splits) != 1:  # the user chooses among several
            raise DataError(
                f"{folder}: holds the splits {', '.join(splits)}: give one of them, as {folder}/{splits[0]}"
            )
        yield from _dataset_documents(folder / splits[0])
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
        if path.is_dir() and path.is_symlink():  # may lead back to a parent, an endless walk
            raise DataError(f"{path}: is a link to a folder, which is not followed; put the folder in its place")
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{path}: is a pipe, a device or a link to nothing; move it out of the source")
        if path.is_file():
            files[name.as_posix()] = path
    return [files[name] for name in sorted(files)]


def _file_documents(path: Path) -> Iterator[str]:
    match path.suffix.lower():
        case ".jsonl":
            with path.open("rb") as lines:
                for where, record in json_records(lines, path, f'{{"{TEXT_KEY}": ...}}'):
                    if TEXT_KEY not in record:
                        raise DataError(f"{where}: has no key `{TEXT_KEY}`; its keys: {', '.join(record) or 'none'}")
                    yield checked_text(record[TEXT_KEY], where)
        case ".json":
            yield from _json_documents(path)
        case ".csv":
            yield from _csv_documents(path)
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


def _json_documents(path: Path) -> Iterator[str]:
    """The documents of a JSON list of records or of texts."""
    try:
        tree = json.loads(path.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is no JSON: {error}; a file of one record a line is named .jsonl") from error
    if not isinstance(tree, list):
        raise DataError(f'{path}: is no JSON list; wanted [{{"{TEXT_KEY}": ...}}, ...] or [..., ...] of texts')
    for number, record in enumerate(tree, start=1):
        where = f"{path} record {number}"
        if isinstance(record, dict) and TEXT_KEY not in record:
            raise DataError(f"{where}: has no key `{TEXT_KEY}`; its keys: {', '.join(record) or 'none'}")
        yield checked_text(record[TEXT_KEY] if isinstance(record, dict) else record, where)


def _csv_documents(path: Path) -> Iterator[str]:
    """The column `text` of a csv file (RFC 4180), whose first row names the columns."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, strict=True)
            _check_column(path, list(rows.fieldnames or []))
            for row in rows:
                if row[TEXT_KEY] is None or None in row:
                    fields = "fewer" if row[TEXT_KEY] is None else "more"
                    raise DataError(f"{path} line {rows.line_num}: has {fields} fields than the first line has names")
                yield checked_text(row[TEXT_KEY], f"{path} line {rows.line_num}")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is no UTF-8 text (byte {error.start}): convert it to UTF-8") from error
    except csv.Error as error:
        raise DataError(f"{path}: is no csv table: {error}") from error


def json_records(lines: Iterable[str | bytes], path: Path, wanted: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file and line, object) of every line that is not blank. Raises DataError for a line that is no JSON object."""
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
    """The value as a text. Raises DataError for another type, and for lone surrogates, which have no UTF-8 form."""
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


def _check_column(path: Path, columns: list[str]) -> None:
    if TEXT_KEY not in columns:
        raise DataError(f"{path}: has no column `{TEXT_KEY}`; its columns: {', '.join(columns) or 'none'}")


def _library(module: str, path: Path) -> ModuleType:
    """A library of the `hf` extra. Raises DataError with the command to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise DataError(f'{path}: reading it needs {name}: pip install "meshwright[hf]"') from error
