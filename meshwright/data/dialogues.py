"""Dialogues of records, in the forms that data sets have, as the messages that a chat template reads.

| form     | a record                                                      | a message                     |
|----------|---------------------------------------------------------------|-------------------------------|
| messages | {"messages": [...], "tools": [...]}                           | {"role": ..., "content": ...} |
| sharegpt | {"conversations": [...], "system": ..., "tools": [...]}       | {"from": ..., "value": ...}   |
| alpaca   | {"instruction": ..., "input": ..., "output": ...}             | -                             |

An alpaca record may have a `system` and a `history`, a list of pairs. A message of the assistant may have `tool_calls`
as OpenAI writes them, one of a tool `name` and `tool_call_id`: the template gets them as they are. A message of the
assistant with `weight: 0` or `train: false` is read and not learned. Other keys of a record (an id, a source) say
nothing of the dialogue and are left aside; other keys of a message are refused: a template may mean something by them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.data.records import checked_text, first_record, read_records
from meshwright.data.records_section import Picks
from meshwright.data.section import DIGITS, HUB, PREPARED, STDLIB, UNICODE
from meshwright.data.source_files import choose_files
from meshwright.errors import DataError

SPEAKER, TOOL = "assistant", "tool"
ROLES = ("system", "user", SPEAKER, TOOL)
WANTED = (
    '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}, '
    '{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]} or '
    '{"instruction": ..., "output": ...}'
)

CALL = "function_call"
SHAREGPT = {
    **{name: name for name in ROLES},
    "human": "user", "gpt": SPEAKER, CALL: SPEAKER, "observation": TOOL, "function_response": TOOL,
}  # fmt: skip
"""Speakers of the sharegpt form by our roles."""
_CALLS, _TOOL_KEYS = "tool_calls", ("name", "tool_call_id")
_LEARN = ("weight", "train")
_ALPACA = {"instruction", "output"}
_LISTS = ("messages", "conversations")
"""The keys of lists of messages, by their forms."""

RESERVED = ("\ufdd0", "\ufdd1")
"""Code points that no text has: they stand around what is generated while a template is rendered."""

ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class Dialogue:
    """`unlearned`: places of the assistant's messages that are read only; `tools`: those that the assistant may call,
    as JSON schemas. `where`: its file and line."""

    messages: Sequence[ChatMessage]
    where: str
    unlearned: frozenset[int] = frozenset()
    tools: Sequence[Any] | None = None


def claims_dialogues(data: Mapping[str, Any]) -> bool:
    """Whether the source that a user wrote can be nothing but dialogues, as far as its form tells."""
    source = str(data.get("source", STDLIB))
    if source in (STDLIB, UNICODE, DIGITS) or source.startswith(HUB):
        return False
    header = Path(source).expanduser() / PREPARED
    if header.is_file():
        # By its text: a header is parsed, and refused, where the folder is opened.
        return '"kind": "messages"' in header.read_text(encoding="utf-8")
    split, column = data.get("split"), data.get("column")
    first = first_record(source, split if isinstance(split, str) else None)
    if isinstance(column, str):
        value = first.get(column)
        message = value[0] if isinstance(value, list) and value else None
        return isinstance(message, dict) and not {"role", "from"}.isdisjoint(message)
    keys = {key for key, value in first.items() if value is not None}
    # A record of Alpaca's keys that also has a `text` is one of texts.
    return not keys.isdisjoint(_LISTS) or (keys >= _ALPACA and "text" not in keys)


def read_dialogues(source: str, special: Sequence[str], picks: Picks = Picks()) -> Iterator[Dialogue]:
    """The dialogue of each record of a source.

    `special`: tokens that no message may spell, since the template's own would mean the same to the model. Raises
    DataError naming the file, the line and what is wrong with it.
    """
    for where, record in read_records(choose_files(source, picks.split)):
        yield _dialogue(_with_list(record, where, picks.column), where, special)


def _with_list(record: object, where: str, column: str | None) -> dict[str, Any]:
    """A record without its null values, its messages under the key of their form. Raises DataError."""
    if not isinstance(record, dict):
        raise DataError(f"{where}: is no JSON object; wanted {WANTED}")
    given = {key: value for key, value in record.items() if value is not None}
    found = [key for key in _LISTS if key in given]
    if column is None:
        if len(found) > 1:
            raise DataError(f"{where}: has {' and '.join(found)}; name the one to learn as data.column")
        return given
    if column not in given:
        raise DataError(f"{where}: has no key `{column}`, which data.column names; its keys: {', '.join(given)}")
    first = next(iter(given[column]), None) if isinstance(given[column], list) else None
    form = _LISTS[1] if isinstance(first, dict) and "from" in first else _LISTS[0]
    return {key: value for key, value in given.items() if key not in (*_LISTS, column)} | {form: given[column]}


def _dialogue(record: dict[str, Any], where: str, special: Sequence[str]) -> Dialogue:
    """The dialogue of a record in any of the forms. Raises DataError."""
    keys = set(record)
    if "messages" in keys:
        messages = record["messages"]
    elif "conversations" in keys:
        messages = _of_sharegpt(record, where)
    elif keys >= _ALPACA:
        messages = _of_alpaca(record, where)
    else:
        messages = None
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: has no list of messages; wanted {WANTED}")
    each = [_message(message, f"{where} message {at}") for at, message in enumerate(messages, start=1)]
    checked = [message for message, _ in each]
    if all(message["role"] != SPEAKER for message in checked):
        raise DataError(f"{where}: has no message of the {SPEAKER}: there is nothing to learn from it")
    unlearned = frozenset(at for at, (_, learned) in enumerate(each) if not learned)
    if all(at in unlearned for at, message in enumerate(checked) if message["role"] == SPEAKER):
        raise DataError(f"{where}: no message of the {SPEAKER} is to be learned: there is nothing to learn from it")
    tools = _tools(record.get("tools"), where)
    for place, said in (*((f"message {at}", one) for at, one in enumerate(checked, start=1)), ("tools", tools)):
        for token in (*special, *RESERVED):
            # Keys and names of tools are rendered, too. A mark that a message spells would end it for the model.
            if any(token in text for text in _texts(said)):
                what = "its content spells" if place != "tools" else "spells"
                raise DataError(f"{where} {place}: {what} {token!r}, which the tokenizer reads as a mark of its own")
    return Dialogue(checked, where, unlearned, tools)


def _message(message: object, where: str) -> tuple[ChatMessage, bool]:
    """A message with nothing in it that would be dropped in silence; whether it may be learned. Raises DataError."""
    if not isinstance(message, dict) or not message.keys() >= {"role"}:
        keys = f"has the keys {', '.join(message) or 'none'}" if isinstance(message, dict) else "is no JSON object"
        raise DataError(f"{where}: {keys}; wanted role and content")
    role, calls = message["role"], message.get(_CALLS)
    if role not in ROLES:
        raise DataError(f"{where}: role={role!r:.40} is none of {', '.join(ROLES)}")
    own = {SPEAKER: (_CALLS, *_LEARN), TOOL: _TOOL_KEYS}.get(role, ())
    # A key that is dropped without a word may have meant something to the template.
    if unknown := message.keys() - {"role", "content", *own}:
        known = ", ".join(("role", "content", *own))
        raise DataError(f"{where}: has the keys {', '.join(message)}; wanted {known} ({', '.join(unknown)} is not)")
    checked = {"role": role}
    if calls is None or message.get("content") is not None:
        checked["content"] = checked_text(message.get("content"), where, "content")
    elif "content" in message:
        checked["content"] = None  # as OpenAI writes a message that is a call alone
    if calls is not None:
        wanted = '[{"type": "function", "function": {"name": ..., "arguments": {...}}}]'
        if not isinstance(calls, list) or not calls:
            raise DataError(f"{where}: its {_CALLS} are no list of calls; wanted {wanted}")
        for call in calls:
            function = call.get("function") if isinstance(call, dict) else None
            if (
                not isinstance(function, dict)
                or not isinstance(function.get("name"), str)
                or "arguments" not in function
            ):
                raise DataError(f"{where}: a call of its {_CALLS} names no function with arguments; wanted {wanted}")
        checked[_CALLS] = calls
    elif role == SPEAKER and not checked["content"].strip():
        raise DataError(f"{where}: the {SPEAKER} says nothing")
    for key in own if role == TOOL else ():
        if key in message:
            checked[key] = checked_text(message[key], where, key)
    return checked, _is_learned(message, where)


def _is_learned(message: Mapping[str, Any], where: str) -> bool:
    """`weight: 0` and `train: false` say no. Raises DataError for what is neither yes nor no, and where they differ."""
    given = {key: message[key] for key in _LEARN if key in message}
    for key, value in given.items():
        if value not in (0, 1):
            raise DataError(f"{where}: {key}={value!r:.40} is neither 0 nor 1: a message is learned or it is not")
    if len(set(map(bool, given.values()))) > 1:
        raise DataError(f"{where}: weight={given['weight']} and train={given['train']} say the opposite")
    return all(given.values())


def _tools(tools: object, where: str) -> list[Any] | None:
    """The tools of a record, which some data sets have as a text of JSON. Raises DataError."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: its tools are no JSON: {error}") from error
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: its tools are no list of JSON schemas")
    return tools


def _of_sharegpt(record: Mapping[str, Any], where: str) -> list[Any]:
    """The messages of a record of {"from": ..., "value": ...}. Raises DataError."""
    turns = record["conversations"]
    messages: list[Any] = [] if not record.get("system") else [{"role": "system", "content": record["system"]}]
    for at, turn in enumerate(turns if isinstance(turns, list) else (), start=1):
        place = f"{where} message {at}"
        if not isinstance(turn, dict) or not turn.keys() >= {"from", "value"}:
            keys = f"has the keys {', '.join(turn) or 'none'}" if isinstance(turn, dict) else "is no JSON object"
            raise DataError(f"{place}: {keys}; wanted from and value")
        if turn["from"] not in SHAREGPT:
            raise DataError(f"{place}: from={turn['from']!r:.40} is none of {', '.join(SHAREGPT)}")
        message = {key: value for key, value in turn.items() if key not in ("from", "value")}
        message["role"] = SHAREGPT[turn["from"]]
        if turn["from"] == CALL:
            try:  # one call, or a list of calls, mostly as a text of JSON
                calls = json.loads(turn["value"]) if isinstance(turn["value"], str) else turn["value"]
            except (ValueError, RecursionError) as error:
                raise DataError(f"{place}: its {CALL} is no JSON: {error}") from error
            calls = calls if isinstance(calls, list) else [calls]
            message[_CALLS] = [{"type": "function", "function": call} for call in calls]
        else:
            message["content"] = turn["value"]
        messages.append(message)
    return messages


def _of_alpaca(record: Mapping[str, Any], where: str) -> list[Any]:
    """The messages of a record of an instruction, an input that may be empty, and an output. Raises DataError."""
    messages: list[Any] = [] if not record.get("system") else [{"role": "system", "content": record["system"]}]
    for pair in record.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{where}: its history is no list of pairs of what was asked and answered")
        messages += [{"role": "user", "content": pair[0]}, {"role": SPEAKER, "content": pair[1]}]
    asked = checked_text(record["instruction"], where, "instruction")
    if given := record.get("input"):
        asked += "\n" + checked_text(given, where, "input")
    return [*messages, {"role": "user", "content": asked}, {"role": SPEAKER, "content": record["output"]}]


def _texts(value: object) -> Iterator[str]:
    """Every text in a tree of JSON, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
