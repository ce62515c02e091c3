"""The data section of dialogues, rendered by a chat template; only the assistant's text is learned. No torch."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator

from meshwright.config.section import Rule, rule
from meshwright.data.marks_section import AUTO, NONE
from meshwright.data.records_section import Picks, RecordSection
from meshwright.data.section import PREPARED
from meshwright.data.text_section import documents_are_kept_apart, parse_weights
from meshwright.ranks.errors import DataError, Problem

if TYPE_CHECKING:
    from meshwright.config import Config


OWN_NAMES = ("messages", "tools", "documents", "add_generation_prompt")
"""The template's variables that each dialogue sets, not the run."""


@rule("data.tokenizer", "data.template", "data.source", "data.turns", "data.template_arguments")
def there_is_a_template(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, ChatSection), data
    if (Path(data.source).expanduser() / PREPARED).is_file():
        if data.template is not None:
            rule_text = f"has no effect: data.source={data.source} was prepared by another"
            yield Problem("data.template", data.template, rule_text, "leave it out")
        if isinstance(data, MessagesData) and data.turns != "together":
            rule_text = f"has no effect: data.source={data.source} was prepared already"
            yield Problem("data.turns", data.turns, rule_text, "leave it out")
        return
    try:
        template = data.chat_template()
    except DataError as error:
        field, value = ("tokenizer", data.tokenizer) if data.template is None else ("template", data.template)
        yield Problem(f"data.{field}", value, f"gives no chat template: {error}")
        return
    assert template is not None
    for name, value in data.arguments.items():
        has_word = re.search(rf"\b{re.escape(name)}\b", template.text)
        if name in OWN_NAMES or not has_word:
            of_dialogues = "is a variable of each dialogue, and of no run"
            rule_text = f"has no effect: {template.where} has no such word" if not has_word else of_dialogues
            yield Problem(f"data.template_arguments.{name}", value, rule_text, "leave it out")


@rule("data.end")
def a_dialogue_ends(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, ChatSection), data
    if data.end == NONE:
        yield Problem("data.end", data.end, "has no effect: a chat template ends what is said", f"{AUTO}, a token")


class ChatSection(RecordSection):
    """Base of the kinds of records that a chat template renders."""

    template_by: ClassVar[str] = "meshwright.data.chat:template_for"
    source_names: ClassVar[tuple[str, ...]] = ()
    begins: ClassVar[bool] = True
    rules: ClassVar[tuple[Rule, ...]] = (*RecordSection.rules, there_is_a_template, a_dialogue_ends)

    begin: str = AUTO
    """The bos_token of the template: auto (as the tokenizer's own files say), none, or a token's text."""
    end: str = AUTO
    """The eos_token of the template, which also ends generation: auto, or a token's text."""
    template: str | None = None
    """A file with the chat template; null: the template next to tokenizer.json."""
    template_arguments: Annotated[tuple[tuple[str, bool | int | float | str], ...], BeforeValidator(parse_weights)] = ()
    """Values for the template's variables, in training and in answers: {enable_thinking: false}."""
    overlong: Literal["drop", "cut"] = "drop"
    """Dialogues longer than sequence are left out (drop), or cut at the end (cut)."""

    @property
    def arguments(self) -> dict[str, Any]:
        """template_arguments by name."""
        return dict(self.template_arguments)


class MessagesData(ChatSection):
    """Dialogues: records in a file or a folder, in the forms messages, sharegpt or alpaca (dialogues.py)."""

    kind: Literal["messages"]
    gives: ClassVar[str] = "tokens"
    packs: ClassVar[Literal["text", "pairs", "messages"]] = "messages"
    corpus_by: ClassVar[str] = "meshwright.data.messages:dialogue_corpus"
    samples_by: ClassVar[str] = "meshwright.data.messages:dialogue_samples"
    claimed_by: ClassVar[str] = "meshwright.data.dialogues:claims_dialogues"
    source_forms: ClassVar[str] = "a jsonl, json or parquet file of dialogues, a folder of these, a prepared folder"
    rules: ClassVar[tuple[Rule, ...]] = (
        *ChatSection.rules,
        documents_are_kept_apart,
    )

    separate: ClassVar[bool] = True
    turns: Literal["together", "last", "each"] = "together"
    """The answers of a dialogue that are learned: all in one text, the last, or each in a sample that ends with it."""
    column: str | None = None
    """The key or column of a record's messages; null: messages, conversations."""

    @property
    def picks(self) -> Picks:
        return Picks(self.split, self.column)
