"""Reads pairs of answers: records with the keys chosen and rejected, in the forms of TRL's data sets.

| form     | a record                                                    | the prompt                                 |
|----------|-------------------------------------------------------------|--------------------------------------------|
| texts    | {"prompt": TEXT, "chosen": TEXT, "rejected": TEXT}          | one message of the user                    |
| messages | {"prompt": [...], "chosen": [...], "rejected": [...]}       | the list                                   |
| implicit | {"chosen": [...], "rejected": [...]}                        | the equal first messages of both lists     |

A text of `chosen` or `rejected` is one message of the assistant. If both are lists and `prompt` is a text, the lists
contain the prompt, as in the implicit form. A record may have `tools`; other keys are ignored. The messages are those
of dialogue_records.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.data.dialogue_records import Dialogue, dialogue_of
from meshwright.data.records import first_record, read_records
from meshwright.data.records_section import Picks
from meshwright.data.section import DIGITS, HUB, PREPARED, STDLIB, UNICODE
from meshwright.data.source_files import choose_files
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import read_text

SIDES = ("chosen", "rejected")
WANTED = '{"prompt": ..., "chosen": ..., "rejected": ...}, texts or lists of messages'

Pair = tuple[Dialogue, Dialogue]
"""The prompt with the chosen answer, and with the rejected answer."""


def claims_preferences(data: Mapping[str, Any]) -> bool:
    """Return True if the form of a user's source can only mean pairs of answers."""
    source = str(data.get("source", STDLIB))
    if source in (STDLIB, UNICODE, DIGITS) or source.startswith(HUB):
        return False
    header = Path(source).expanduser() / PREPARED
    if header.is_file():
        return '"kind": "preferences"' in read_text(header)
    split = data.get("split")
    first = first_record(source, split if isinstance(split, str) else None)
    return first.keys() >= set(SIDES) and "text" not in first


def read_pairs(source: str, special: Sequence[str], picks: Picks = Picks()) -> Iterator[Pair]:
    """Yield the pair of each record of a source.

    Args:
        source: a file or folder.
        special: tokens that no message may spell, since the tokenizer would read them as the template's marks.
        picks: the split.

    Raises:
        DataError: a record is no pair; the error names the file, the line and the fault.
    """
    for where, record in read_records(choose_files(source, picks.split)):
        yield pair_of(record, where, special)


def pair_of(record: object, where: str, special: Sequence[str]) -> Pair:
    """Return the pair of a record.

    Args:
        record: the value of a line or row.
        where: file and line, for errors.
        special: tokens that no message may spell.

    Raises:
        DataError: names the side, the message and the fault.
    """
    given = {key: value for key, value in record.items() if value is not None} if isinstance(record, dict) else {}
    if missing := [side for side in SIDES if side not in given]:
        raise DataError(f"{where}: has no {' and no '.join(missing)}; wanted {WANTED}")
    answers = [given[side] for side in SIDES]
    prompt = given.get("prompt")
    if all(isinstance(answer, list) for answer in answers) and not isinstance(prompt, list):
        # The last message of each list is an answer, also if both answers are equal.
        most = min(map(len, answers)) - 1
        common = next((at for at in range(max(0, most)) if answers[0][at] != answers[1][at]), max(0, most))
        if not common:
            raise DataError(f"{where}: chosen and rejected have no first message in common; wanted {WANTED}")
        prompt, answers = answers[0][:common], [answer[common:] for answer in answers]
    if prompt is None:
        raise DataError(f"{where}: has no prompt; wanted {WANTED}")
    chosen, rejected = (
        dialogue_of({"prompt": prompt, "completion": answer, "tools": given.get("tools")}, f"{where} {side}", special)
        for side, answer in zip(SIDES, answers, strict=True)
    )
    return chosen, rejected
