"""Samples for T5 from a packed corpus: spans cut out of a text (Raffel et al., 2020, section 3.3.3). Without state.

The stream of tokens, with end tokens between documents, is cut into windows of L tokens. Each window is one sample an
epoch. 15 % of a window's tokens are removed, in spans of 3 on average: N = round(0.15 L) tokens in n = round(N / 3)
spans. The removed and the kept tokens are each divided into n parts of at least one token, uniformly over all such
divisions. Kept and removed parts alternate, a kept part first. The source has a sentinel in the place of each removed
span; the target has each sentinel followed by the removed span:

| window | a b c d e f g h i, with c and g h i removed |
|---|---|
| source | a b S0 d e f S1 END |
| target | S0 c S1 g h i END |

(The paper's figure ends with one more sentinel. T5's code and this module omit that sentinel, since END follows.)
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
        """Cut a stream into windows.

        Args:
            tokens: the stream [n].
            specials: the model's special tokens.
            lengths: tokens of a padded source and target.
            seed: the run's seed.
            name: the name of the data in messages.

        Raises:
            ConfigError: if no window fits `lengths`.
            DataError: if the stream is shorter than a window.
        """
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
        """Make the (source, target) of a window, each with an end token."""
        # The draws depend only on the sample's label, so any rank makes any sample, in any order and after a resume.
        draws = np.random.Generator(np.random.PCG64(seed_of(f"{self._seed}/spans/{label}")))
        size, spans = self._window, self._window.spans
        text = self._tokens[window * size.text : (window + 1) * size.text].astype(np.int64)
        stays, goes = parts_of(draws, size.text - size.cut, spans), parts_of(draws, size.cut, spans)
        source, target = [], []
        at = 0
        # A kept part precedes each span, so no two sentinels are neighbours in the source.
        for sentinel, stay, go in zip(self._specials.sentinels[:spans], stays, goes, strict=True):
            source += [text[at : at + stay], [sentinel]]
            target += [[sentinel], text[at + stay : at + stay + go]]
            at += stay + go
        end = [self._specials.end]
        return np.concatenate([*source, end]), np.concatenate([*target, end])


def span_samples(data: SpanData, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
    """Open the samples of a split of a run's corpus. Raises DataError or ConfigError if the model cannot read them."""
    specials = specials_for(config, packed.tokenizer)
    return SpanSamples(packed.tokens(split), specials, data.lengths, config.seed, packed.name(split)), ""


def parts_of(draws: np.random.Generator, total: int, parts: int) -> list[int]:
    """Divide `total` into `parts` whole numbers >= 1, uniformly over all ordered divisions."""
    assert total >= parts, (total, parts)
    # Choose parts - 1 of the total - 1 places between units, by sorting uniform draws: all choices are equally likely.
    cuts = np.sort(np.argsort(draws.random(total - 1), kind="stable")[: parts - 1]) + 1
    return np.diff(np.concatenate([[0], cuts, [total]])).tolist()
