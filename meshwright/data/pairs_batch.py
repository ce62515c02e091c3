"""The batch of an encoder-decoder, and the special tokens in it.

| entry       | shape  | holds                                                                   |
|-------------|--------|-------------------------------------------------------------------------|
| source      | [B, S] | what is read, its last token an end token; padding                      |
| source_mask | [B, S] | 1, in the padding 0                                                     |
| target      | [B, T] | a start token, what is written but for its last token; padding          |
| labels      | [B, T] | what is written, its last token an end token; in the padding -100       |

All int64.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from meshwright.config import Config
from meshwright.config.data_rules import SENTINELS, objective_of
from meshwright.config.lengths import Lengths
from meshwright.data.specials import SequenceSpecials, sequence_specials
from meshwright.data.tokenizer import Tokenizer
from meshwright.errors import ConfigError, DataError
from meshwright.model import IGNORED, Batch
from meshwright.models.section import T5, EncoderDecoder


def specials_for(config: Config, tokenizer: Tokenizer) -> SequenceSpecials:
    """The special tokens of a run's encoder-decoder. Raises ConfigError where its vocabulary has no room for them."""
    model = config.model
    assert isinstance(model, EncoderDecoder), model
    sentinels = SENTINELS if objective_of(config) == "spans" else 0
    specials = sequence_specials(tokenizer, starts_with_padding=isinstance(model, T5), sentinels=sentinels)
    size = specials.vocabulary_size
    if size > model.vocabulary:
        rule = f"is smaller than the {size} tokens of the corpus' tokenizer with the model's own"
        raise ConfigError.of("model.vocabulary", model.vocabulary, rule, f"{size} or more")
    return specials


def specials_with_room(model: EncoderDecoder, tokenizer: Tokenizer) -> SequenceSpecials:
    """Those of a model that no run here has trained: with the sentinels where its vocabulary has room for them.

    Raises DataError where it has none for the others.
    """
    for sentinels in (SENTINELS, 0):
        specials = sequence_specials(tokenizer, starts_with_padding=isinstance(model, T5), sentinels=sentinels)
        if specials.vocabulary_size <= model.vocabulary:
            return specials
    size = specials.vocabulary_size
    raise DataError(f"the tokenizer has {size} tokens with the model's own, and the model knows {model.vocabulary}")


def sequence_batch(
    sources: Sequence[np.ndarray], targets: Sequence[np.ndarray], specials: SequenceSpecials, lengths: Lengths
) -> Batch:
    """A batch of ids: of each sample its source and its target, both with their end tokens, padded to `lengths`."""
    read_shape, written_shape = (len(sources), lengths.source), (len(targets), lengths.target)
    source, source_mask = np.full(read_shape, specials.padding, dtype=np.int64), np.zeros(read_shape, dtype=np.int64)
    target, labels = (
        np.full(written_shape, specials.padding, dtype=np.int64),
        np.full(written_shape, IGNORED, dtype=np.int64),
    )
    target[:, 0] = specials.start
    for row, (read, written) in enumerate(zip(sources, targets, strict=True)):
        source[row, : len(read)] = read
        source_mask[row, : len(read)] = 1
        target[row, 1 : len(written)] = written[:-1]
        labels[row, : len(written)] = written
    entries = {"source": source, "source_mask": source_mask, "target": target, "labels": labels}
    return {name: torch.from_numpy(entry) for name, entry in entries.items()}
