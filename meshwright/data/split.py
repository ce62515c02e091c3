"""The validation split: records chosen by content, in one pass over the corpus, before anything is written.

Records are taken in the order of their hashes until the wanted share of characters is reached. So the split needs no
seed, records of equal text are in one split, and the share is met for records of any lengths. If whole documents cannot
give the share (one huge file), the tail of the longest document is held out, cut at the start of a line.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from meshwright.data.corpus import Corpus
from meshwright.data.files import ShowProgress
from meshwright.data.long_text import LongText, Text, chunks_of
from meshwright.ranks.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

MOST_SHOWN = 60
"""Characters of a record that are shown."""
_LONG = 1000
"""The fewest characters of a text that may be cut at a place without a space."""
_WINDOW = 2**20
_REPORT_EVERY = 256


@dataclass(frozen=True)
class SplitPlan:
    """The held-out records of a corpus, and the counts of one pass."""

    num_records: int
    num_characters: int
    corpus_sha256: str
    """Hash of the records' hashes in order: the identity of the corpus by content."""
    held_out: frozenset[int] = field(repr=False)
    """Positions of the records of the validation split."""
    tail_of: int | None
    """The document with a held-out tail, if whole documents cannot give the share."""
    tail_characters: int
    first: str = ""
    last: str = ""
    """The beginnings of the first and the last record."""


def plan_split(corpus: Corpus, validation: float, progress: ShowProgress) -> SplitPlan:
    """Read the corpus once and choose the held-out records: about `validation` of the characters.

    Raises:
        DataError: there is no text, or too few pairs or dialogues, which are not cut.
    """
    hashes, lengths, whole = array("Q"), array("Q"), hashlib.sha256()
    first = last = ""
    for texts in corpus.read():
        last = str(texts[0][:MOST_SHOWN])
        first = first or last
        # A pair is one record, so both sides are in one split.
        text = texts[0] if len(texts) == 1 else "\t".join(map(str, texts))
        hashed = hashlib.blake2b(digest_size=16)
        for chunk in chunks_of(text):
            hashed.update(chunk.encode())
        digest = hashed.digest()
        whole.update(digest)
        # 64 bits are enough to order records; the identity of the corpus uses whole digests.
        hashes.append(int.from_bytes(digest[:8], "little"))
        lengths.append(len(text))
        if len(hashes) % _REPORT_EVERY == 0:
            progress(f"reading: {len(hashes)} documents", None)
    if not hashes:
        raise DataError(f"{corpus.where}: holds no text")
    total = sum(lengths)
    held_out = _choose(np.array(hashes, np.uint64), np.array(lengths, np.int64), total * validation)
    if not validation:
        return SplitPlan(len(hashes), total, whole.hexdigest(), frozenset(), None, 0, first, last)
    if not held_out and corpus.kind != "text":
        things = {"pairs": "pairs", "messages": "dialogues", "preferences": "pairs"}[corpus.kind]
        different = len(set(hashes))  # equal records are in one split
        counted = f"{len(hashes)} {things}" + (f" ({different} of them different)" if different < len(hashes) else "")
        has = f"has {counted}, too few to hold out data.validation={validation} of them"
        raise DataError(f"{corpus.where}: {has}; give more {things}, a larger share, or 0 to hold out none")
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    return SplitPlan(
        num_records=len(hashes),
        num_characters=total,
        corpus_sha256=whole.hexdigest(),
        held_out=held_out,
        tail_of=None if held_out else longest,
        tail_characters=max(1, round(total * validation)),
        first=first,
        last=last,
    )


def split_records(corpus: Corpus, plan: SplitPlan) -> Iterator[tuple[Split, tuple[Text, ...]]]:
    """Yield (split, record) for every record, in the order of the corpus.

    Raises:
        DataError: the source has changed since the plan, or the tail cannot be cut.
    """
    at = -1
    for at, texts in enumerate(corpus.read()):
        if at == plan.tail_of:
            [text] = texts
            start = _tail_start(corpus.where, text, plan.tail_characters)
            yield "train", (text[:start],)
            yield "validation", (text[start:],)
        else:
            yield "validation" if at in plan.held_out else "train", texts
    if at + 1 != plan.num_records:
        changed = f"changed while it was read ({plan.num_records} documents, then {at + 1})"
        raise DataError(f"{corpus.where}: {changed}")


def _choose(hashes: np.ndarray, lengths: np.ndarray, target: float) -> frozenset[int]:
    """Return held-out positions with 0.5 to 1.5 times `target` characters; empty if impossible."""
    distinct, group = np.unique(hashes, return_inverse=True)  # np.unique sorts: the order of the hashes
    characters = np.bincount(group, weights=lengths)
    taken, chosen = 0.0, np.zeros(len(distinct), dtype=bool)
    for at, length in enumerate(characters.tolist()):
        if taken >= target:
            break
        # A document that is too large is skipped.
        if taken + length <= 1.5 * target:
            chosen[at] = True
            taken += length
    return frozenset(np.flatnonzero(chosen[group]).tolist()) if taken >= target / 2 else frozenset()


def _tail_start(source: str, whole: Text, tail: int) -> int:
    """Return the start of the held-out tail of about `tail` characters.

    The start is the nearest start of a line. If lines are much longer than the tail, it is the nearest space; in a long
    text without spaces, any character. Both parts have words.
    """
    # At most half, since the longest document may be shorter than twice the share.
    wanted = max(len(whole) - tail, len(whole) // 2)
    # In a large file only the millions of characters around the wanted place are searched.
    begin = max(0, wanted - _WINDOW) if isinstance(whole, LongText) else 0
    text = str(whole[begin : wanted + _WINDOW]) if isinstance(whole, LongText) else whole
    wanted -= begin
    lines = (text.rfind("\n", 0, wanted) + 1, text.find("\n", wanted) + 1)
    spaces = (text.rfind(" ", 0, wanted), text.find(" ", wanted))
    near = [start for start in (*lines, *spaces) if abs(start - wanted) <= 2 * tail]
    anywhere = (wanted,) if len(text) >= _LONG else ()
    for start in (*near, *anywhere, *spaces, *lines):
        if start > 0 and text[:start].strip() and text[start:].strip():
            return begin + start
    hint = "give a longer text or more documents, or data.validation=0 to hold out none"
    raise DataError(f"{source}: is too small to hold out a validation split: {hint}")
