"""Order of samples, and windows of tokens as samples. Without state: the number of a sample determines the sample.

A window is `sequence + 1` tokens; window w begins at token w * sequence. The first `sequence` tokens are the inputs,
the last `sequence` the labels, so every token except the first is a label once an epoch. (Less than one window of
tokens at the file's end is not used.) An epoch is a seeded permutation of the windows, different in each epoch.

A step takes the next B samples (B: sequences in the global batch), and a replica reads some rows of the batch. All
layouts have the same global batch, and resuming needs only the number of samples so far.
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

    A Feistel network of four rounds is a bijection on [0, 4^h) for any round function. Values outside of [0, size) pass
    through the network again until they are inside (cycle walking), which is a bijection on [0, size). The domain is
    smaller than 4 size, so at most four passes are expected. A lookup has the same cost for 10^3 and 10^12 elements and
    needs no memory. The integer arithmetic is our own, so the order is the same under every version of numpy.
    """

    def __init__(self, size: int, seed: int, stream: int) -> None:
        self.size = size
        # Both halves get h bits, at least one, so that 4^h >= size.
        self._half_bits = np.uint64(max(1, -(-(size - 1).bit_length() // 2)))
        self._mask = np.uint64((1 << int(self._half_bits)) - 1)
        digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8 * _NUM_ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        """Return the elements [n] (int64) at the given positions [n], each in 0..size-1."""
        values = self._network(positions.astype(np.uint64))
        outside = values >= self.size
        while outside.any():
            values[outside] = self._network(values[outside])
            outside = values >= self.size
        return values.astype(np.int64)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half_bits, values & self._mask
        for key in self._keys:
            # The finaliser of splitmix64, a hash: every input bit affects every output bit.
            hashed = right ^ key
            hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            hashed ^= hashed >> np.uint64(31)
            # The same round inverts this one, so a round is a bijection for any hash of the other half.
            left, right = right, left ^ (hashed & self._mask)
        return (left << self._half_bits) | right


@dataclass(frozen=True)
class Sampler:
    """A map from sample numbers to things numbered 0 ... size - 1, shuffled anew in each epoch."""

    size: int
    seed: int

    def rows(self, start: int, count: int) -> np.ndarray:
        """Return the things [count] (int64) of the samples start, start + 1, ..., across epochs if needed."""
        return self.at(np.arange(start, start + count, dtype=np.int64))

    def at(self, samples: np.ndarray) -> np.ndarray:
        """Return the things [n] (int64) of the samples with these numbers [n]."""
        epochs, positions = np.divmod(samples, self.size)
        rows = np.empty_like(samples)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            # Samples of one batch may be in two epochs with different orders.
            rows[of_epoch] = Permutation(self.size, self.seed, epoch)(positions[of_epoch])
        return rows


class ShuffledSamples:
    """Samples of one split, each thing once an epoch. A subclass reads the things.

    Random draws of a sample depend only on the seed and the name of the draws. So every layout has the same samples,
    and each epoch has new draws.
    """

    def __init__(self, size: int, seed: int) -> None:
        self.order = Sampler(size, seed)

    def __len__(self) -> int:
        """Count the samples of an epoch."""
        return self.order.size

    def samples(self, first: int, count: int) -> Batch:
        """Read the samples first ... first + count - 1 of the run: a replica's rows of a global batch."""
        draws = [f"sample/{index}" for index in range(first, first + count)]
        return self.read(self.order.rows(first, count), draws)

    def held_out(self, first: int, count: int) -> Batch:
        """Read the things first ... first + count - 1 in the file's order, equal at each call."""
        assert 0 <= first <= first + count <= len(self), (first, count, len(self))
        rows = np.arange(first, first + count, dtype=np.int64)
        return self.read(rows, [f"held out/{row}" for row in rows.tolist()])

    def read(self, rows: np.ndarray, draws: Sequence[str]) -> Batch:
        """Read a batch of things [count]. `draws`: the name of each thing's random draws."""
        raise NotImplementedError


def document_entries(begins: np.ndarray) -> Batch:
    """Make the batch entries that separate documents in a decoder (models/decoder.py), both int64 [B, T].

    `begins` [B, T]: True at the first token of a document. A row's first token counts too, also inside a document.
    """
    import torch

    places = np.arange(begins.shape[1], dtype=np.int64)
    starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return {"positions": torch.from_numpy(places - starts), "documents": torch.from_numpy(starts)}


class TokenBatches(ShuffledSamples):
    """Windows of one split of a packed corpus: `tokens` and `labels`, both int64 [B, T].

    If documents are separated, each ends with an end token, which has no label, and batches have `document_entries`.
    The entries follow from the window's tokens, so every rank can compute them.
    """

    def __init__(
        self, corpus: PackedCorpus, split: Split, sequence: int, seed: int, separated_by: int | None = None
    ) -> None:
        """Map the token file. `sequence`: tokens a row. `separated_by`: the end token, if documents are separated.

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
        # A document begins after an end token, and at a row's first token (`document_entries`).
        begins[:, 1:] = ends[:, :-1]
        return batch | document_entries(begins)


def token_samples(data: TextData, config: Config, packed: PackedCorpus, split: Split) -> tuple[Samples, str]:
    """Make the windows of a split of a run's corpus. Raises DataError if the split is shorter than one window."""
    end = packed.header.end if data.separate else None
    return TokenBatches(packed, split, data.sequence, config.seed, end), ""
