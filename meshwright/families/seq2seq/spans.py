"""Samples for T5 out of a packed corpus: spans cut out of a text (Raffel et al., 2020, section 3.3.3). Without state.

The stream of tokens, end tokens between its documents, is cut into windows of L tokens; each is a sample once an epoch.
15 % of a window's tokens go, in spans of 3 on average: with N = round(0.15 L) tokens and n = round(N / 3) spans, what
goes and what stays are each cut into n parts of at least a token, every way of cutting them as likely as any other.
The parts alternate, one that stays first. In the source a sentinel stands where a span was; the target has each
sentinel and its span:

| window | a b c d e f g h i, where c and g h i go |
|---|---|
| source | a b S0 d e f S1 END |
| target | S0 c S1 g h i END |

(The paper's figure has one more sentinel behind the last span; T5's code has not, nor has ours: END says the same.)
L is the largest for which source and target fit `data.sequence` (spans_section.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from meshwright.compute.model import Batch, Samples
from meshwright.compute.parameters.shard import seed_of
from meshwright.config import Config
from meshwright.data.packed import PackedCorpus
from meshwright.data.sampler import ShuffledSamples
from meshwright.data.section import Lengths
from meshwright.data.split import Split
from meshwright.families.seq2seq.data_section import SpanData
from meshwright.families.seq2seq.pairs_samples import sequence_batch
from meshwright.families.seq2seq.spans_section import window_of
from meshwright.families.seq2seq.specials import SequenceSpecials, specials_for
from meshwright.ranks.errors import DataError


class SpanSamples(ShuffledSamples):
    """The samples of a stream of documents."""

    def __init__(self, tokens: np.ndarray, specials: SequenceSpecials, lengths: Lengths, seed: int, name: str) -> None:
        """`tokens` [n]; `name`: what they are, for messages. Raises ConfigError, DataError where no sample fits."""
        self._tokens, self._specials, self._lengths, self._seed = tokens, specials, lengths, seed
        self._window = window_of(lengths.source, len(specials.sentinels))
        if len(tokens) < self._window.text:
            wanted = f"data.sequence={lengths.source} needs windows of {self._window.text}"
            raise DataError(f"{name}: has {len(tokens)} tokens, and {wanted}: take a shorter one, or more text")
        super().__init__(len(tokens) // self._window.text, seed)

    def read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        sides = [self._sample(window, label) for window, label in zip(rows.tolist(), draws, strict=True)]
        sources, targets = [source for source, _ in sides], [target for _, target in sides]
        return sequence_batch(sources, targets, self._specials, self._lengths)

    def _sample(self, window: int, label: str) -> tuple[np.ndarray, np.ndarray]:
        """(source, target) of a window, both with their end tokens."""
        # Of the sample's number alone: any rank makes any sample, in any order and after a resume.
        draws = np.random.Generator(np.random.PCG64(seed_of(f"{self._seed}/spans/{label}")))
        size, spans = self._window, self._window.spans
        text = self._tokens[window * size.text : (window + 1) * size.text].astype(np.int64)
        stays, goes = parts_of(draws, size.text - size.cut, spans), parts_of(draws, size.cut, spans)
        source, target = [], []
        at = 0
        # What stays comes first, so no two sentinels ever stand side by side in the source.
        for sentinel, stay, go in zip(self._specials.sentinels[:spans], stays, goes, strict=True):
            source += [text[at : at + stay], [sentinel]]
            target += [[sentinel], text[at + stay : at + stay + go]]
            at += stay + go
        end = [self._specials.end]
        return np.concatenate([*source, end]), np.concatenate([*target, end])


def span_samples(data: SpanData, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
    """The samples of a split of a run's corpus. Raises DataError, ConfigError where they do not suit the model."""
    specials = specials_for(config, packed.tokenizer)
    return SpanSamples(packed.tokens(split), specials, data.lengths, config.seed, packed.name(split)), ""


def parts_of(draws: np.random.Generator, number: int, parts: int) -> list[int]:
    """`number` as a sum of `parts` whole numbers of at least one, every way as likely."""
    assert number >= parts, (number, parts)
    # parts - 1 of the number - 1 places between units, each set of places as likely: sorting uniform draws chooses
    # them.
    cuts = np.sort(np.argsort(draws.random(number - 1), kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [number]])).tolist()
