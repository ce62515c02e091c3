"""A contender with the bytes as loss that a large tensor adds to glibc's separately mapped bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from benchmarks.contender import Place, Step

TENSOR_BYTES = 64 * 2**20


class Mallinfo2(ctypes.Structure):
    """glibc's struct."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@contextmanager
def mapped(place: Place) -> Iterator[Step]:
    """Yield the step. Needs glibc 2.33."""
    library = ctypes.CDLL("libc.so.6")
    library.mallinfo2.restype = Mallinfo2

    def step() -> float:
        before = library.mallinfo2().hblkhd
        kept = torch.ones(TENSOR_BYTES // 4)
        assert float(kept[-1]) == 1
        return float(library.mallinfo2().hblkhd - before)

    yield step
