"""BERT's special tokens: a tokenizer's own, or ids behind its vocabulary, as data/specials.py has it."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.data.specials import ids_of
from meshwright.data.tokenizer import Tokenizer
from meshwright.families.bert.section import Bert

PADDING, FIRST, SEPARATOR, MASK = NAMES = Bert.special_tokens


@dataclass(frozen=True)
class Specials:
    """Ids. `vocabulary_size`: with the appended ones."""

    padding: int
    first: int
    separator: int
    mask: int
    end: int
    """The end-of-text token between documents; BERT's vocabularies use [SEP] for it."""
    vocabulary_size: int


def specials_of(tokenizer: Tokenizer) -> Specials:
    """The special tokens of a tokenizer, those that it lacks appended."""
    (padding, first, separator, mask), size = ids_of(tokenizer, NAMES)
    return Specials(padding, first, separator, mask, tokenizer.end, size)
