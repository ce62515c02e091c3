"""Sequences of several documents, and the runs that keep documents separate."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from meshwright.data.sampler import document_entries
from meshwright.ranks.grid import Grid

LENGTHS = [(5, 1, 42), (48,), (2, 7, 7, 8, 24), (1,) * 48, (20, 4, 4, 4, 16)]
"""Tokens of the documents of each row: across many chunks, whole rows, chunk by chunk, one by one, at chunks' edges."""

SOLO = Grid((("context", 1),))


def starts_of(rows: Sequence[Sequence[int]]) -> Tensor:
    begins = np.zeros((len(rows), sum(rows[0])), dtype=bool)
    for begun, lengths in zip(begins, rows, strict=True):
        begun[np.cumsum(lengths)[:-1]] = True
    return document_entries(begins)["documents"]


A, K, T, E = 4, 2, 48, 8


def operands(dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Tensor]:
    """Return Q, K, V, with two queries for each key, and the output's gradient."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(len(LENGTHS), heads, T, E) for heads in (A, K, K, A)]
    *inputs, gradient = (torch.randn(shape, dtype=dtype, generator=generator) * 2 for shape in shapes)
    return inputs, gradient
