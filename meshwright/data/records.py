"""The one reader of records: every kind of data reads files through `read_records`.

A record is a text (a text file, or an element of a JSON list of texts), or an object by keys or columns. Each has a
place for messages: file and line, record or row. Blank lines of JSON lines, byte-order marks of UTF-8 and Windows' line
ends mean nothing.

No text file is read by `datasets`: the readers there copy the corpus into a cache, take 1 s to import, name no line in
an error, and accept some lines that are no JSON ({"text": 3, }).
"""

from __future__ import annotations

import bz2
import codecs
import csv
import gzip
import importlib
import io
import json
import lzma
import re
import sys
import zlib
from collections.abc import Callable, Collection, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import IO, Any, cast

from meshwright.data.forms_section import compression_of
from meshwright.data.long_text import LARGE_BYTES, LongText
from meshwright.data.source_files import Chosen, choose_files
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import open_named, parse_json

Record = tuple[str, Any]
"""The place of a record, for messages, and the value: a text, or an object."""
Wanted = Collection[str] | None
"""The columns of a table that are read and must be there; None: all."""

_UNREADABLE = (OSError, EOFError, zlib.error, lzma.LZMAError)
_FIRST_BYTES = 2**16
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", re.ASCII)
_MOST_BYTES = 2**24
"""The most bytes of a JSON list that are searched for the first record."""


def read_records(chosen: Chosen, wanted: Wanted = None) -> Iterator[Record]:
    """Yield every record of the files. Raises DataError naming the file, the place and the fault."""
    if chosen.form is None:
        yield from saved_rows(chosen.root, wanted)
        return
    for path in chosen.files:
        try:
            yield from _READERS[chosen.form](path, wanted)
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: is no UTF-8 text (byte {error.start}): convert it to UTF-8") from error
        except _UNREADABLE as error:
            cause = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise DataError(f"{path}: cannot be read: {cause}") from error


def open_file(path: Path) -> IO[bytes]:
    """Open a file's bytes, unpacked if the name ends in a compression's suffix."""
    compression = compression_of(path)
    file = open_named(path)  # refuses a pipe and a device; a link in a folder is refused when its files are listed
    if not compression:
        return file
    file.close()
    match compression:
        case ".gz":
            return cast(IO[bytes], gzip.open(path))
        case ".bz2":
            return cast(IO[bytes], bz2.open(path))
        case ".xz":
            return cast(IO[bytes], lzma.open(path))
    pyarrow = library("pyarrow", path)
    # pyarrow's stream has no lines; the buffer has.
    return cast(IO[bytes], io.BufferedReader(pyarrow.input_stream(str(path), compression="zstd")))


def first_record(source: str, split: str | None = None) -> dict[str, Any]:
    """Return a source's first record, or an empty one. Faults are reported when the source is read."""
    try:
        chosen = choose_files(source, split)
        if chosen.form == "text":
            return {}
        if chosen.form == "json":
            first = _first_of_list(chosen.files[0])
        else:
            first = next(read_records(chosen), ("", None))[1]
    except (*_UNREADABLE, DataError, ValueError, RecursionError):
        return {}
    return first if isinstance(first, dict) else {}


def checked_text(value: object, where: str, key: str = "text") -> str:
    """Return the value as a text. Raises DataError for another type, and for lone surrogates, which have no UTF-8."""
    if not isinstance(value, str):
        raise DataError(f"{where}: `{key}` holds no string but {value!r:.40}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: `{key}` has a lone surrogate at character {error.start}") from error
    return value


def library(module: str, path: Path) -> ModuleType:
    """Import a library of the `hf` extra. Raises DataError with the command to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        name = module.partition(".")[0]
        raise DataError(f'{path}: reading it needs {name}: pip install "meshwright[hf]"') from error


def read_text(path: Path, wanted: Wanted) -> Iterator[Record]:
    try:
        if not compression_of(path) and path.stat().st_size >= LARGE_BYTES:
            yield str(path), LongText.of_file(path)
            return
        with open_file(path) as file:
            data = file.read().removeprefix(codecs.BOM_UTF8)
        yield str(path), data.decode()
    except UnicodeDecodeError as error:
        hint = "convert it to UTF-8, unpack it, or move it out of the source"
        raise DataError(f"{path}: is no UTF-8 text (byte {error.start}): {hint}") from error


def read_lines(path: Path, wanted: Wanted) -> Iterator[Record]:
    with open_file(path) as lines:
        for line_number, line in enumerate(lines, start=1):
            data = line.removeprefix(codecs.BOM_UTF8) if line_number == 1 else line
            if not data.strip():
                continue
            where = f"{path} line {line_number}"
            try:
                # Decoded here: json takes bytes with zeros for UTF-16.
                record = json.loads(data.decode())
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: is no JSON: {error}") from error
            yield where, record


def read_list(path: Path, wanted: Wanted) -> Iterator[Record]:
    with open_file(path) as file:
        data = file.read().removeprefix(codecs.BOM_UTF8)
    try:
        tree = parse_json(data.decode())
    except ValueError as error:
        if not data.lstrip().startswith(b"{"):
            raise DataError(f"{path}: is no JSON: {error}") from error
        # Many .json files of the Hub have a JSON object a line.
        yield from read_lines(path, wanted)
        return
    del data
    if not isinstance(tree, list):
        what = f"one JSON object of the keys {', '.join(tree)}" if isinstance(tree, dict) else "no JSON list"
        raise DataError(f'{path}: is {what}; wanted a list of records [{{"KEY": ...}}, ...], or of texts')
    for index, record in enumerate(tree, start=1):
        yield f"{path} record {index}", record


def _first_of_list(path: Path) -> Any:
    """Return the first record of a .json file without reading a large rest. Raises ValueError if there is none."""
    size = _FIRST_BYTES
    with open_file(path) as file:
        data = file.read(size).removeprefix(codecs.BOM_UTF8)
        while True:
            text = data.decode(errors="ignore").lstrip()
            try:
                return json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())[0]
            except ValueError:
                more = file.read(size)
                if not more or len(data) > _MOST_BYTES:
                    raise
                data, size = data + more, 2 * size


def read_csv(path: Path, wanted: Wanted) -> Iterator[Record]:
    # Python's limit of 131,072 characters per field is a setting of the module. The limit is raised and not restored,
    # since another reader may be reading a file.
    csv.field_size_limit(sys.maxsize)
    try:
        with open_file(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig", newline="") as text:
            rows = csv.reader(text, strict=True)
            yield from _table(path, ((rows.line_num, row) for row in rows if row), wanted)
    except csv.Error as error:
        raise DataError(f"{path}: is no csv table: {error}") from error


def text_lines(path: Path) -> Iterator[str]:
    """Yield the lines without line ends. Only a line feed ends a line: Unicode's other separators are text."""
    line_number = 1
    try:
        with open_file(path) as file:
            for line in file:
                data = line.removeprefix(codecs.BOM_UTF8) if line_number == 1 else line
                yield data.decode().rstrip("\r\n")
                line_number += 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path} line {line_number}: is no UTF-8 text; convert the file to UTF-8") from error
    except _UNREADABLE as error:
        raise DataError(f"{path}: cannot be read from line {line_number} on: {error}") from error


def read_tsv(path: Path, wanted: Wanted) -> Iterator[Record]:
    rows = (
        (line_number, line.split("\t")) for line_number, line in enumerate(text_lines(path), start=1) if line.strip()
    )
    yield from _table(path, rows, wanted)


def _table(path: Path, rows: Iterator[tuple[int, list[str]]], wanted: Wanted) -> Iterator[Record]:
    """Yield the records of a table's rows, each with the number of its line.

    A first row with a number, but without a wanted name, is a record, not a header. Columns are then named 1, 2, ...
    With two columns, one beginning with a number, the other column is the text.
    """
    line_number, columns = next(rows, (1, [""]))
    texts = [column for column, cell in enumerate(columns) if not _NUMBER.fullmatch(cell)]
    if wanted is not None and not set(wanted) <= set(columns) and len(texts) < len(columns):
        rows = chain([(line_number, columns)], rows)
        columns = [str(column) for column in range(1, len(columns) + 1)]
        if "text" in wanted and (len(columns), len(texts)) == (2, 1):
            columns[texts[0]] = "text"
    _check_columns(path, columns, wanted)
    for line_number, fields in rows:
        if len(fields) != len(columns):
            many = "more" if len(fields) > len(columns) else "fewer"
            raise DataError(f"{path} line {line_number}: has {many} fields than the first line")
        yield f"{path} line {line_number}", dict(zip(columns, fields, strict=True))


def read_parquet(path: Path, wanted: Wanted) -> Iterator[Record]:
    pyarrow, parquet = library("pyarrow", path), library("pyarrow.parquet", path)
    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: is no readable parquet file: {error}") from error
    with file:
        _check_columns(path, list(file.schema_arrow.names), wanted)
        row = 0
        try:
            for batch in file.iter_batches(batch_size=1024, columns=None if wanted is None else list(wanted)):
                for record in batch.to_pylist():
                    yield f"{path} row {row}", record
                    row += 1
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(f"{path}: is damaged behind row {row}: {error}") from error


def saved_rows(folder: Path, wanted: Wanted) -> Iterator[Record]:
    """Yield the rows of a data set that `datasets` saved."""
    pyarrow, datasets = library("pyarrow", folder), library("datasets", folder)
    try:
        dataset = datasets.load_from_disk(str(folder))
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder}: is no readable Hugging Face dataset: {error}") from error
    _check_columns(folder, list(dataset.column_names), wanted)
    for row, record in enumerate(dataset if wanted is None else dataset.select_columns(list(wanted))):
        yield f"{folder} row {row}", record


def _check_columns(path: Path, columns: list[str], wanted: Wanted) -> None:
    if twice := next((name for at, name in enumerate(columns) if name in columns[:at]), None):
        raise DataError(f"{path}: has the column `{twice}` twice; rename one")
    for name in wanted or ():
        if name not in columns:
            has = ", ".join(column[:40] for column in columns[:20]) or "none"
            raise DataError(f"{path}: has no column `{name}`; its columns: {has}; name one as data.column")


_READERS: dict[str, Callable[[Path, Wanted], Iterator[Record]]] = {
    "text": read_text,
    "jsonl": read_lines,
    "json": read_list,
    "csv": read_csv,
    "tsv": read_tsv,
    "parquet": read_parquet,
}
