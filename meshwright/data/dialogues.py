"""Dialogues of jsonl files. The forms of their records: dialogue_records.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.corpus import json_records, source_files
from meshwright.data.dialogue_records import WANTED, Dialogue, dialogue_of, is_dialogue
from meshwright.data.files import first_keys
from meshwright.data.section import DIGITS, PREPARED, STDLIB, UNICODE
from meshwright.errors import DataError


def claims_dialogues(data: Mapping[str, Any]) -> bool:
    """Whether the source that a user wrote can be nothing but dialogues, as far as its form tells."""
    source = str(data.get("source", STDLIB))
    if source in (STDLIB, UNICODE, DIGITS):
        return False
    path = Path(source).expanduser()
    header = path / PREPARED
    # By its text: a header is parsed, and refused, where the folder is opened.
    prepared = header.is_file() and '"kind": "messages"' in header.read_text(encoding="utf-8")
    keys = first_keys(path) if not prepared and path.suffix.lower() == ".jsonl" else set()
    return prepared or is_dialogue(dict.fromkeys(keys, 0))


def read_dialogues(source: str, special: Sequence[str]) -> Iterator[Dialogue]:
    """The dialogue of each line of a jsonl file, or of a folder of these; blank lines are none.

    `special`: tokens that no message may spell, since the template's own would mean the same to the model. Raises
    DataError naming the file, the line and the fault.
    """
    for path in source_files(source, ".jsonl"):
        try:
            with path.open("rb") as lines:
                for where, record in json_records(lines, path, WANTED):
                    yield dialogue_of(record, where, special)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
