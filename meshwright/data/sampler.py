"""Which windows of the token file a step trains on. Nothing here has state: a sample's number is its whole cursor.

A window is `sequence + 1` tokens, window w beginning at token w * sequence; its first `sequence` tokens are the inputs,
its last `sequence` the labels, so every token but the first is a label once an epoch. (Less than one window of tokens
at the file's end is never seen.) An epoch is a seeded permutation of the windows, another one each time.

A step takes the next B samples (B: sequences in the global batch). A replica asks for its rows of them: all layouts see
the same global batch, and resuming needs the number of samples seen, nothing else.
"""

from __future__ import annotations

import numpy as np
import torch

from meshwright.data.format import PackedCorpus
from meshwright.data.permutation import Permutation
from meshwright.data.split import Split
from meshwright.errors import DataError
from meshwright.model import Batch


class Sampler:
    """The order of the windows: sample number -> window."""

    def __init__(self, num_tokens: int, sequence: int, seed: int) -> None:
        """Raises DataError if the tokens make no window."""
        self.num_windows = (num_tokens - 1) // sequence
        self._seed = seed
        if self.num_windows < 1:
            wanted = f"data.sequence={sequence} needs windows of {sequence + 1} tokens, and there are {num_tokens}"
            raise DataError(f"{wanted}: take a shorter sequence (at most {max(num_tokens - 1, 1)}) or more text")

    def rows(self, start: int, count: int) -> np.ndarray:
        """Windows [count] (int64) of the samples start, start + 1, ..., over as many epochs as these touch."""
        samples = np.arange(start, start + count, dtype=np.int64)
        epochs, positions = np.divmod(samples, self.num_windows)
        windows = np.empty_like(samples)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            windows[of_epoch] = Permutation(self.num_windows, self._seed, epoch)(positions[of_epoch])
        return windows


class TokenBatches:
    """Batches of one split of a packed corpus."""

    def __init__(self, corpus: PackedCorpus, split: Split, sequence: int, seed: int) -> None:
        """`sequence`: tokens a row. Raises DataError if the split is shorter than one window."""
        self._tokens = np.asarray(corpus.tokens(split))
        self._sequence = sequence
        try:
            self._sampler = Sampler(len(self._tokens), sequence, seed)
        except DataError as error:
            raise DataError(f"the {split} split of {corpus.folder}: {error}") from error

    def __len__(self) -> int:
        """Windows in the split: sequences an epoch."""
        return self._sampler.num_windows

    def windows(self, first: int, count: int) -> np.ndarray:
        """Windows [count] of the samples first, first + 1, ...: a replica asks for its rows of a global batch."""
        return self._sampler.rows(first, count)

    def samples(self, first: int, count: int) -> Batch:
        """`tokens` and `labels` of samples first ... first + count - 1 of the run, both int64 [count, T]."""
        return self._read(self.windows(first, count))

    def held_out(self, first: int, count: int) -> Batch:
        """As `samples`, of the windows in the file's order."""
        assert 0 <= first <= first + count <= len(self), (first, count, len(self))
        return self._read(np.arange(first, first + count, dtype=np.int64))

    def _read(self, windows: np.ndarray) -> Batch:
        places = windows[:, None] * self._sequence + np.arange(self._sequence + 1)
        rows = torch.from_numpy(self._tokens[places].astype(np.int64))
        return {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
