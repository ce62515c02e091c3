"""Samples of pairs of answers: two rows of one sequence, labels only on the answers.

A prepared folder of preferences has the flagged tokens of a folder of messages (messages.py): of each pair the prompt
with the chosen answer, then the prompt with the rejected answer. A row has one dialogue, and padding after it. The
labels of prompt and padding are not counted. A dialogue of n tokens takes n - 1 places of a row.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from meshwright.data.chat import template_for
from meshwright.data.corpus import Corpus, source_identity, source_name, told_of
from meshwright.data.marks import UNASKED
from meshwright.data.marks_section import END
from meshwright.data.messages import Overlong
from meshwright.data.packed import DIALOGUE, IDS, SAID, PackedCorpus
from meshwright.data.preference_records import SIDES, read_pairs
from meshwright.data.preferences_section import PreferenceData
from meshwright.data.sampler import ShuffledSamples
from meshwright.data.split import Split
from meshwright.data.tokenizer import load_tokenizer
from meshwright.ranks.errors import DataError

if TYPE_CHECKING:  # the launcher only counts samples, without torch
    from meshwright.compute.model import Batch, Samples
    from meshwright.config import Config


def preference_corpus(data: PreferenceData) -> Corpus:
    """Return the rendered pairs of a source: of each side a text and, as JSON, the answer's spans in the text."""
    template = template_for(data)

    def read() -> Iterator[tuple[str, ...]]:
        path = Path(data.tokenizer).expanduser()
        special = load_tokenizer(path, UNASKED).special_tokens if path.is_file() else (END,)
        for pair in read_pairs(data.source, special, data.picks):
            texts: list[str] = []
            for dialogue in pair:
                ignored.update(template.means_nothing(dialogue.messages))
                text, spans = template.dialogue(dialogue)
                texts += [text, json.dumps(spans)]
            yield tuple(texts)

    ignored: set[str] = set()
    identity: list[object] = [
        "preferences",
        source_identity(data.source, data.picks),
        template.text,
        dict(template.tokens),
        data.arguments,
    ]
    told = told_of(data.source, data.picks)
    return Corpus("preferences", data.source, source_name(data.source), identity, read, *told, ignored=ignored)


class PreferencePairs(ShuffledSamples):
    """The pairs of one split: `tokens` and `labels`, int64 [B, 2, T], and `pairs`, each pair's number [B, 1]."""

    def __init__(self, corpus: PackedCorpus, split: Split, sequence: int, overlong: Overlong, seed: int) -> None:
        """Make the samples.

        Args:
            corpus: the prepared folder.
            split: the split.
            sequence: tokens of a row.
            overlong: drop, or cut pairs with a dialogue that is longer than a row.
            seed: of the order.

        Raises:
            DataError: no pair is left.
        """
        self._tokens, self._sequence, self._padding = corpus.tokens(split), sequence, corpus.header.end
        starts = np.flatnonzero(self._tokens & DIALOGUE)
        lengths = np.diff(np.append(starts, len(self._tokens)))
        taken = np.minimum(lengths, sequence + 1)
        learned = np.array(
            [np.count_nonzero(self._tokens[at + 1 : at + n] & SAID) for at, n in zip(starts, taken, strict=True)],
            dtype=np.int64,
        ).reshape(-1, len(SIDES))
        longer = (lengths > sequence + 1).reshape(-1, len(SIDES)).any(1)
        mask = np.asarray((learned > 0).all(1))
        if overlong == "drop":
            mask &= ~longer
        if not mask.any():
            most = int(lengths.max(initial=0)) - 1
            raise DataError(f"{corpus.name(split)}: no pair fits data.sequence={sequence}; the longest takes {most}")
        self._starts = starts.reshape(-1, len(SIDES))[mask]
        self._counts = taken.reshape(-1, len(SIDES))[mask] - 1
        num_kept, num_longer = int(mask.sum()), int(longer.sum())
        full = 100 * int(self._counts.sum()) / (num_kept * len(SIDES) * sequence)
        said = 100 * int(learned[mask].sum()) / (num_kept * len(SIDES) * sequence)
        self.note = f"{num_kept} pairs in rows of {sequence}, {full:.0f} % full, {said:.0f} % learned"
        if num_longer and overlong == "drop":
            self.note += f"; {num_longer} longer than data.sequence={sequence} left out (data.overlong=cut cuts them)"
        elif num_longer:
            lost = mask.size - num_kept
            lacking = f", {lost} of them left out, whose beginnings have nothing of an answer" if lost else ""
            self.note += f"; {num_longer} longer than data.sequence={sequence} cut{lacking}"
        if corpus.header.ignored:
            self.note += f"; the template reads no {', '.join(corpus.header.ignored)} of a message"
        super().__init__(num_kept, seed)

    def numbered(self, numbers: np.ndarray) -> Batch:
        """Read the pairs with these numbers [B]; for a negative number, any pair with the number -100."""
        from meshwright.compute.model import IGNORED

        batch = self.read(np.maximum(numbers, 0), [])
        batch["pairs"][numbers < 0] = IGNORED
        return batch

    def read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        import torch

        from meshwright.compute.model import IGNORED

        shape = (len(rows), len(SIDES), self._sequence)
        tokens, labels = np.full(shape, self._padding, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        for row, pair in enumerate(rows.tolist()):
            for side in range(len(SIDES)):
                start, count = self._starts[pair, side], self._counts[pair, side]
                run = self._tokens[start : start + count + 1].astype(np.int64)
                inputs, following = run[:-1] & IDS, run[1:]
                tokens[row, side, :count] = inputs
                labels[row, side, :count] = np.where(following & SAID, following & IDS, IGNORED)
        numbers = torch.from_numpy(rows.copy()).unsqueeze(1)
        return {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels), "pairs": numbers}


def preference_samples(data: PreferenceData, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
    """Return (pairs of a split of a run's source, note for the user).

    Raises:
        DataError: there are no pairs.
    """
    pairs = PreferencePairs(packed, split, data.sequence, data.overlong, config.seed)
    return pairs, pairs.note
