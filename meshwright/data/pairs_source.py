"""Pairs of texts out of every form a user may hold them in.

| `data.source` | other fields | a pair |
|---|---|---|
| stdlib | | a function of Python's standard library, and the first paragraph of its docstring |
| FILE.tsv | | a line's two columns |
| FILE.jsonl | | a line's {"source": ..., "target": ...} |
| | languages: [en, de] | a line's {"en": ..., "de": ...}, or {"translation": {"en": ..., "de": ...}} as WMT has it |
| FILE | target: FILE | line i of one file, and line i of the other |

Files may be compressed (FILE.tsv.gz). Pairs of which one text is blank have nothing to teach and are left out.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from meshwright.config.data_rules import GZIP, suffix
from meshwright.config.schema import Data
from meshwright.data.corpus import STDLIB, checked_text, json_records, source_identity, source_name
from meshwright.data.pairs_docstrings import docstring_pairs
from meshwright.errors import DataError

KEYS = ("source", "target")
TRANSLATION = "translation"


class Pair(NamedTuple):
    """What is read, and what is to be written."""

    source: str
    target: str


@dataclass(frozen=True)
class PairSource:
    """Where pairs come from. `read()` may be called again and again."""

    where: str
    """As given, for messages."""
    name: str
    """Short, without a path of this machine."""
    identity: list[object]
    """Changes when the source does; found without reading it."""
    read: Callable[[], Iterator[Pair]]


def pair_source(data: Data) -> PairSource:
    """Find the pairs that a config names. Raises DataError where a file is missing; `read()` does at a bad line.

    The order is that of the source, the same on every machine.
    """
    files = [data.source] if data.target is None else [data.source, data.target]
    identity: list[object] = ["pairs", [source_identity(file) for file in files], data.languages]
    name = ", ".join(source_name(file) for file in files)
    for path in (Path(file).expanduser() for file in files if file != STDLIB):
        if not path.is_file():
            raise DataError(f"{path}: is no file; pairs are in a tsv or jsonl file, or in two text files")
    raw = _reader(data)

    def read() -> Iterator[Pair]:
        return (Pair(source, target) for source, target in raw() if source.strip() and target.strip())

    return PairSource(", ".join(files), name, identity, read)


def _reader(data: Data) -> Callable[[], Iterable[tuple[str, str]]]:
    source = Path(data.source).expanduser()
    if data.source == STDLIB:
        return cache(lambda: tuple(docstring_pairs()))  # parsing takes longer than all that follows
    if data.target is not None:
        target = Path(data.target).expanduser()
        return lambda: _partners(source, target)
    match suffix(data.source):
        case ".tsv":
            return lambda: _columns(source)
        case ".jsonl":
            return lambda: _records(source, data.languages)
    raise DataError(f"{source}: is a text without its partner: name that as data.target, or give a tsv or jsonl file")


def _partners(source: Path, target: Path) -> Iterator[tuple[str, str]]:
    for number, (left, right) in enumerate(zip_longest(_lines(source), _lines(target)), start=1):
        if left is None or right is None:
            longer, shorter = (target, source) if left is None else (source, target)
            raise DataError(f"{longer} line {number}: has no partner, {shorter} ends after {number - 1} lines")
        yield left, right


def _columns(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(_lines(path), start=1):
        columns = line.split("\t")
        if len(columns) == 2:
            yield columns[0], columns[1]
        elif line.strip():
            raise DataError(f"{path} line {number}: has {len(columns)} columns; wanted: source, tab, target")


def _records(path: Path, languages: tuple[str, str] | None) -> Iterator[tuple[str, str]]:
    keys = languages or KEYS
    wanted = f'{{"{keys[0]}": ..., "{keys[1]}": ...}}'
    for where, record in json_records(_lines(path), path, wanted):
        held = record.get(TRANSLATION, record)
        if not isinstance(held, dict):
            raise DataError(f"{where}: `{TRANSLATION}` is no JSON object; wanted {wanted}")
        for key in keys:
            if key not in held:
                has = f"has no key `{key}`; its keys: {', '.join(held) or 'none'}"
                raise DataError(f"{where}: {has}; name two of them as data.languages=[FROM, TO]")
        source, target = (checked_text(held[key], where, key) for key in keys)
        yield source, target


def _lines(path: Path) -> Iterator[str]:
    """The file's lines without their ends. Only a line feed ends one: Unicode's other separators are text."""
    number = 1
    try:
        with gzip.open(path) if path.suffix == GZIP else path.open("rb") as file:
            for line in file:
                yield line.decode().rstrip("\r\n")
                number += 1
    except UnicodeDecodeError as error:
        raise DataError(f"{path} line {number}: is no UTF-8 text; convert the file to UTF-8") from error
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read from line {number} on: {error}") from error
