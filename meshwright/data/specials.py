"""Special tokens: a tokenizer's own, or ids behind its vocabulary.

A published vocabulary (a tokenizer.json with their names) has them. To any other (bytes, bpe:SIZE) those that it lacks
are appended in the order of their names, so a model over it needs as many tokens more. A text that spells one out is
still text.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.data.tokenizer import Tokenizer


def ids_of(tokenizer: Tokenizer, names: Sequence[str]) -> tuple[list[int], int]:
    """The ids of special tokens, and the size of the vocabulary with them."""
    size, ids = tokenizer.vocabulary_size, []
    for name in names:
        known = tokenizer.id_of(name)
        ids.append(size if known is None else known)
        size += known is None
    return ids, size
