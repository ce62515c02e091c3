"""Which documents are held out: decided by content, in one pass over the corpus, before anything is written.

Documents are taken in the order of their hash until they make up the wanted share of the characters. So the split needs
no seed, documents that are the same text fall on the same side, and the share is met however uneven the documents are.
Where whole documents cannot give it (one huge file), the tail of the longest one is held out, cut at a line's start.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from meshwright.data.corpus import documents
from meshwright.data.progress import ShowProgress
from meshwright.errors import DataError

Split = Literal["train", "validation"]
SPLITS: tuple[Split, ...] = ("train", "validation")

_REPORT_EVERY = 256


@dataclass(frozen=True)
class Plan:
    """What one pass over the corpus found, and which documents are held out."""

    num_documents: int
    num_characters: int
    corpus_sha256: str
    """Over the documents' hashes in order: the corpus' identity by content."""
    held_out: frozenset[int] = field(repr=False)
    """Positions of the documents of the validation split."""
    tail_of: int | None
    """The document whose tail is held out instead, where whole documents cannot give the share."""
    tail_characters: int


def plan_split(source: str, validation: float, progress: ShowProgress) -> Plan:
    """Read the corpus once and choose what is held out: about `validation` of its characters.

    Raises DataError if there is no text at all.
    """
    return plan_texts(documents(source), source, validation, progress)


def plan_texts(texts: Iterable[str], source: str, validation: float, progress: ShowProgress) -> Plan:
    """As `plan_split`, of any texts that are held out whole or not at all."""
    hashes, lengths, whole = array("Q"), array("Q"), hashlib.sha256()
    for text in texts:
        digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        whole.update(digest)
        hashes.append(int.from_bytes(digest[:8], "little"))
        lengths.append(len(text))
        if len(hashes) % _REPORT_EVERY == 0:
            progress(f"reading: {len(hashes)} documents", None)
    if not hashes:
        raise DataError(f"{source}: holds no text")
    total = sum(lengths)
    held_out = _choose(np.array(hashes, np.uint64), np.array(lengths, np.int64), total * validation)
    longest = max(range(len(lengths)), key=lengths.__getitem__)
    return Plan(
        num_documents=len(hashes),
        num_characters=total,
        corpus_sha256=whole.hexdigest(),
        held_out=held_out,
        tail_of=None if held_out else longest,
        tail_characters=max(1, round(total * validation)),
    )


def split_documents(source: str, plan: Plan) -> Iterator[tuple[Split, str]]:
    """Every document with the split it belongs to, in the corpus' order.

    Raises DataError if the source is no longer what the plan has seen, or the tail cannot be cut.
    """
    at = -1
    for at, text in enumerate(documents(source)):
        if at == plan.tail_of:
            start = _tail_start(source, text, plan.tail_characters)
            yield "train", text[:start]
            yield "validation", text[start:]
        else:
            yield "validation" if at in plan.held_out else "train", text
    check_unchanged(source, plan, at + 1)


def check_unchanged(source: str, plan: Plan, found: int) -> None:
    """Raises DataError where a later pass over the source has found another number of documents."""
    if found != plan.num_documents:
        raise DataError(f"{source}: changed while it was read ({plan.num_documents} documents, then {found})")


def _choose(hashes: np.ndarray, lengths: np.ndarray, target: float) -> frozenset[int]:
    """Positions held out: between half and one and a half of `target` characters, or none if that cannot be."""
    distinct, group = np.unique(hashes, return_inverse=True)  # np.unique sorts: the order of the hashes
    characters = np.bincount(group, weights=lengths)
    taken, chosen = 0.0, np.zeros(len(distinct), dtype=bool)
    for at, length in enumerate(characters.tolist()):
        if taken >= target:
            break
        if taken + length <= 1.5 * target:
            chosen[at] = True
            taken += length
    return frozenset(np.flatnonzero(chosen[group]).tolist()) if taken >= target / 2 else frozenset()


def _tail_start(source: str, text: str, tail: int) -> int:
    """Where the held-out tail of about `tail` characters begins: at a line's start, both parts with words in them."""
    wanted = max(len(text) - tail, len(text) // 2)
    before, after = text.rfind("\n", 0, wanted) + 1, text.find("\n", wanted) + 1
    for start in (before, after):
        if text[:start].strip() and text[start:].strip():
            return start
    hint = "give a text of more lines, or more documents"
    raise DataError(f"{source}: is too small to hold out a validation split: {hint}")
