"""Converts records of dialogues, in the forms of published data sets, to the messages of chat templates.

| form       | a record                                                      | a message                     |
|------------|---------------------------------------------------------------|-------------------------------|
| messages   | {"messages": [...], "tools": [...]}                           | {"role": ..., "content": ...} |
| sharegpt   | {"conversations": [...], "system": ..., "tools": [...]}       | {"from": ..., "value": ...}   |
| prompt     | {"prompt": ..., "completion": ...}, texts or lists of messages | as above                      |
| alpaca     | {"instruction": ..., "input": ..., "output": ...}             | -                             |

A null key counts as missing. Either list may have messages of either form. An alpaca record may have a `system` and a
`history`, a list of pairs. Answers in a `prompt` are read and not learned.

A message of the assistant may have `tool_calls` and thoughts (`reasoning_content`, `reasoning`, `thinking`); a message
of a tool may have `name` and `tool_call_id`. With `weight: 0` or `train: false` a message is read and not learned.
Other keys of a message are passed to the template; keys that the template does not mention have no effect (an id, a
time). Other keys of a record are ignored.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.data.records import checked_text
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import parse_json

SPEAKER, TOOL, DEVELOPER = "assistant", "tool", "developer"
ROLES = ("system", "user", SPEAKER, TOOL, DEVELOPER)
WANTED = (
    '{"messages": [{"role": "user", "content": ...}, {"role": "assistant", "content": ...}]}, '
    '{"conversations": [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]}, '
    '{"prompt": ..., "completion": ...} or {"instruction": ..., "output": ...}'
)

CALL = "function_call"
SPEAKERS = {
    **{name: name for name in ROLES},
    "human": "user", "gpt": SPEAKER, CALL: SPEAKER, "observation": TOOL, "function_response": TOOL, "function": TOOL,
}  # fmt: skip
"""The role of each speaker's name, in all forms."""
CALLS = "tool_calls"
THINKING = "thinking"
THOUGHTS = ("reasoning_content", THINKING, "reasoning")
"""The keys of the assistant's thoughts in published templates and APIs; the first key of a message counts."""
TOOL_KEYS = ("name", "tool_call_id")
KNOWN = frozenset({"role", "content", CALLS, *THOUGHTS, *TOOL_KEYS})
"""Keys of a message that templates commonly use."""
_LEARN = ("weight", "train")
_ALPACA, _PROMPT = {"instruction", "output"}, {"prompt", "completion"}
LISTS = ("messages", "conversations")
_CALL_FORM = '[{"type": "function", "function": {"name": ..., "arguments": {...}}}]'

PLACEHOLDER = "\ufdd3"
RESERVED = ("\ufdd0", "\ufdd1", PLACEHOLDER)
"""Code points that no text contains: marks around generated text, and placeholders for texts (spans.py)."""

ChatMessage = dict[str, Any]


@dataclass(frozen=True)
class Dialogue:
    """The messages of a record."""

    messages: Sequence[ChatMessage]
    where: str
    """The file and line."""
    unlearned: frozenset[int] = frozenset()
    """Indices of the assistant's messages that are not learned."""
    tools: Sequence[Any] | None = None
    """JSON schemas of the tools that the assistant may call."""


def is_dialogue(record: Mapping[str, Any]) -> bool:
    """Return True if a record has the keys of a dialogue."""
    keys = {key for key, value in record.items() if value is not None}
    # A record with Alpaca's keys and a `text` is a record of a text.
    return not keys.isdisjoint(LISTS) or ("text" not in keys and (keys >= _ALPACA or keys >= _PROMPT))


def dialogue_of(record: object, where: str, special: Sequence[str]) -> Dialogue:
    """Return the dialogue of a record in any of the forms.

    Args:
        record: the value of a line or row.
        where: file and line, for errors.
        special: tokens that no message may spell, since the tokenizer would read them as the template's marks.

    Raises:
        DataError: names the message and the fault.
    """
    given = {key: value for key, value in record.items() if value is not None} if isinstance(record, dict) else {}
    messages, given_only = messages_of(given, where), 0
    if messages is None and given.keys() >= _PROMPT:
        asked = _side(given, "prompt", "user", where)
        messages, given_only = asked + _side(given, "completion", SPEAKER, where), len(asked)
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: has no list of messages; wanted {WANTED}")
    each = [_message(message, f"{where} message {at}") for at, message in enumerate(messages, start=1)]
    checked = [message for message, _ in each]
    if all(message["role"] != SPEAKER for message in checked):
        raise DataError(f"{where}: has no message of the {SPEAKER}: there is nothing to learn from it")
    speaks = [at for at, message in enumerate(checked) if message["role"] == SPEAKER]
    unlearned = frozenset(at for at in speaks if not each[at][1] or at < given_only)
    if unlearned.issuperset(speaks):
        raise DataError(f"{where}: no message of the {SPEAKER} is to be learned: there is nothing to learn from it")
    tools = _tools(given.get("tools"), where)
    for location, said in (
        *((f"message {at}", message) for at, message in enumerate(checked, start=1)),
        ("tools", tools),
    ):
        for token in (*special, *RESERVED):
            # Keys and names of tools are rendered too. A mark in a text would end the message for the model.
            if any(token in text for text in _texts(said)):
                spells = "its content spells" if location != "tools" else "spells"
                raise DataError(
                    f"{where} {location}: {spells} {token!r}, which the tokenizer reads as a mark of its own"
                )
    return Dialogue(checked, where, unlearned, tools)


def messages_of(given: Mapping[str, Any], where: str) -> list[Any] | None:
    """Return the list of messages of a record; None without one.

    Raises:
        DataError: a field is invalid.
    """
    system = [{"role": "system", "content": given["system"]}] if given.get("system") else []
    if "messages" in given:
        messages = given["messages"]
        return messages if isinstance(messages, list) else []
    if "conversations" in given:
        turns = given["conversations"]
        return [*system, *turns] if isinstance(turns, list) and turns else []
    return [*system, *_of_alpaca(given, where)] if given.keys() >= _ALPACA else None


def _side(given: Mapping[str, Any], key: str, role: str, where: str) -> list[Any]:
    """Return the messages of a prompt or a completion.

    Raises:
        DataError: the field is neither a text nor a list.
    """
    said = given[key]
    if isinstance(said, str):
        return [{"role": role, "content": said}]
    if isinstance(said, list) and said:
        return said
    raise DataError(f"{where}: its {key} is neither a text nor a list of messages")


def _of_alpaca(record: Mapping[str, Any], where: str) -> list[Any]:
    """Return the messages of an alpaca record: an instruction, an optional input, and an output.

    Raises:
        DataError: a field is invalid.
    """
    messages: list[Any] = []
    for pair in record.get("history") or ():
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{where}: its history is no list of pairs of what was asked and answered")
        messages += [{"role": "user", "content": pair[0]}, {"role": SPEAKER, "content": pair[1]}]
    asked = checked_text(record["instruction"], where, "instruction")
    if given := record.get("input"):
        asked += "\n" + checked_text(given, where, "input")
    return [*messages, {"role": "user", "content": asked}, {"role": SPEAKER, "content": record["output"]}]


def _message(message: object, where: str) -> tuple[ChatMessage, bool]:
    """Return (a message in the form of templates, True if the message may be learned).

    Raises:
        DataError: the message is invalid.
    """
    if not isinstance(message, dict):
        raise DataError(f"{where}: is no JSON object; wanted role and content, or from and value")
    given = {key: value for key, value in message.items() if value is not None}
    speaker, text = ("from", "value") if "from" in given and "role" not in given else ("role", "content")
    if speaker not in given:
        keys = f"has the keys {', '.join(message) or 'none'}"
        raise DataError(f"{where}: {keys}; wanted role and content, or from and value")
    said = given.pop(speaker)
    role = SPEAKERS.get(said) if isinstance(said, str) else None
    if role is None:
        raise DataError(f"{where}: {speaker}={said!r:.40} is none of {', '.join(SPEAKERS)}")
    if text != "content" and text in given:
        given["content"] = given.pop(text)
    if said == CALL:
        given[CALL] = given.pop("content", None)
    checked: ChatMessage = {"role": role}
    if (calls := _calls(given, where)) is not None:
        if role != SPEAKER:
            raise DataError(f"{where}: a message of the {role} has {CALLS}, which the {SPEAKER} alone makes")
        if "content" in given:
            checked["content"] = _content(given["content"], where)
        elif "content" in message and said != CALL:
            checked["content"] = None  # OpenAI's form of a message with only calls
        checked[CALLS] = calls
    else:
        checked["content"] = _content(given.get("content"), where)
        texts = [entry["text"] for entry in checked["content"]] if isinstance(checked["content"], list) else []
        if role == SPEAKER and not "".join(texts or checked["content"]).strip():
            raise DataError(f"{where}: the {SPEAKER} says nothing")
    for key, value in given.items():
        if key not in ("content", CALLS, CALL, *_LEARN):
            text_keys = (*THOUGHTS, *TOOL_KEYS)
            checked[key] = checked_text(value, where, key) if key in text_keys else value
    return checked, _is_learned(given, role, where)


def _content(content: object, where: str) -> str | list[dict[str, str]]:
    """Check a content: a text, or a list of parts that are texts.

    Raises:
        DataError: the content has another form.
    """
    if not isinstance(content, list):
        return checked_text(content, where, "content")
    parts = []
    for index, entry in enumerate(content, start=1):
        content_type = (
            "text" if isinstance(entry, str) else entry.get("type", "text") if isinstance(entry, dict) else None
        )
        if content_type is None:
            raise DataError(f"{where}: part {index} of its content is neither a text nor an object")
        if content_type != "text":
            raise DataError(
                f"{where}: part {index} of its content is of type {content_type!r:.40}; models here read text alone"
            )
        parts.append(
            {"type": "text", "text": checked_text(entry if isinstance(entry, str) else entry.get("text"), where)}
        )
    return parts


def _calls(given: Mapping[str, Any], where: str) -> list[dict[str, Any]] | None:
    """Return the calls of a message in the form of templates, without null keys; None without calls.

    Raises:
        DataError: a call is invalid.
    """
    calls = given.get(CALLS)
    if CALL in given:  # one call, or a list of calls, usually as a JSON text
        told = given[CALL]
        if isinstance(told, str):
            try:
                told = parse_json(told)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{where}: its {CALL} is no JSON: {error}") from error
        calls = told if isinstance(told, list) else [told]
    if calls is None or (calls == [] and given.get("content")):
        return None
    if not isinstance(calls, list) or not calls:
        raise DataError(f"{where}: its {CALLS} are no list of calls; wanted {_CALL_FORM}")
    read = []
    for call in calls:
        whole = (
            call
            if isinstance(call, dict) and call.get("function") is not None
            else {"type": "function", "function": call}
        )
        function = whole["function"]
        if isinstance(function, dict):
            function = {key: value for key, value in function.items() if value is not None}
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or "arguments" not in function:
            raise DataError(f"{where}: a call of its {CALLS} names no function with arguments; wanted {_CALL_FORM}")
        if not isinstance(function["arguments"], dict | str):
            raise DataError(f"{where}: the arguments of {function['name']} are neither an object nor a text of JSON")
        read.append({key: value for key, value in whole.items() if value is not None} | {"function": function})
    return read


def _is_learned(message: Mapping[str, Any], role: str, where: str) -> bool:
    """Return True if a message may be learned, False for `weight: 0` and `train: false`.

    Raises:
        DataError: a value is neither yes nor no, two values differ, or a message of another role is to be learned.
    """
    given = {key: message[key] for key in _LEARN if key in message}
    for key, value in given.items():
        if value not in (0, 1):
            raise DataError(f"{where}: {key}={value!r:.40} is neither 0 nor 1: a message is learned or it is not")
        if value and role != SPEAKER:
            raise DataError(f"{where}: {key}={value!r:.40} at a message of the {role}: the {SPEAKER} alone is learned")
    if len(set(map(bool, given.values()))) > 1:
        raise DataError(f"{where}: weight={given['weight']} and train={given['train']} say the opposite")
    return all(given.values())


def _tools(tools: object, where: str) -> list[Any] | None:
    """Return the tools of a record; some data sets have a JSON text, or a list of JSON texts.

    Raises:
        DataError: the tools are no list of JSON schemas.
    """
    tools = _parsed(tools, where)
    if tools is None or tools == []:
        return None
    if isinstance(tools, list):
        tools = [_parsed(tool, where) if str(tool).lstrip().startswith("{") else tool for tool in tools]
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: its tools are no list of JSON schemas")
    return tools


def _parsed(value: object, where: str) -> object:
    if not isinstance(value, str):
        return value
    try:
        return parse_json(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: its tools are no JSON: {error}") from error


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a JSON tree, including keys."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield key
            yield from _texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
