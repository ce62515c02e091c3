"""Renders dialogues by the tokenizer's chat template, and finds the assistant's text, the only learned part.

| template                                 | the assistant's text                                      |
|------------------------------------------|-----------------------------------------------------------|
| {% generation %} ... {% endgeneration %} | the text inside the block, as in transformers             |
| no such block                            | the answers that placeholders find in the text (spans.py)    |

A template is a Jinja program by the tokenizer's author. A separate process renders templates, in Jinja's sandbox and
within bounds (renderer.py), with the names that transformers provides, except for the date: equal files must give equal
tokens every day.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meshwright.data.dialogue_records import KNOWN, RESERVED, SPEAKER, ChatMessage, Dialogue
from meshwright.data.marks import SETTINGS, SPECIAL_TOKENS, spelling
from meshwright.data.marks_section import AUTO, NONE, AskedMarks, read_settings
from meshwright.data.messages_section import ChatSection
from meshwright.data.renderer import Refusal, Render, Renderer
from meshwright.data.spans import Reading, Spans, read_dialogue
from meshwright.data.template_forms import Forms
from meshwright.data.tokenizer import Tokenizer
from meshwright.ranks.errors import DataError
from meshwright.ranks.foreign import read_named, read_text

TEMPLATE = "chat_template.jinja"
"""The file with the template next to a tokenizer.json, if tokenizer_config.json has none."""
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

_BEGIN, _END = RESERVED[:2]
_ANSWER = "\ufdd2"
"""A third reserved code point, a placeholder for an answer."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text, with the values for rendering."""

    text: str
    where: str
    """The template's file."""
    tokens: Mapping[str, str] = field(default_factory=dict)
    """The spellings of special tokens, by the template's names."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Values of the run: data.template_arguments."""

    @cached_property
    def _renderer(self) -> Renderer:
        return Renderer(self.text, self.where)

    @cached_property
    def _forms(self) -> Forms:
        return Forms(self._renderer, self._variables(None))

    def _variables(self, tools: Sequence[Any] | None) -> dict[str, Any]:
        """Return the variables of every text of a dialogue. `tools`: JSON schemas that the assistant may call."""
        defaults = {"tools": tools, "documents": None, "add_generation_prompt": False}
        return defaults | dict(self.tokens) | dict(self.arguments)

    def means_nothing(self, messages: Sequence[ChatMessage]) -> frozenset[str]:
        """Return the keys of messages that the template does not mention, such as an id or a time.

        Raises:
            DataError: the template cannot be loaded.
        """
        others = frozenset(key for message in messages for key in message) - KNOWN
        return others - self._renderer.mentions(others) if others else others

    def render(
        self,
        messages: Sequence[ChatMessage],
        location: str,
        prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """Render a dialogue.

        Args:
            messages: in any form of a record.
            location: file and line, for errors.
            prompt: append the prompt for an answer.
            tools: JSON schemas of the tools that the assistant may call.

        Raises:
            DataError: the template refuses the messages, or exceeds the bounds of time or memory for a text.
        """
        fitted = self._forms.fitted(Dialogue(messages, location))
        render: Render = {"messages": fitted, "add_generation_prompt": prompt}
        (text,) = self._renderer.render(self._variables(tools), [render])
        if isinstance(text, Refusal):
            raise DataError(f"{location}: {self.where} does not take it: {text.why}")
        return text

    def question(self, asked: str, location: str) -> tuple[str, str]:
        """Return (text of a dialogue of one question up to the answer, text that closes an answer).

        Raises:
            DataError: as `render`.
        """
        ask, answer = {"role": "user", "content": asked}, {"role": SPEAKER, "content": _ANSWER}
        whole = self.render([ask, answer], location)
        return self.render([ask], location, prompt=True), whole.rpartition(_ANSWER)[2].replace(_END, "")

    def prompt(self, messages: Sequence[ChatMessage], location: str, *, goes_on: bool = False) -> str:
        """Return a dialogue's text with the prompt for an answer.

        Args:
            messages: the dialogue.
            location: file and line, for errors.
            goes_on: end instead with the content of the last message, for the model to continue.

        Raises:
            DataError: as `render`, or the template does not write the last message.
        """
        text, _ = _without_marks(self.render(messages, location, prompt=not goes_on))
        if not goes_on:
            return text
        begun = messages[-1]["content"]
        # Templates may strip a message on one or both sides, so the search leaves out outer white space.
        before, found, _ = text.rpartition(begun.strip())
        if not found:
            raise DataError(f"{location}: {self.where} does not write the last message, which is to be gone on with")
        return before + (begun.lstrip() if text.startswith(begun.lstrip(), len(before)) else found)

    def dialogue(self, dialogue: Dialogue) -> tuple[str, Spans]:
        """Return (the dialogue's text, the learned spans): the assistant's messages except `dialogue.unlearned`.

        Raises:
            DataError: the spans cannot be found, or the template leaves out a text to learn.
        """
        variables, marked = self._variables(dialogue.tools), _MARKS.search(self.text) is not None

        def ask(renders: Sequence[Render]) -> list[str | Refusal]:
            return self._renderer.render(variables, renders)

        fitted = replace(dialogue, messages=self._forms.fitted(dialogue))
        reading = Reading(self.where, self._renderer.constants, marked)
        text, spans = read_dialogue(ask, fitted, reading)
        if marked:
            text, spans = _without_marks(text)
        if not any(end > begin for begin, end in spans):
            raise DataError(f"{dialogue.where}: {self.where} leaves nothing of what the {SPEAKER} says")
        if not marked or not dialogue.unlearned:
            return text, spans
        # With a generation block in an inner loop, or around half a message, spans do not match messages.
        speaks = [at for at, message in enumerate(dialogue.messages) if message["role"] == SPEAKER]
        if len(spans) != len(speaks):
            marks = f"{self.where} marks {len(spans)} parts of {len(speaks)} messages of the {SPEAKER}"
            raise DataError(f"{dialogue.where}: {marks}, so that weights of messages cannot be told apart")
        return text, [span for at, span in zip(speaks, spans, strict=True) if at not in dialogue.unlearned]


def _without_marks(text: str) -> tuple[str, Spans]:
    """Return (a rendered text without marks, the spans between marks)."""
    plain, spans, begin = "", [], 0
    for segment in re.split(f"([{_BEGIN}{_END}])", text):
        if segment == _BEGIN:
            begin = len(plain)
        elif segment == _END:
            spans.append((begin, len(plain)))
        else:
            plain += segment
    return plain, spans


def kept_template(folder: Path, asked: AskedMarks = AskedMarks()) -> ChatTemplate | None:
    """Return the template in a checkpoint's folder, if any.

    Raises:
        DataError: the template cannot be read.
    """
    in_settings = read_settings(folder / SETTINGS).get("chat_template") is not None
    has_template = in_settings or (folder / TEMPLATE).is_file()
    return template_of(str(folder / "tokenizer.json"), None, asked) if has_template else None


def template_for(data: ChatSection, checkpoint: Path | None = None) -> ChatTemplate:
    """Return the template of a run's dialogues. `checkpoint`: a checkpoint's folder; a template there has priority.

    Raises:
        DataError: there is no template.
    """
    template = None if checkpoint is None else kept_template(checkpoint, data.asked)
    template = template or template_of(data.tokenizer, data.template, data.asked)
    return replace(template, arguments=data.arguments)


def closing_token(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """Return the id of the special token that closes an answer, if any.

    Raises:
        DataError: the template does not render.
    """
    (ids, _) = tokenizer.encode_placed(template.question("?", "a question")[1], marked=True)
    return next((token for token in ids[:1] if tokenizer.name_of(token) in tokenizer.special_tokens), None)


def template_of(tokenizer: str, template: str | None, asked: AskedMarks = AskedMarks()) -> ChatTemplate:
    """Return a tokenizer's chat template.

    Args:
        tokenizer: the tokenizer.json file.
        template: the template's file; None: the template in the folder of tokenizer.json.
        asked: data.begin and data.end, which replace the tokenizer's bos_token and eos_token.

    Raises:
        DataError: there is no template.
    """
    beside = Path(tokenizer).expanduser().parent
    settings = read_settings(beside / SETTINGS) if tokenizer.endswith(".json") else {}
    spellings = (read_settings(beside / SPECIAL_TOKENS) if tokenizer.endswith(".json") else {}) | settings
    tokens = {key: text for key in _TOKENS if (text := spelling(spellings.get(key))) is not None}
    for key, word in (("bos_token", asked.begin), ("eos_token", asked.end)):
        # `none` becomes "", since the template itself writes {{ bos_token }}.
        if word != AUTO:
            tokens[key] = "" if word == NONE else word
    path = beside / TEMPLATE if template is None else Path(template).expanduser()
    if path.is_file():
        try:
            return ChatTemplate(read_text(path) if template is None else read_named(path), str(path), tokens)
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{path}: cannot be read as a template: {error}") from error
    text = settings.get("chat_template")
    if isinstance(text, list):  # several templates by name
        named = {entry.get("name"): entry.get("template") for entry in text if isinstance(entry, dict)}
        text = named.get("default")
    if template is not None or not isinstance(text, str):
        lacks = f"{template}: is no such file" if template is not None else f"{beside}: has no chat template"
        raise DataError(f"{lacks}; wanted {TEMPLATE} or {SETTINGS} beside the tokenizer, or data.template=FILE")
    return ChatTemplate(text, str(beside / SETTINGS), tokens)
