"""Reads the dialogues of a source. The forms of records: dialogue_records.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.dialogue_records import LISTS, WANTED, Dialogue, dialogue_of, is_dialogue
from meshwright.data.records import first_record, read_records
from meshwright.data.records_section import Picks
from meshwright.data.section import DIGITS, HUB, PREPARED, STDLIB, UNICODE
from meshwright.data.source_files import choose_files
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import read_text


def claims_dialogues(data: Mapping[str, Any]) -> bool:
    """Return True if the form of a user's source can only mean dialogues."""
    source = str(data.get("source", STDLIB))
    if source in (STDLIB, UNICODE, DIGITS) or source.startswith(HUB):
        return False
    header = Path(source).expanduser() / PREPARED
    if header.is_file():
        # By the text, since a header is parsed and checked only when the folder is opened.
        return '"kind": "messages"' in read_text(header)
    split, column = data.get("split"), data.get("column")
    first = first_record(source, split if isinstance(split, str) else None)
    if isinstance(column, str):
        value = first.get(column)
        message = value[0] if isinstance(value, list) and value else None
        return isinstance(message, dict) and not {"role", "from"}.isdisjoint(message)
    return is_dialogue(first)


def read_dialogues(source: str, special: Sequence[str], picks: Picks = Picks()) -> Iterator[Dialogue]:
    """Yield the dialogue of each record of a source.

    Args:
        source: a file or folder.
        special: tokens that no message may spell, since the tokenizer would read them as the template's marks.
        picks: the split and the column.

    Raises:
        DataError: a record is no dialogue; the error names the file, the line and the fault.
    """
    for where, record in read_records(choose_files(source, picks.split)):
        yield dialogue_of(_with_list(record, where, picks.column), where, special)


def _with_list(record: object, where: str, column: str | None) -> dict[str, Any]:
    """Return a record without null values, and with messages under the key of the form.

    Raises:
        DataError: the record has no such messages.
    """
    if not isinstance(record, dict):
        raise DataError(f"{where}: is no JSON object; wanted {WANTED}")
    given = {key: value for key, value in record.items() if value is not None}
    found = [key for key in LISTS if key in given]
    if column is None:
        if len(found) > 1:
            raise DataError(f"{where}: has {' and '.join(found)}; name the one to learn as data.column")
        return given
    if column not in given:
        raise DataError(f"{where}: has no key `{column}`, which data.column names; its keys: {', '.join(given)}")
    first = next(iter(given[column]), None) if isinstance(given[column], list) else None
    form = LISTS[1] if isinstance(first, dict) and "from" in first else LISTS[0]
    return {key: value for key, value in given.items() if key not in (*LISTS, column)} | {form: given[column]}
