"""A seeded permutation of 0..n-1 that is computed, not stored.

A Feistel network of four rounds is a bijection on [0, 4^h), whatever its round function; values that fall outside
[0, n) are sent through again until they fall inside (cycle walking), which leaves a bijection on [0, n). The domain is
less than 4 n, so four passes are expected. A lookup costs the same for 10^3 and 10^12 elements, needs no memory, and,
being integer arithmetic of our own, gives the same order under every version of numpy.
"""

from __future__ import annotations

import hashlib

import numpy as np

_NUM_ROUNDS = 4


class Permutation:
    """The permutation number `stream` of `size` elements under `seed`."""

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
            left, right = right, left ^ (_scramble(right ^ key) & self._mask)
        return (left << self._half_bits) | right


def _scramble(values: np.ndarray) -> np.ndarray:
    """A hash of 64-bit integers (the finaliser of splitmix64): every bit of the input moves every bit of the output."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
