"""Samples of tensors that two layouts of one model have in common.

A large tensor is recorded at every s-th index of each dim, s a power of two. If a rank's part begins at a multiple of
s, the samples of the part are a part of the samples of the whole. So copies, cuts and partial sums of tensors are
copies, cuts and partial sums of samples, with the same explanations. Two records with different strides have the
samples of the coarser strides in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Strides = tuple[int, ...]


def strides_of(shape: Sequence[int], most: int) -> Strides:
    """Return the stride of samples along each dim, so that at most `most` elements of a tensor are kept."""
    strides = [1] * len(shape)
    while math.prod(-(-n // s) for n, s in zip(shape, strides, strict=True)) > most:
        # The longest dim first, and of equal dims the last: rows, which ranks share, keep most samples.
        longest = max(range(len(shape)), key=lambda dim: (-(-shape[dim] // strides[dim]), dim))
        strides[longest] *= 2
    return tuple(strides)


def sampled(x: Tensor, strides: Strides, offsets: Sequence[int] = ()) -> Tensor:
    """Copy the samples of a tensor to the CPU. `offsets`: of x in the whole; samples are at multiples in the whole."""
    for dim, stride in enumerate(strides):
        if stride > 1:
            x = x.narrow(dim, first := -offsets[dim] % stride if offsets else 0, max(0, x.shape[dim] - first))
            x = x[(slice(None),) * dim + (slice(None, None, stride),)]
    return x.detach().clone(memory_format=torch.contiguous_format).cpu()


def coarser(x: Tensor, strides: Strides, common: Strides) -> Tensor:
    """Reduce samples at `strides` to the samples at `common`, multiples of `strides`."""
    for dim, (stride, wanted) in enumerate(zip(strides, common, strict=True)):
        if wanted != stride:
            x = x[(slice(None),) * dim + (slice(None, None, wanted // stride),)]
    return x.contiguous()


def are_aligned(shapes: Sequence[Sequence[int]], strides: Strides) -> bool:
    """Return True if consecutive parts of these shapes begin at samples of the whole.

    Along a dim with different lengths, each length must be a multiple of the stride.
    """
    columns = zip(*shapes, strict=True)
    return all(
        stride == 1 or len(set(lengths)) == 1 or all(n % stride == 0 for n in lengths)
        for lengths, stride in zip(columns, strides, strict=True)
    )
