"""The special tokens of BERT's input, [PAD], [CLS], [SEP] and [MASK]: a tokenizer's own, or ids behind its vocabulary.

A vocabulary of BERT's (a tokenizer.json with these names) has them. To any other (bytes, bpe:SIZE) those that it lacks
are appended in this order, so a model over it needs as many tokens more. A text that spells one out is still text.
"""

from __future__ import annotations

from dataclasses import dataclass

import tokenizers
from tokenizers import processors

from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import DataError

PADDING, FIRST, SEPARATOR, MASK = NAMES = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")


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

    @property
    def all(self) -> frozenset[int]:
        """What is no text: never masked, never a random replacement."""
        return frozenset((self.padding, self.first, self.separator, self.mask, self.end))


def specials_of(tokenizer: Tokenizer) -> Specials:
    """The special tokens of a tokenizer, those that it lacks appended."""
    size, ids = tokenizer.vocabulary_size, {}
    for name in NAMES:
        known = tokenizer.id_of(name)
        ids[name] = size if known is None else known
        size += known is None
    return Specials(ids[PADDING], ids[FIRST], ids[SEPARATOR], ids[MASK], tokenizer.end, size)


def with_specials(text: str, specials: Specials) -> str:
    """A tokenizer.json's text with the appended tokens and BERT's template in it, for those who read nothing else.

    A text that has them all is returned as it is. Raises DataError where the library would give them other ids.
    """
    library = tokenizers.Tokenizer.from_str(text)
    if all(library.token_to_id(name) is not None for name in NAMES):
        return text
    library.add_special_tokens(list(NAMES))
    wanted = (specials.padding, specials.first, specials.separator, specials.mask)
    found = tuple(library.token_to_id(name) for name in NAMES)
    if found != wanted:
        raise DataError(f"the tokenizer gives {', '.join(NAMES)} the ids {found}, and the model has them as {wanted}")
    library.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $A {SEPARATOR}",
        pair=f"{FIRST} $A {SEPARATOR} $B:1 {SEPARATOR}:1",
        special_tokens=[(FIRST, specials.first), (SEPARATOR, specials.separator)],
    )
    return str(library.to_str(pretty=True)) + "\n"
