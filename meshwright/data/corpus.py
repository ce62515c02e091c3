"""Corpora to pack: records of one text (documents), or of two (pairs: families/seq2seq/pairs.py).

| source                            | documents                                                        | read by  |
|-----------------------------------|------------------------------------------------------------------|----------|
| stdlib                            | the files of Python's standard library                           | us       |
| unicode                           | names of neighbouring Unicode characters, one per line           | us       |
| a text file                       | the file                                                         | us       |
| records (records.py)              | the key or column `text` of each, or `data.column`               | us, pyarrow |
| a saved data set                  | the same                                                         | datasets |
| a folder                          | the documents of the split's files, sorted by relative path      |          |
| hub:OWNER/NAME                    | the same, of the train split or `data.split`, streamed           | datasets |

A document is a non-empty string; documents of only white space are left out. The order is the same on every machine
with the same files. A source is packed once (packing.py). Order, mixtures and resuming then do not depend on the
source's form.
"""

from __future__ import annotations

import platform
import re
import sysconfig
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from meshwright.data.forms_section import compression_of
from meshwright.data.long_text import LongText, Text, chunks_of
from meshwright.data.records import checked_text, library, read_records
from meshwright.data.records_section import Picks, RecordSection
from meshwright.data.section import HUB, STDLIB, UNICODE
from meshwright.data.source_files import choose_files, existing, folder_files
from meshwright.ranks.errors import DataError

TEXT_KEY = "text"
NO_PICKS = Picks()
_OLD_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
"""The forms of records that version 0.1.0 read; prepared folders of these keep their names."""

# Python's tests are 19 of the library's 31 MB, contain files that are wrong on purpose, and are missing in some
# distributions. `encodings` contains generated tables of code points.
_LEFT_OUT = frozenset({"test", "tests", "idle_test", "encodings", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Corpus:
    """A source that can be read repeatedly."""

    kind: Literal["text", "pairs", "messages", "preferences"]
    where: str
    """The source in the user's spelling, for errors."""
    name: str
    """A short name without a path of this machine."""
    identity: list[object]
    """Facts that change with the source, found without reading (names, sizes, times)."""
    read: Callable[[], Iterator[tuple[Text, ...]]]
    """Yields every record, in the same order each time."""
    names: tuple[str, ...] = ()
    """The files to read, relative to the source; empty for a source that is a name."""
    split: str | None = None
    """The split to read of a folder or data set, if there are splits."""
    left_out: tuple[str, ...] = ()
    """Files of the source's folder that are not read."""
    ignored: set[str] = field(default_factory=set)
    """Keys of messages that the chat template does not mention, filled while records are read."""


def text_corpus(source: str, picks: Picks = NO_PICKS) -> Corpus:
    """Return the documents of a source as a corpus."""
    read = lambda: ((document,) for document in documents(source, picks))  # noqa: E731
    return Corpus("text", source, source_name(source), source_identity(source, picks), read, *told_of(source, picks))


def source_corpus(data: RecordSection) -> Corpus:
    """Return the documents of a run's source as a corpus."""
    return text_corpus(data.source, data.picks)


def documents(source: str, picks: Picks = NO_PICKS) -> Iterator[Text]:
    """Yield the documents of `source`: a name (stdlib, unicode, hub:...), or the path of a file or folder.

    Raises:
        DataError: a record has no text; the error names the file, the line (jsonl) or row (parquet), and the key.
    """
    if source == STDLIB:
        texts: Iterator[Text] = _stdlib_documents()
    elif source == UNICODE:
        every = (unicodedata.name(chr(code), "") for code in range(0x110000))
        names = [name for name in every if name and not _NUMBERED.search(name)]
        runs = (names[start : start + _RUN] for start in range(0, len(names), _RUN))
        texts = ("\n".join(run) + "\n" for run in runs)
    else:
        wanted = (picks.column or TEXT_KEY,)
        is_hub = source.startswith(HUB)
        records = hub_records(source, picks) if is_hub else read_records(choose_files(source, picks.split), wanted)
        texts = (text_of(record, where, picks.column) for where, record in records)
    return (document for document in texts if any(chunk and not chunk.isspace() for chunk in chunks_of(document)))


def text_of(record: object, where: str, column: str | None) -> Text:
    """Return the text of a record.

    Raises:
        DataError: the record has no text under the key.
    """
    if not isinstance(record, dict):
        if column is not None:
            raise DataError(f"{where}: is a text and has no keys: data.column={column} has no effect; leave it out")
        if isinstance(record, LongText):
            return record
        if not isinstance(record, str):
            raise DataError(f'{where}: is no JSON object; wanted {{"{TEXT_KEY}": ...}}')
        return checked_text(record, where)
    key = column or TEXT_KEY
    if key not in record:
        keys = ", ".join(str(name)[:40] for name in record) or "none"
        raise DataError(f"{where}: has no key `{key}`; its keys: {keys}; name one as data.column")
    return checked_text(record[key], where, key)


def source_name(source: str) -> str:
    """Return a short name of the source, without a path of this machine."""
    if source == STDLIB:
        return f"stdlib of Python {platform.python_version()}"
    if source == UNICODE:
        return f"names of Unicode {unicodedata.unidata_version}"
    if source.startswith(HUB):
        return source
    path = existing(source)
    return path.name if path.is_file() else path.resolve().name


def source_identity(source: str, picks: Picks = NO_PICKS) -> list[object]:
    """Return facts that change with the source or the picks, found without reading: names, sizes, times of paths."""
    if source == STDLIB:
        listed = [(name, path.stat().st_size) for name, path in _stdlib_files()]
        return [STDLIB, platform.python_version(), listed]
    picked: list[object] = [] if picks == NO_PICKS else [list(picks)]
    if source == UNICODE or source.startswith(HUB):
        return [source_name(source), *picked]
    chosen = choose_files(source, picks.split)
    # Version 0.1.0 read other files in another form, or not at all, so the identity must differ from its folders'.
    plain = chosen.form in (None, "text") or all(file.suffix.lower() in _OLD_SUFFIXES for file in chosen.files)
    old = plain and not any(compression_of(file) for file in chosen.files)
    return [*_identity(source, chosen.files), *([] if old else [f"as {chosen.form}"]), *picked]


def path_identity(source: str) -> list[object]:
    """Return the facts of all files of a path, in any form."""
    path = existing(source).resolve()
    return _identity(source, [path] if path.is_file() else folder_files(path))


def _identity(source: str, files: Iterable[Path]) -> list[object]:
    path = existing(source).resolve()
    named = [path] if path.is_file() else files
    return [str(path), [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in named]]


def told_of(source: str, picks: Picks = NO_PICKS) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    """Return the last fields of a Corpus: (files, split, files left out)."""
    if source in (STDLIB, UNICODE):
        return (), None, ()
    if source.startswith(HUB):
        return (), picks.split or HUB_SPLIT, ()
    chosen = choose_files(source, picks.split)
    return tuple(chosen.names), chosen.split, chosen.left_out


def _stdlib_files() -> list[tuple[str, Path]]:
    """Return (name within the library, path), sorted by name, since the order of rglob differs between machines."""
    root = Path(sysconfig.get_path("stdlib"))
    named = ((path.relative_to(root), path) for path in root.rglob("*.py"))
    return sorted((name.as_posix(), path) for name, path in named if not _LEFT_OUT.intersection(name.parts))


def _stdlib_documents() -> Iterator[str]:
    for _, path in _stdlib_files():
        # Source files in other encodings (PEP 263) are left out, since the user cannot convert them.
        with suppress(UnicodeDecodeError):
            yield path.read_bytes().decode()


_RUN = 32
"""Names of neighbouring characters in a document."""
_NUMBERED = re.compile(r"\d|IDEOGRAPH|HANGUL SYLLABLE|-[0-9A-F]+$")
"""Names of numbers or syllables: 100,000 repetitive names."""


HUB_SPLIT = "train"
"""The default split of a data set on the Hub."""


def hub_records(source: str, picks: Picks) -> Iterator[tuple[str, Any]]:
    """Yield the records of a split of a data set on the Hub, streamed without a local copy."""
    name, _, configuration = source.removeprefix(HUB).partition(":")
    datasets = library("datasets", Path(source))
    try:
        rows = datasets.load_dataset(name, configuration or None, split=picks.split or HUB_SPLIT, streaming=True)
        for row, record in enumerate(rows):
            yield f"{source} row {row}", record
    except DataError:
        raise
    except Exception as error:  # the libraries raise many kinds: no network, no such data set, a server's error
        cause = " ".join(str(error).split())
        raise DataError(f"{source}: cannot be read: {type(error).__name__}: {cause[:300]}") from error
