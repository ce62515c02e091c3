"""BERT's special tokens: ids of the tokenizer, or ids appended to the vocabulary, in the way of data/specials.py."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.data.specials import ids_of
from meshwright.data.tokenizer import Tokenizer
from meshwright.families.bert.section import Bert

PADDING, FIRST, SEPARATOR, MASK = NAMES = Bert.special_tokens


@dataclass(frozen=True)
class Specials:
    """The ids of the special tokens. `vocabulary_size`: the tokenizer's size with appended tokens."""

    padding: int
    first: int
    separator: int
    mask: int
    end: int
    """The end-of-text token between documents: [SEP] in BERT's vocabularies."""
    vocabulary_size: int


def specials_of(tokenizer: Tokenizer) -> Specials:
    """Find the special tokens of a tokenizer; missing ones are appended."""
    (padding, first, separator, mask), size = ids_of(tokenizer, NAMES)
    return Specials(padding, first, separator, mask, tokenizer.end, size)
