"""Hashes of bits: any flipped bit changes the hash, and ranks compare equal tensors with 16 bytes."""

from __future__ import annotations

import pytest
import torch

from meshwright.ranks.agreement import COLUMNS, hash_bits, make_equal
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from tests.ranks.flips import WORDS, flip
from tests.workers import run_ranks


@pytest.mark.parametrize("dtype", WORDS)
def test_every_bit_of_an_element_counts(dtype: torch.dtype) -> None:
    x = torch.randn(5 * COLUMNS + 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    clean, seen = int(hash_bits(x)), set()
    for element in (0, 1, 2, COLUMNS - 1, COLUMNS, 3 * COLUMNS + 17, x.numel() - 2, x.numel() - 1):
        for bit in range(8 * dtype.itemsize):
            flip(x, element, bit)
            seen.add(int(hash_bits(x)))
            flip(x, element, bit)
    assert int(hash_bits(x)) == clean
    assert clean not in seen


def test_an_element_in_anothers_place_counts() -> None:
    x = torch.randn(4 * COLUMNS)
    for one, other in ((0, 2), (4, 4 + 2 * COLUMNS), (1, 4 * COLUMNS - 1)):
        swapped = x.clone()
        swapped[[one, other]] = x[[other, one]]
        assert int(hash_bits(swapped)) != int(hash_bits(x))


def test_a_part_that_begins_anywhere_has_the_hash_of_its_copy() -> None:
    x = torch.randn(3 * COLUMNS)
    for start in range(3):
        part = x[start : start + 2 * COLUMNS + 5]
        assert int(hash_bits(part)) == int(hash_bits(part.clone()))
    assert int(hash_bits(x[:0])) == 0


def test_any_single_bit_changes_the_hash() -> None:
    """The hash is a sum of words times factors, so a flipped bit k changes the hash by ±2^k times the word's factor.

    A word's factor is odd, so its product with 2^k is not 0 modulo 2^64, and differs from all other words' factors.
    """
    words = torch.zeros(3 * COLUMNS + 7, dtype=torch.int64)
    factors = []
    for index in range(words.numel()):
        words[index] = 1
        factors.append(int(hash_bits(words)))
        words[index] = 0
    assert all(factor % 2 for factor in factors)
    assert len(set(factors)) == words.numel()
    values = torch.randint(-(2**63), 2**63 - 1, words.shape, generator=torch.Generator().manual_seed(1))
    assert int(hash_bits(values)) == int((values * torch.tensor(factors)).sum()), "it is no sum of products"


def equal_in_bytes(mesh: Mesh, dtype: torch.dtype) -> tuple[list[bool], list[float], int]:
    """Return `make_equal`'s answers before and after the repair, the last elements, and the bytes of the second call.

    Rank 1 has a flipped bit in the last element of an odd number of elements.
    """
    x = torch.ones(3, 2 * COLUMNS + 1, dtype=dtype)
    if mesh.rank == 1:
        flip(x, x.numel() - 1, 3)
    told = [make_equal(x, mesh.world)]
    mended = sum(mesh.ledger.sent_bytes().values())
    told.append(make_equal(x, mesh.world))
    return told, x.flatten()[-2:].tolist(), sum(mesh.ledger.sent_bytes().values()) - mended


@pytest.mark.parametrize("dtype", WORDS)
def test_one_bit_is_found_and_mended(dtype: torch.dtype) -> None:
    for told, last, sent in run_ranks(equal_in_bytes, Grid((("data", 2),)), dtype):
        assert told == [True, False]
        assert last == [1.0, 1.0]
        assert sent == 16, "ranks that hold the same tell each other a hash"


def zeros_or_ones(mesh: Mesh, dtype: torch.dtype, length: int) -> tuple[bool, bool]:
    """Return whether ranks with ones (rank 0) and zeros (all others) differ, and whether all hold ones afterwards."""
    x = torch.full((length,), float(mesh.rank == 0), dtype=dtype)
    return make_equal(x, mesh.world), bool(x.all())


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("length", [2**11, 2**20])
def test_constants_differ(dtype: torch.dtype, length: int) -> None:
    assert run_ranks(zeros_or_ones, Grid((("data", 2),)), dtype, length) == [(True, True)] * 2
