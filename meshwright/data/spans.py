"""Spans of the assistant's text in a rendered dialogue, within the one text for training.

Published templates write a message differently if others follow (Qwen3 adds an empty thought only to the last answer).
So shorter dialogues do not give the spans. The dialogue is rendered a second time, with a placeholder, a private code
point, for each text of a message. Placeholders show the place of each message. Renders that end before an answer, or
after an answer, show the template's text around the answer.

| part of the text     | learned                                                                           |
|----------------------|-----------------------------------------------------------------------------------|
| the prompt           | no: the template writes it if asked for an answer (`<|im_start|>assistant\\n`)     |
| after the prompt     | yes: an empty thought, a header of calls, the answer                              |
| after the answer     | yes, up to the end of the turn (`<|im_end|>\\n`), as if the dialogue ended there   |
| other messages       | no                                                                                |

If a shorter dialogue is a prefix of the text, both ways give the same spans.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from meshwright.data.dialogue_records import PLACEHOLDER, SPEAKER, Dialogue
from meshwright.data.placeholders import PLACEHOLDERS, Planted, aligned, placeholder
from meshwright.data.renderer import Refusal, Render
from meshwright.ranks.errors import DataError

Spans = list[tuple[int, int]]
"""(start, stop) of the assistant's text, in characters."""

Ask = Callable[[Sequence[Render]], list[str | Refusal]]

_WORDS = re.compile(f"{PLACEHOLDER}.|<[^<>\\s]{{1,64}}>|\\[/?[A-Z_]+\\]|\\w+|.", re.DOTALL)
"""The smallest parts of a text: marks, words, single characters."""


@dataclass(frozen=True)
class Reading:
    """The facts of a template that are needed to read dialogues."""

    where: str
    """The template's file."""
    constants: frozenset[str]
    """Texts that the template searches for."""
    marked: bool
    """True if the template marks the learned parts, so that no spans are needed."""


def read_dialogue(ask: Ask, dialogue: Dialogue, reading: Reading) -> tuple[str, Spans]:
    """Return the dialogue's text and the span of each learned answer.

    Args:
        ask: renders texts.
        dialogue: in the template's form.
        reading: the template's facts.

    Raises:
        DataError: the template refuses the dialogue, leaves out a text to learn, or writes an answer in a form that
            hides the span.
    """
    messages, location, where, marked = dialogue.messages, dialogue.where, reading.where, reading.marked
    planted = Planted(messages, reading.constants)
    learned = [at for at, message in enumerate(messages) if message["role"] == SPEAKER and at not in dialogue.unlearned]
    renders: list[Render] = [{"messages": messages}, {"messages": planted.messages}]
    for at in learned:
        renders += [
            {"messages": planted.messages[:at], "add_generation_prompt": True},
            {"messages": planted.messages[: at + 1]},
        ]
    text, shown, *around = ask(renders)
    if isinstance(text, Refusal):
        raise DataError(f"{location}: {where} does not take it: {text.why}")
    if isinstance(shown, Refusal) or (positions := aligned(planted, shown, text)) is None:
        # The template's branches depend on the texts of messages, so placeholders change the result.
        if marked:
            return text, []
        plain = [{**render, "messages": messages[: len(render["messages"])]} for render in renders[2:]]
        pairs = iter(ask(plain))
        return text, [_by_prefixes(next(pairs), next(pairs), text, at, location, where) for at in learned]
    for index, at in enumerate(learned):
        _check_kept(planted, at, shown, around[2 * index + 1], location, reading)
    if marked:
        return text, []
    finder = _Finder(ask, planted, shown)
    spans = []
    for index, at in enumerate(learned):
        span = finder.span(at, around[2 * index], around[2 * index + 1])
        if span is None:
            raise DataError(f"{location}: {where} mixes message {at + 1} with others; {_REMEDY}")
        spans.append((positions(span[0]), positions(span[1])))
    return text, spans


_REMEDY = f"mark what the {SPEAKER} says by {{% generation %}} in a template of your own, data.template"


def _by_prefixes(
    before: str | Refusal, through: str | Refusal, text: str, at: int, location: str, where: str
) -> tuple[int, int]:
    """Return the span that a message appends to the text of a shorter dialogue.

    Raises:
        DataError: the shorter dialogue is no prefix of the text.
    """
    for rendered in (before, through):
        if isinstance(rendered, Refusal):
            raise DataError(f"{location}: {where} does not take it: {rendered.why}")
    assert isinstance(before, str), before
    assert isinstance(through, str), through
    if not through.startswith(before) or not text.startswith(through):
        fault = f"{where} writes message {at + 1} by its text, and otherwise if other messages follow it"
        raise DataError(f"{location}: {fault}; {_REMEDY}")
    return len(before), len(through)


def _check_kept(planted: Planted, at: int, shown: str, alone: str | Refusal, location: str, reading: Reading) -> None:
    """Check that the template writes all texts of a learned message.

    Args:
        planted: the dialogue with placeholders.
        at: index of the message.
        shown: the rendered text with placeholders.
        alone: the rendered text if the dialogue ends with the message.
        location: file and line, for errors.
        reading: the template's facts.

    Raises:
        DataError: the template leaves out a text.
    """
    for mark in planted.placeholders_of(at):
        if mark in shown:
            continue
        run = planted.run_at(mark)
        said = run.text if len(run.text) <= 40 else f"{run.text[:37]}..."
        loss = f"{reading.where} leaves out the {run.field} of message {at + 1}, {said!r}, which would not be learned"
        if isinstance(alone, str) and mark in alone:
            remedy = "data.turns=last learns the last answer only, data.turns=each makes a sample of each turn"
        else:
            remedy = "leave it out of the record, or give a template of your own, data.template"
        raise DataError(f"{location}: {loss}; {remedy}")


class _Finder:
    """Finder of the spans of answers in a text with placeholders."""

    def __init__(self, ask: Ask, planted: Planted, shown: str) -> None:
        self._ask, self._planted, self._shown = ask, planted, shown

    def span(self, at: int, before: str | Refusal, through: str | Refusal) -> tuple[int, int] | None:
        """Return the span of message `at`; None if texts of other messages are inside.

        Args:
            at: index of the message.
            before: the dialogue up to the message, with the prompt for an answer.
            through: the dialogue that ends with the message.
        """
        shown = self._shown
        # If the template only appends messages, the span is the appended text.
        texts = (before, through) if isinstance(before, str) and isinstance(through, str) else None
        if texts and texts[1].startswith(texts[0]) and shown.startswith(texts[1]):
            return len(texts[0]), len(texts[1])
        placeholders = self._planted.placeholders_of(at)
        first, last = (pick((shown.index(mark), mark) for mark in placeholders) for pick in (min, max))
        begin, stop = self.begin(first[0], before), last[0] + len(last[1])
        end = stop + self.closing(at, last[1], shown[stop:], through)
        inside = {match.group() for match in PLACEHOLDERS.finditer(shown, begin, end)}
        return (begin, end) if inside <= set(placeholders) else None

    def begin(self, first: int, before: str | Refusal) -> int:
        """Return the place after the prompt, before the placeholder at `first`."""
        shown = self._shown
        others = list(PLACEHOLDERS.finditer(shown, 0, first))
        anchor, behind = (others[-1].group(), others[-1].end()) if others else ("", 0)
        prompt = self._prompt()
        found = shown.rfind(prompt, behind, first) if prompt else -1
        begin = first if found < 0 else found + len(prompt)
        if isinstance(before, str) and anchor in before:
            wanted = before[before.rindex(anchor) + len(anchor) :] if anchor else before
            shared = behind + _common(shown[behind:first], wanted)
            # The texts may differ before the prompt, at the end of a last message.
            begin = shared if found < 0 else max(shared, begin)
        return begin

    def closing(self, at: int, mark: str, tail: str, through: str | Refusal) -> int:
        """Return the length of the end of the turn, after the last placeholder of message `at`."""
        ends = []
        if isinstance(through, str) and mark in through:
            ends.append(through.split(mark, 1)[1])
        prompt = self._prompt()
        if prompt:
            # With a prompt after the message, templates do not treat the message as the last of the dialogue.
            (on,) = self._ask([{"messages": self._planted.messages[: at + 1], "add_generation_prompt": True}])
            if isinstance(on, str) and on.endswith(prompt) and mark in on:
                ends.append(on.removesuffix(prompt).partition(mark)[2])
        return max((len(end) if tail.startswith(end) else _common(tail, end) for end in ends), default=0)

    def _prompt(self) -> str:
        """Return the text that the template appends to ask for an answer."""
        question = [{"role": "user", "content": placeholder(0)}]
        asked, plain = self._ask([{"messages": question, "add_generation_prompt": True}, {"messages": question}])
        if isinstance(asked, Refusal) or isinstance(plain, Refusal):
            return ""
        return asked[_common(asked, plain) :]


def _common(first: str, second: str) -> int:
    """Return the length of the common prefix of two texts, in whole words and marks."""
    length = 0
    for left, right in zip(_WORDS.finditer(first), _WORDS.finditer(second), strict=False):
        if left.group() != right.group():
            break
        length = left.end()
    return length
