"""Samples for BERT from a packed corpus (Devlin et al., 2018, sections 3.1 and A.1). Nothing here has state.

A sample is [CLS] A [SEP] B [SEP], or without next-sentence prediction [CLS] A [SEP], padded to T tokens. Documents are
cut into runs of at most the tokens that fit a sample; each run is one sample an epoch. A is the beginning of a run, cut
at random. B is the rest of the run in half of the samples, and in the others the same number of tokens of another run.
15 % of the text's tokens are labelled: 80 % of these are replaced by [MASK], 10 % by a random token, and 10 % are kept.

| entry         | shape  | holds                                                      |
|---------------|--------|------------------------------------------------------------|
| tokens        | [B, T] | ids                                                        |
| segments      | [B, T] | 0 in [CLS] A [SEP] and in the padding, 1 in B [SEP]        |
| mask          | [B, T] | 1, in the padding 0                                        |
| labels        | [B, T] | the original token of labelled places; else -100           |
| next_sentence | [B, 1] | 0: B follows A; 1: it does not                             |
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from meshwright.compute.model import IGNORED, Batch, Samples
from meshwright.compute.parameters.shard import seed_of
from meshwright.config import Config
from meshwright.data.packed import PackedCorpus, document_ends
from meshwright.data.sampler import ShuffledSamples
from meshwright.data.split import Split
from meshwright.families.bert.data_section import MaskedData
from meshwright.families.bert.section import ASKED_SHARE, Bert
from meshwright.families.bert.specials import Specials, specials_of
from meshwright.ranks.errors import ConfigError, DataError

MASK_SHARE, RANDOM_SHARE = 0.8, 0.1


class MaskedSamples(ShuffledSamples):
    """The samples of a stream of documents, separated by end tokens (the last document may lack one)."""

    def __init__(
        self, tokens: np.ndarray, specials: Specials, sequence: int, seed: int, *, next_sentence: bool, name: str
    ) -> None:
        """Cut a stream into runs.

        Args:
            tokens: the stream [n].
            specials: BERT's special tokens.
            sequence: T.
            seed: the run's seed.
            next_sentence: True for samples of two texts.
            name: the name of the data in messages.

        Raises:
            ConfigError: if `sequence` has no room for a sample.
            DataError: if the stream has too few tokens.
        """
        self._tokens, self._specials, self._sequence, self._seed = tokens, specials, sequence, seed
        self._next_sentence = next_sentence
        least = 2 if next_sentence else 1  # the least tokens of text in a sample, and the number of [SEP]
        # [CLS], and a [SEP] after each text.
        longest = sequence - 1 - least
        if longest < least:
            rule = "has no room for a sample between BERT's special tokens"
            raise ConfigError.of("data.sequence", sequence, rule, f"{2 * least + 1} or more")
        self._starts, self._lengths = runs(tokens, specials.end, least, longest)
        if len(self._starts) < least:
            raise DataError(f"{name}: has {len(tokens)} tokens, too few for BERT's samples; give more text")
        # A random replacement is never a special token, since no text has one, nor the end token. In vocabularies other
        # than BERT's the end token is none of the four special tokens.
        no_text = [specials.padding, specials.first, specials.separator, specials.mask, specials.end]
        self._text = np.setdiff1d(np.arange(specials.vocabulary_size), no_text)
        super().__init__(len(self._starts), seed)

    def read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        samples = [self._sample(run, label) for run, label in zip(rows.tolist(), draws, strict=True)]
        names = [*samples[0], "next_sentence"] if self._next_sentence else list(samples[0])
        return {name: torch.from_numpy(np.stack([row[name] for row in samples])) for name in dict.fromkeys(names)}

    def _sample(self, run: int, label: str) -> dict[str, np.ndarray]:
        """Make a sample: one row of every entry of the batch, all int64."""
        # The generator depends only on the sample's label, so any rank makes any sample, in any order and after a
        # resume.
        draws = np.random.Generator(np.random.PCG64(seed_of(f"{self._seed}/masked/{label}")))
        specials, text = self._specials, self._run(run)
        row = {
            "tokens": np.full(self._sequence, specials.padding, dtype=np.int64),
            "segments": np.zeros(self._sequence, dtype=np.int64),
            "mask": np.zeros(self._sequence, dtype=np.int64),
            "labels": np.full(self._sequence, IGNORED, dtype=np.int64),
        }
        parts = [text]
        if self._next_sentence:
            cut, answer = 1 + below(draws, len(text) - 1), below(draws, 2)
            second = text[cut:]
            if answer:
                drawn = below(draws, len(self) - 1)
                elsewhere = self._run(drawn + (drawn >= run))  # any run but this one
                # The length of the true second text, if the other run is long enough: the length reveals no answer.
                start = below(draws, max(0, len(elsewhere) - len(second)) + 1)
                second = elsewhere[start : start + len(second)]
            parts = [text[:cut], second]
            row["next_sentence"] = np.array([answer], dtype=np.int64)
        row["tokens"][0] = specials.first
        places, end = [], 1
        for segment, tokens in enumerate(parts):
            places.append(np.arange(end, end + len(tokens)))
            row["tokens"][end : end + len(tokens)] = tokens
            row["tokens"][end + len(tokens)] = specials.separator
            row["segments"][end : end + len(tokens) + 1] = segment
            end += len(tokens) + 1
        row["mask"][:end] = 1
        self._mask_tokens(draws, row, np.concatenate(places))
        return row

    def _run(self, run: int) -> np.ndarray:
        start = self._starts[run]
        return self._tokens[start : start + self._lengths[run]]

    def _mask_tokens(self, draws: np.random.Generator, row: dict[str, np.ndarray], places: np.ndarray) -> None:
        """Choose the labelled tokens among the places of text, and replace 90 % of these tokens in place."""
        # At least one, since a short text without labels would teach nothing.
        num = max(1, round(ASKED_SHARE * len(places)))
        # Sorting uniform draws chooses places; numpy's choice() may draw differently in another version.
        asked = places[np.argsort(draws.random(len(places)), kind="stable")[:num]]
        true = row["tokens"][asked]
        fate, others = draws.random(num), self._text[(draws.random(num) * len(self._text)).astype(np.int64)]
        row["labels"][asked] = true
        changed = np.where(fate < MASK_SHARE + RANDOM_SHARE, others, true)
        row["tokens"][asked] = np.where(fate < MASK_SHARE, self._specials.mask, changed)


def masked_samples(data: MaskedData, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
    """Open the samples of a split of a run's corpus. Raises DataError or ConfigError if the model cannot read them."""
    model = config.model
    assert isinstance(model, Bert), model
    specials = specials_of(packed.tokenizer)
    packed.check_vocabulary(model.vocabulary, specials.vocabulary_size, " with BERT's")
    return MaskedSamples(
        packed.tokens(split), specials, data.sequence, config.seed,
        next_sentence=model.next_sentence, name=packed.name(split),
    ), ""  # fmt: skip


def below(draws: np.random.Generator, bound: int) -> int:
    """Draw a whole number from 0 to bound - 1, from one uniform draw: numpy's own methods change with versions."""
    return int(draws.random() * bound)


def runs(tokens: np.ndarray, end: int, least: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut each document of a stream [n] into runs of `longest` tokens; return (starts, lengths).

    The last run of a document is left out if it has fewer than `least` tokens.
    """
    ends = np.concatenate([document_ends(tokens, end), [len(tokens)]])
    # No run contains the end token between documents.
    begins = np.concatenate([[0], ends[:-1] + 1]).astype(np.int64)
    counts = -(-(ends - begins) // longest)  # runs of each document
    document = np.repeat(np.arange(len(ends)), counts)
    run_index = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)  # of a run in the document
    starts = begins[document] + longest * run_index
    lengths = np.minimum(longest, ends[document] - starts)
    long_enough = lengths >= least
    return starts[long_enough], lengths[long_enough]
