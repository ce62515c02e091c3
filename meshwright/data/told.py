"""The lines on the data of a run: files, records, tokens, the first and the last record, the first dialogue."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from meshwright.data.corpus import Corpus
from meshwright.data.packed import DIALOGUE, IDS, SAID, PackedCorpus, ReadFacts
from meshwright.data.split import MOST_SHOWN, SplitPlan

LEARNED = ("[[", "]]")
"""The marks around the learned part of a dialogue."""
_MOST_NAMES = 6
_MOST_TOKENS, _MOST_PART = 2048, 200
"""Tokens of the first dialogue that are decoded, and characters of a part that are shown."""


def printable(text: str) -> str:
    """Return a text with control characters and line ends escaped."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def read_facts(corpus: Corpus, plan: SplitPlan) -> ReadFacts:
    """Return the header's facts of a corpus that was read."""
    first, last = (
        printable(text) + "..." * (len(text) == MOST_SHOWN) for text in (plan.first, plan.last)
    )  # not known to be longer, and shown as if
    return ReadFacts(
        files=len(corpus.names), names=corpus.names[:_MOST_NAMES], split=corpus.split,
        left_out=tuple(map(printable, corpus.left_out[:_MOST_NAMES])),
        records=plan.num_records, first=first, last=last,
    )  # fmt: skip


def read_lines(packed: PackedCorpus) -> Iterator[str]:
    """Yield the lines for a user. Of a folder that version 0.1.0 prepared the tokens alone are known."""
    header, read = packed.header, packed.header.read
    of_kind = {"text": "documents", "pairs": "pairs", "messages": "dialogues", "preferences": "answer pairs"}
    things = of_kind[header.kind]
    tokens = f"{header.train.tokens + header.validation.tokens:,} tokens"
    held_out = f"{header.validation.tokens:,} held out" if header.validation.tokens else "none held out"
    if read is None:
        yield f"read: {header.source}: {tokens} ({held_out})"
        return
    files = f" of {read.files:,} file{'s' * (read.files > 1)} ({_listed(read.names, read.files)})" if read.files else ""
    split = f", split {read.split}" if read.split is not None else ""
    left_out = f"; left out {_listed(read.left_out, len(read.left_out))}" if read.left_out else ""
    things = things if read.records > 1 else things.removesuffix("s")
    yield f"read: {header.source}: {read.records:,} {things}{files}{split}: {tokens} ({held_out}){left_out}"
    if header.flags:
        yield f"first dialogue, its learned parts in {' '.join(LEARNED)}: {first_dialogue(packed)}"
    else:
        yield f'first "{read.first}", last "{read.last}"'


def first_dialogue(packed: PackedCorpus) -> str:
    """Return the first dialogue of the train split, decoded from tokens, with the learned parts marked."""
    tokens = packed.tokens("train")[:_MOST_TOKENS]
    begins = np.flatnonzero(tokens & DIALOGUE)
    dialogue = tokens[: begins[1]] if len(begins) > 1 else tokens
    said = (dialogue & SAID) != 0
    borders = [0, *(np.flatnonzero(np.diff(said)) + 1).tolist(), len(dialogue)]
    text = ""
    for start, stop in pairwise(borders):
        segment = packed.tokenizer.decode((dialogue[start:stop] & IDS).tolist())
        if len(segment) > _MOST_PART:
            segment = f"{segment[: _MOST_PART // 2]} ... {segment[-_MOST_PART // 2 :]}"
        text += segment.join(LEARNED) if said[start] else segment
    return f'"{printable(text)}"'


def _listed(names: tuple[str, ...], count: int) -> str:
    shown = list(map(printable, names[:_MOST_NAMES]))
    return ", ".join(shown + ["..."] * (count > len(shown)))
