"""Finds the forms of messages that a chat template accepts, by renders with placeholders, once for each template.

| in a record                       | forms, tried in this order                                                    |
|-----------------------------------|-------------------------------------------------------------------------------|
| content                           | a text; a list of parts (templates of models that see)                        |
| content as a list of parts        | kept, if the template writes the text of each part; else one text              |
| arguments of a call               | an object; a text of JSON (DeepSeek's templates)                              |
| no content at a message of calls  | kept; null; no key; an empty text                                             |
| role developer                    | kept, if the template has the word; else system                               |
| thoughts under any key            | as `reasoning_content` and `thinking`, as in transformers                     |

A form is right if the template takes the messages and writes the placeholders, and no repr of Python.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from meshwright.data.dialogue_records import (
    CALLS,
    DEVELOPER,
    PLACEHOLDER,
    SPEAKER,
    THINKING,
    THOUGHTS,
    TOOL,
    ChatMessage,
    Dialogue,
)
from meshwright.data.renderer import Renderer
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import parse_json

_ABSENT = object()
"""A missing key."""
_ONE, _TWO, _THREE = (f"{PLACEHOLDER}{chr(0xF0000 + index)}" for index in range(3))
_REPRS = ("'type'", '"type"', "{'", "&#39;")


class Forms:
    """A template's forms."""

    def __init__(self, renderer: Renderer, variables: dict[str, Any]) -> None:
        self._renderer, self._variables = renderer, variables
        self._silent: dict[str, dict[str, Any]] = {}

    def fitted(self, dialogue: Dialogue) -> list[ChatMessage]:
        """Return the messages in the template's forms.

        Raises:
            DataError: arguments of a call are no JSON object.
        """
        return [
            self._message(message, f"{dialogue.where} message {at}")
            for at, message in enumerate(dialogue.messages, start=1)
        ]

    def _message(self, message: ChatMessage, where: str) -> ChatMessage:
        fitted = dict(message)
        if message["role"] == DEVELOPER and not self._renderer.mentions([DEVELOPER]):
            fitted["role"] = "system"
        thoughts = next((message[key] for key in THOUGHTS if key in message), None)
        if thoughts is not None:
            fitted = {THINKING: thoughts, **fitted, THOUGHTS[0]: thoughts}
        content = message.get("content")
        if isinstance(content, str) and self.wants_parts:
            fitted["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not self.takes_lists:
            fitted["content"] = "".join(entry["text"] for entry in content)
        if message.get(CALLS):
            as_text = self.wants_text
            fitted[CALLS] = [_with_arguments(call, as_text, where) for call in message[CALLS]]
            if not content:
                given = repr(message.get("content", _ABSENT))
                if given not in self._silent:
                    self._silent[given] = self._silence(message, as_text)
                fitted.pop("content", None)
                fitted |= self._silent[given]
        return fitted

    def _writes(self, messages: Sequence[ChatMessage], *wanted: str) -> bool:
        """Return True if the template accepts the messages and writes each wanted text, without Python's repr."""
        (text,) = self._renderer.render(self._variables, [{"messages": list(messages)}])
        if not isinstance(text, str) or any(word not in text for word in wanted):
            return False
        return not any(word in text for word in _REPRS) if len(wanted) > 2 else True

    @cached_property
    def wants_parts(self) -> bool:
        """Whether the template accepts a content only as parts."""
        texts = [("user", _ONE), (SPEAKER, _TWO)]
        if self._writes([{"role": role, "content": text} for role, text in texts], _ONE, _TWO):
            return False
        parts = [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in texts]
        return self._writes(parts, _ONE, _TWO)

    @cached_property
    def takes_lists(self) -> bool:
        """Whether the template writes every part of a content."""
        asked = [{"type": "text", "text": text} for text in (_ONE, _TWO)]
        answer = [{"type": "text", "text": _THREE}]
        messages: list[ChatMessage] = [{"role": "user", "content": asked}, {"role": SPEAKER, "content": answer}]
        return self._writes(messages, _ONE, _TWO, _THREE)

    def _calling(self, arguments: Any, content: Any) -> list[ChatMessage]:
        call = {"id": "callid001", "type": "function", "function": {"name": "f", "arguments": arguments}}
        message = {"role": SPEAKER, CALLS: [call]} | ({} if content is _ABSENT else {"content": content})
        return [{"role": "user", "content": _ONE}, message]

    @cached_property
    def wants_text(self) -> bool:
        """Whether the template accepts arguments only as a JSON text."""
        arguments = {"k": _TWO}
        for given in (arguments, json.dumps(arguments, ensure_ascii=False)):
            for content in ("", None, _ABSENT):
                (text,) = self._renderer.render(self._variables, [{"messages": self._calling(given, content)}])
                # A template that prints an object prints Python's repr.
                if isinstance(text, str) and _TWO in text and "'k'" not in text:
                    return isinstance(given, str)
        return False

    def _silence(self, message: ChatMessage, as_text: bool) -> dict[str, Any]:
        """Return the content of a message with only calls, in a form that the template accepts."""
        given = message.get("content", _ABSENT)
        arguments: Any = {"k": _TWO}
        if as_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        for content in (given, None, _ABSENT, ""):
            result = {"role": TOOL, "content": _THREE, "name": "f", "tool_call_id": "callid001"}
            for messages in (self._calling(arguments, content), [*self._calling(arguments, content), result]):
                (text,) = self._renderer.render(self._variables, [{"messages": messages}])
                # A template that prints a missing content prints Python's None.
                if isinstance(text, str) and _TWO in text and "None" not in text.partition(_ONE)[2]:
                    return {} if content is _ABSENT else {"content": content}
        # The template does not support calls: the content is an empty text, and the missing call is reported later.
        empty = [{"type": "text", "text": ""}] if self.wants_parts else ""
        return {"content": empty} if not self._renderer.mentions([CALLS]) or given is _ABSENT else {"content": given}


def _with_arguments(call: dict[str, Any], as_text: bool, where: str) -> dict[str, Any]:
    """Return a call with arguments in the template's form.

    Raises:
        DataError: a text of arguments is no JSON object.
    """
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str) and not as_text:
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: the arguments of {function['name']} are no JSON: {error}") from error
        if not isinstance(arguments, dict):
            raise DataError(f"{where}: the arguments of {function['name']} are no JSON object")
    elif as_text and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
