"""Special tokens: a tokenizer's own, or ids after the end of the vocabulary.

A published vocabulary (tokenizer.json) may contain the tokens' names. Tokens missing from a vocabulary (bytes,
bpe:SIZE) are appended in the order of `names`; the model's vocabulary grows by one id per appended token. A document
that spells out a special token is still text.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.data.tokenizer import Tokenizer


def ids_of(tokenizer: Tokenizer, names: Sequence[str]) -> tuple[list[int], int]:
    """Return the ids of special tokens, and the size of the vocabulary including appended ones."""
    size, ids = tokenizer.vocabulary_size, []
    for name in names:
        known = tokenizer.id_of(name)
        ids.append(size if known is None else known)
        size += known is None
    return ids, size
