"""Dialogues with placeholders: a private code point replaces each text of a message.

A render of such a dialogue shows the place of each text in the template's text.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright.data.dialogue_records import CALLS, PLACEHOLDER, THOUGHTS, ChatMessage
from meshwright.ranks.errors import DataError

_FIRST = 0xF0000
_MOST = 2**16
PLACEHOLDERS = re.compile(f"{PLACEHOLDER}(.)", re.DOTALL)


def placeholder(index: int) -> str:
    """Return the placeholder of a run."""
    return f"{PLACEHOLDER}{chr(_FIRST + index)}"


@dataclass(frozen=True)
class Run:
    """A text of a message that a placeholder replaces."""

    message: int
    field: str
    text: str


class Planted:
    """A dialogue with placeholders.

    `constants`: texts that the template searches for. These are not replaced, so that the template takes the same
    branches.
    """

    def __init__(self, messages: Sequence[ChatMessage], constants: Iterable[str]) -> None:
        # Only tags, or several words: a single word, or white space, is also in ordinary texts.
        marks = (constant for constant in constants if len(constant.strip()) > 1 and not constant.isalnum())
        patterns = sorted(map(re.escape, marks), key=len, reverse=True)
        self._kept = re.compile("|".join(patterns)) if patterns else None
        self.runs: list[Run] = []
        self.messages = [self.plant_message(at, message) for at, message in enumerate(messages)]

    def placeholders_of(self, message: int) -> list[str]:
        """Return the placeholders of a message."""
        return [placeholder(index) for index, run in enumerate(self.runs) if run.message == message]

    def run_at(self, mark: str) -> Run:
        return self.runs[ord(mark[-1]) - _FIRST]

    def plant_message(self, at: int, message: ChatMessage) -> ChatMessage:
        """Return a message with placeholders for the texts."""
        planted = dict(message)
        if "content" in message:
            planted["content"] = self._tree(at, "content", message["content"])
        # Equal thoughts under several keys are written once, by any key.
        thoughts = {message[field]: field for field in reversed(THOUGHTS) if field in message}
        told = {text: self._planted(at, field, text) for text, field in thoughts.items()}
        planted |= {field: told[message[field]] for field in THOUGHTS if field in message}
        if message.get(CALLS):
            planted[CALLS] = [self.plant_call(at, call) for call in message[CALLS]]
        return planted

    def plant_call(self, at: int, call: Mapping[str, Any]) -> dict[str, Any]:
        """Return a call with placeholders for the texts of arguments, or for the name if no argument is a text."""
        function, before = dict(call["function"]), len(self.runs)
        function["arguments"] = self._tree(at, CALLS, function["arguments"])
        if len(self.runs) == before:
            function["name"] = self._planted(at, CALLS, function["name"])
        return {**call, "function": function}

    def _tree(self, at: int, field: str, value: Any) -> Any:
        if isinstance(value, str):
            return self._planted(at, field, value)
        if isinstance(value, Mapping):
            # The type of a content part is a keyword for the template.
            return {key: child if key == "type" else self._tree(at, field, child) for key, child in value.items()}
        return [self._tree(at, field, child) for child in value] if isinstance(value, list) else value

    def _planted(self, at: int, field: str, text: str) -> str:
        parts, begin = [], 0
        for match in (*(self._kept.finditer(text) if self._kept else ()), None):
            inner = text[begin : match.start() if match else len(text)]
            if core := inner.strip():
                if len(self.runs) >= _MOST:
                    raise DataError(f"message {at + 1}: has more than {_MOST} texts")
                # White space around a text is kept, since templates strip it.
                before, _, behind = inner.partition(core)
                inner = f"{before}{placeholder(len(self.runs))}{behind}"
                self.runs.append(Run(at, field, core))
            parts += [inner, match.group() if match else ""]
            begin = match.end() if match else 0
        return "".join(parts)


def aligned(planted: Planted, shown: str, text: str) -> Callable[[int], int] | None:
    """Return a function from places in `shown` to places in `text`; None if more than placeholders differ."""
    begins: list[tuple[int, int, int, int]] = []  # for each placeholder: begin and end in shown, begin and end in text
    parts = PLACEHOLDERS.split(shown)
    there = here = 0
    for index in range(0, len(parts), 2):
        literal = parts[index]
        if not text.startswith(literal, here):
            return None
        there, here = there + len(literal), here + len(literal)
        if index + 1 == len(parts):
            break
        run, following = planted.run_at(parts[index + 1]), parts[index + 2]
        last = index + 3 == len(parts)
        for form in forms_of(run.text):
            end = here + len(form)
            if (
                text.startswith(form, here)
                and text.startswith(following, end)
                and (not last or end + len(following) == len(text))
            ):
                break
        else:
            return None
        begins.append((there, there + 2, here, end))
        there, here = there + 2, end
    if here != len(text):
        return None

    def position(offset: int) -> int:
        shift = 0
        for begin, stop, first, end in begins:
            if offset < stop:
                return first if offset > begin else offset + shift
            shift = end - stop
        return offset + shift

    return position


def forms_of(text: str) -> Iterable[str]:
    """Yield the forms of a text in rendered templates: unchanged, as JSON, as HTML, in other letter case."""
    yield text
    yield json.dumps(text, ensure_ascii=False)[1:-1]
    yield json.dumps(text)[1:-1]
    yield html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")  # Jinja's spelling of quotes
    yield from (text.upper(), text.lower(), text.capitalize(), text.title())
