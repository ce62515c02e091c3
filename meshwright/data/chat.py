"""Renders dialogues by the tokenizer's chat template, and finds the assistant's text, the only part that is learned.

| template                                 | the assistant's text                                      |
|------------------------------------------|-----------------------------------------------------------|
| {% generation %} ... {% endgeneration %} | the text inside the block, as in transformers             |
| no such block                            | the text that each message of the assistant appends       |

Without a block, the dialogue is rendered up to each of the assistant's messages (with the prompt for an answer) and
up to its end. Both must be prefixes of the whole text; a template that rewrites earlier turns is refused.

A template is a Jinja program by the tokenizer's author. It runs in Jinja's sandbox with the names that transformers
provides, except for the date: the same file must give the same tokens every day.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from meshwright.data.dialogues import RESERVED, SPEAKER, ChatMessage, Dialogue
from meshwright.data.marks import SETTINGS, SPECIAL_TOKENS, spelling
from meshwright.data.marks_section import AUTO, NONE, AskedMarks, read_settings
from meshwright.data.messages_section import MessagesData
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError
from meshwright.foreign import read_named, read_text

TEMPLATE = "chat_template.jinja"
"""The file beside a tokenizer.json that holds its template, where tokenizer_config.json does not."""
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

_BEGIN, _END = RESERVED
_ANSWER = "\ufdd2"
"""A third reserved code point, which stands for an answer."""
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Spans = list[tuple[int, int]]
"""(start, stop) of the assistant's text, in characters."""


class _Generation(Extension):
    """The block {% generation %}, which puts marks around its text."""

    tags = {"generation"}  # noqa: RUF012 - jinja's own form

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Any) -> str:
        return f"{_BEGIN}{caller()}{_END}"


def _as_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@dataclass(frozen=True)
class ChatTemplate:
    """A template's text, its file (`where`), and the spellings of special tokens by the names that it uses."""

    text: str
    where: str
    tokens: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _program(self) -> Any:
        environment: Environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        # The names that transformers provides, except `strftime_now`: a date would change the tokens from day to day.
        environment.filters["tojson"] = _as_json
        environment.globals["raise_exception"] = raise_exception
        try:
            return environment.from_string(self.text)
        except TemplateError as error:
            raise DataError(f"{self.where}: is no chat template: {error}") from error

    def render(
        self,
        messages: Sequence[ChatMessage],
        place: str,
        prompt: bool = False,
        tools: Sequence[Any] | None = None,
    ) -> str:
        """The dialogue's text. `place`: its file and line, for errors; `prompt`: append the prompt for an answer;
        `tools`: JSON schemas of the tools that the assistant may call. Raises DataError."""
        try:
            text: str = self._program.render(
                messages=list(messages), tools=tools, documents=None, add_generation_prompt=prompt, **self.tokens
            )
        # Beside TemplateError, a template raises what any program may: IndexError, TypeError, ZeroDivisionError.
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            why = f"{type(error).__name__}: {error}" if not isinstance(error, TemplateError) else str(error)
            raise DataError(f"{place}: {self.where} does not take it: {why}") from error
        return text

    def question(self, asked: str, place: str) -> tuple[str, str]:
        """The text of a dialogue of one question up to the answer, and the text that closes an answer. Raises
        DataError."""
        ask, answer = {"role": "user", "content": asked}, {"role": SPEAKER, "content": _ANSWER}
        whole = self.render([ask, answer], place)
        return self.render([ask], place, prompt=True), whole.rpartition(_ANSWER)[2].replace(_END, "")

    def prompt(self, messages: Sequence[ChatMessage], place: str, *, goes_on: bool = False) -> str:
        """A dialogue's text with the prompt for an answer. `goes_on`: end instead with the content of the last message,
        which the model continues. Raises DataError where the template does not write the message."""
        text, _ = _without_marks(self.render(messages, place, prompt=not goes_on))
        if not goes_on:
            return text
        begun = messages[-1]["content"]
        # Templates may strip a message on one side or both, so it is searched without its outer white space.
        before, found, _ = text.rpartition(begun.strip())
        if not found:
            raise DataError(f"{place}: {self.where} does not write the last message, which is to be gone on with")
        return before + (begun.lstrip() if text.startswith(begun.lstrip(), len(before)) else found)

    def dialogue(self, dialogue: Dialogue) -> tuple[str, Spans]:
        """The dialogue's text, and the spans that are learned: the assistant's messages but the `unlearned` ones.

        Raises DataError where the spans cannot be found.
        """
        text = self.render(dialogue.messages, dialogue.where, tools=dialogue.tools)
        speaks = [at for at, message in enumerate(dialogue.messages) if message["role"] == SPEAKER]
        spans = [] if _MARKS.search(self.text) else self._additions(dialogue, speaks, text)
        if _BEGIN in text:
            text, spans = _without_marks(text)
        if not any(end > begin for begin, end in spans):
            raise DataError(f"{dialogue.where}: {self.where} leaves nothing of what the {SPEAKER} says")
        if not dialogue.unlearned:
            return text, spans
        # With a generation block in an inner loop, or around half a message, spans do not match messages.
        if len(spans) != len(speaks):
            marks = f"{self.where} marks {len(spans)} parts of {len(speaks)} messages of the {SPEAKER}"
            raise DataError(f"{dialogue.where}: {marks}, so that weights of messages cannot be told apart")
        return text, [span for at, span in zip(speaks, spans, strict=True) if at not in dialogue.unlearned]

    def _additions(self, dialogue: Dialogue, speaks: Sequence[int], text: str) -> Spans:
        """The span that each of the assistant's messages (numbers `speaks`) appends to the text. Raises DataError."""
        spans, place, tools = [], dialogue.where, dialogue.tools
        for at in speaks:
            before = self.render(dialogue.messages[:at], place, prompt=True, tools=tools)
            through = self.render(dialogue.messages[: at + 1], place, tools=tools)
            # A template that rewrites earlier turns would give spans of another text.
            if not through.startswith(before) or not text.startswith(through):
                other = f"{self.where} writes message {at + 1} otherwise where other messages follow it"
                remedy = f"mark what the {SPEAKER} says by {{% generation %}} in a template of your own, data.template"
                raise DataError(f"{place}: {other}; {remedy}")
            spans.append((len(before), len(through)))
        return spans


def _without_marks(text: str) -> tuple[str, Spans]:
    """A rendered text without its marks, and the spans between them."""
    plain, spans, begin = "", [], 0
    for part in re.split(f"([{_BEGIN}{_END}])", text):
        if part == _BEGIN:
            begin = len(plain)
        elif part == _END:
            spans.append((begin, len(plain)))
        else:
            plain += part
    return plain, spans


def kept_template(folder: Path, asked: AskedMarks = AskedMarks()) -> ChatTemplate | None:
    """The template in a checkpoint's folder, if any. Raises DataError where it cannot be read."""
    in_settings = read_settings(folder / SETTINGS).get("chat_template") is not None
    has_template = in_settings or (folder / TEMPLATE).is_file()
    return template_of(str(folder / "tokenizer.json"), None, asked) if has_template else None


def template_for(data: MessagesData, kept: Path | None = None) -> ChatTemplate:
    """The template of a run's dialogues. `kept`: a checkpoint's folder, whose template wins. Raises DataError."""
    if kept is not None and (template := kept_template(kept, data.asked)) is not None:
        return template
    return template_of(data.tokenizer, data.template, data.asked)


def closing_token(template: ChatTemplate, tokenizer: Tokenizer) -> int | None:
    """The id of the special token that closes an answer, if any. Raises DataError if the template does not render."""
    (ids, _) = tokenizer.encode_placed(template.question("?", "a question")[1], marked=True)
    return next((token for token in ids[:1] if tokenizer.name_of(token) in tokenizer.special_tokens), None)


def template_of(tokenizer: str, template: str | None, asked: AskedMarks = AskedMarks()) -> ChatTemplate:
    """The template in the file `template`, or where that is None in the folder of tokenizer.json.

    `asked`: data.begin and data.end, which replace the tokenizer's bos_token and eos_token. Raises DataError where it
    has no template.
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
        named = {one.get("name"): one.get("template") for one in text if isinstance(one, dict)}
        text = named.get("default")
    if template is not None or not isinstance(text, str):
        lacks = f"{template}: is no such file" if template is not None else f"{beside}: has no chat template"
        raise DataError(f"{lacks}; wanted {TEMPLATE} or {SETTINGS} beside the tokenizer, or data.template=FILE")
    return ChatTemplate(text, str(beside / SETTINGS), tokens)
