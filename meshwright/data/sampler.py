"""The order of samples, and windows of tokens as samples. Without state: a sample's number is its whole cursor.

A window is `sequence + 1` tokens, window w beginning at token w * sequence; its first `sequence` tokens are the inputs,
its last `sequence` the labels, so every token but the first is a label once an epoch. (Less than one window of tokens
at the file's end is never seen.) An epoch is a seeded permutation of the windows, another one each time.

A step takes the next B samples (B: sequences in the global batch). A replica asks for its rows of them: all layouts see
the same global batch, and resuming needs the number of samples seen, nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from meshwright.data.packed import PackedCorpus
from meshwright.data.split import Split
from meshwright.data.text_section import TextData
from meshwright.ranks.errors import DataError

if TYPE_CHECKING:  # the launcher counts samples, and reads none: it needs no torch
    from meshwright.compute.model import Batch, Samples
    from meshwright.config import Config

_NUM_ROUNDS = 4


class Permutation:
    """The permutation number `stream` of 0 ... size - 1 under `seed`, computed and not stored.

    A Feistel network of four rounds is a bijection on [0, 4^h), whatever its round function; values that fall outside
    [0, size) are sent through again until they fall inside (cycle walking), which leaves a bijection on [0, size). The
    domain is less than 4 size, so four passes are expected. A lookup costs the same for 10^3 and 10^12 elements, needs
    no memory, and, being integer arithmetic of our own, gives the same order under every version of numpy.
    """

    def __init__(self, size: int, seed: int, stream: int) -> None:
        self.size = size
        # Both halves get h bits, at least one, so that 4^h >= size.
        self._half_bits = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Elements [n] (int64) at the given positions [n], each in 0..size-1."""
        values = self._network(positions.astype(np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._network(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            # The finaliser of splitmix64, a hash: every bit of its input moves every bit of its output.
            hashed = right ^ key
            hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            hashed ^= hashed >> np.uint64(31)
            # Each round is undone by the same round: a bijection whatever the hash of the other half is.
            left, right = right, left ^ (hashed & self._mask)
        return (left << self._half_bits) | right


@dataclass(frozen=True)
class Sampler:
    """The order of things that are numbered 0 ... size - 1: sample number -> thing, shuffled anew in each epoch."""

    size: int
    seed: int

    def rows(self, start: int, count: int) -> np.ndarray:
        """Things [count] (int64) of the samples start, start + 1, ..., over as many epochs as these touch."""
        return self.at(np.arange(start, start + count, dtype=np.int64))

    def at(self, samples: np.ndarray) -> np.ndarray:
        """Things [n] (int64) of the samples of these numbers [n]."""
        epochs, positions = np.divmod(samples, self.size)
        rows = np.empty_like(samples)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            # Samples of one batch may lie in two epochs, which have orders of their own.
            rows[of_epoch] = Permutation(self.size, self.seed, epoch)(positions[of_epoch])
        return rows


class ShuffledSamples:
    """Samples that are things of one split, each once an epoch; a subclass reads them.

    All that is random about one comes from the seed and the name of its draws: every layout sees the same samples, and
    an epoch draws others than the one before.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.order = Sampler(size, seed)

    def __len__(self) -> int:
        """Samples an epoch."""
        return self.order.size

    def samples(self, first: int, count: int) -> Batch:
        """Samples first ... first + count - 1 of the run: a replica asks for its rows of a global batch."""
        draws = [f"sample/{number}" for number in range(first, first + count)]
        return self.read(self.order.rows(first, count), draws)

    def held_out(self, first: int, count: int) -> Batch:
        """Things first ... first + count - 1 in the file's order, each time the same."""
        assert 0 <= first <= first + count <= len(self), (first, count, len(self))
        rows = np.arange(first, first + count, dtype=np.int64)
        return self.read(rows, [f"held out/{row}" for row in rows.tolist()])

    def read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        """The batch of things [count], whose random draws have these names."""
        raise NotImplementedError


def document_entries(begins: np.ndarray) -> Batch:
    """The entries of a batch by which a decoder keeps documents apart (models/decoder.py), both int64 [B, T].

    `begins` [B, T]: where a document does. A row's beginning, a document's rest as well, is one.
    """
    import torch

    places = np.arange(begins.shape[1], dtype=np.int64)
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return {"positions": torch.from_numpy(places - starts), "documents": torch.from_numpy(starts)}


class TokenBatches(ShuffledSamples):
    """Windows of one split of a packed corpus: `tokens` and `labels`, both int64 [B, T].

    Where documents are kept apart each ends with its end token, which predicts nothing, and batches have
    `document_entries`: they follow from the window's own tokens, so every rank knows them.
    """

    def __init__(
        self, corpus: PackedCorpus, split: Split, sequence: int, seed: int, separated_by: int | None = None
    ) -> None:
        """`sequence`: tokens a row. `separated_by`: the end token of documents that are kept apart.

        Raises DataError if the split is shorter than one window.
        """
        self._tokens, self._sequence, self._end = corpus.tokens(split), sequence, separated_by
        num_tokens = len(self._tokens)
        num_windows = (num_tokens - 1) // sequence
        if num_windows < 1:
            wanted = f"data.sequence={sequence} needs windows of {sequence + 1} tokens, and there are {num_tokens}"
            hint = f"take a shorter sequence (at most {max(num_tokens - 1, 1)}) or more text"
            raise DataError(f"{corpus.name(split)}: {wanted}: {hint}")
        super().__init__(num_windows, seed)

    def read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        import torch

        from meshwright.compute.model import IGNORED

        # Overlapping by one token: a window's last label is the next one's first input.
        places = rows[:, None] * self._sequence + np.arange(self._sequence + 1)
        windows = self._tokens[places].astype(np.int64)
        tokens, labels = windows[:, :-1].copy(), windows[:, 1:].copy()
        batch = {"tokens": torch.from_numpy(tokens), "labels": torch.from_numpy(labels)}
        if self._end is None:
            return batch
        ends = tokens == self._end
        labels[ends] = IGNORED
        begins = np.zeros_like(ends)
        # A document begins behind an end token; what a row begins with is one as well (`document_entries`).
        begins[:, 1:] = ends[:, :-1]
        return batch | document_entries(begins)


def token_samples(data: TextData, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
    """The windows of a split of a run's corpus. Raises DataError where there are none."""
    end = packed.header.end if data.separate else None
    return TokenBatches(packed, split, data.sequence, config.seed, end), ""
