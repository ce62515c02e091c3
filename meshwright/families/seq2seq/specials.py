"""The special tokens of encoder-decoders, in the way of data/specials.py.

| model | names | in addition |
|---|---|---|
| Transformer | <pad>, <s> | the tokenizer's end of text, which ends a source and a target |
| T5 | <pad>, which begins a target too | the same |
| either, on spans | and <extra_id_0> ... <extra_id_99> | the same |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright.compute.models.section import Network
from meshwright.config import Config
from meshwright.data.section import SENTINELS
from meshwright.data.specials import ids_of
from meshwright.data.tokenizer import Tokenizer
from meshwright.ranks.errors import ConfigError, DataError

SEQUENCE_PADDING = "<pad>"
SENTINEL = "<extra_id_{}>"


@dataclass(frozen=True)
class SequenceSpecials:
    """The ids of an encoder-decoder's tokens that are no text."""

    padding: int
    start: int
    """Begins the decoder's input; for T5 this is the padding token."""
    end: int
    """Ends a source and a target: the tokenizer's end of text."""
    sentinels: tuple[int, ...]
    """Stand for spans cut out of a text, in their order."""
    vocabulary_size: int
    """The tokenizer's size with the appended tokens."""


def sequence_specials(tokenizer: Tokenizer, names: Sequence[str], sentinels: int) -> SequenceSpecials:
    """Find the special tokens of an encoder-decoder; tokens that the tokenizer lacks are appended.

    Args:
        names: the model's special tokens; padding is the first, and the last begins a target.
        sentinels: the number of sentinels.
    """
    ids, size = ids_of(tokenizer, [*names, *map(SENTINEL.format, range(sentinels))])
    # T5 has only one name, so the padding token also begins a target.
    return SequenceSpecials(ids[0], ids[len(names) - 1], tokenizer.end, tuple(ids[len(names) :]), size)


def specials_for(config: Config, tokenizer: Tokenizer) -> SequenceSpecials:
    """Find the special tokens of a run's encoder-decoder. Raises ConfigError if the vocabulary has no room for them."""
    specials = sequence_specials(tokenizer, config.model.special_tokens, config.data.sentinels)
    size, known = specials.vocabulary_size, config.model.num_tokens
    if size > known:
        rule = f"is smaller than the {size} tokens of the corpus' tokenizer with the model's own"
        raise ConfigError.of("model.vocabulary", known, rule, f"{size} or more")
    return specials


def specials_with_room(model: Network, tokenizer: Tokenizer) -> SequenceSpecials:
    """Find the special tokens of an imported model, with sentinels if the vocabulary has room for these.

    Raises DataError if the vocabulary has no room for the other special tokens.
    """
    # A published T5 has rows for sentinels; a model of translation need not.
    for sentinels in (SENTINELS, 0):
        specials = sequence_specials(tokenizer, model.special_tokens, sentinels)
        if specials.vocabulary_size <= model.num_tokens:
            return specials
    size = specials.vocabulary_size
    raise DataError(f"the tokenizer has {size} tokens with the model's own, and the model knows {model.num_tokens}")
