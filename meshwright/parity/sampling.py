"""Samples of tensors that two layouts of one model have in common.

A large tensor is kept at every s-th index of each dim, s a power of two. Where a rank's part begins at a multiple of s,
the part's samples are a part of the whole's samples: copies, cuts and partial sums stay what they are, and everything
that explains whole tensors explains samples. Two records with other steps have the coarser of both in common.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

Strides = tuple[int, ...]


def strides_of(shape: Sequence[int], most: int) -> Strides:
    """The distance of samples along each dim, so that at most about `most` elements of a tensor are kept."""
    strides = [1] * len(shape)
    while math.prod(-(-n // s) for n, s in zip(shape, strides, strict=True)) > most:
        # The longest dim first, and of equal ones the last: rows, which ranks share, stay longest.
        longest = max(range(len(shape)), key=lambda dim: (-(-shape[dim] // strides[dim]), dim))
        strides[longest] *= 2
    return tuple(strides)


def sampled(x: Tensor, strides: Strides, offsets: Sequence[int] = ()) -> Tensor:
    """A copy of the samples of a tensor, on the CPU. `offsets`: where it begins in a whole, whose multiples count."""
    for dim, stride in enumerate(strides):
        if stride > 1:
            x = x.narrow(dim, first := -offsets[dim] % stride if offsets else 0, max(0, x.shape[dim] - first))
            x = x[(slice(None),) * dim + (slice(None, None, stride),)]
    return x.detach().clone(memory_format=torch.contiguous_format).cpu()


def coarser(x: Tensor, strides: Strides, common: Strides) -> Tensor:
    """Samples at some strides as those at multiples of them."""
    for dim, (own, wanted) in enumerate(zip(strides, common, strict=True)):
        if wanted != own:
            x = x[(slice(None),) * dim + (slice(None, None, wanted // own),)]
    return x.contiguous()


def are_aligned(shapes: Sequence[Sequence[int]], strides: Strides) -> bool:
    """Whether parts of these shapes, one behind the other, begin at samples of the whole: along a dim in which they
    differ each length is a multiple of the stride."""
    columns = zip(*shapes, strict=True)
    return all(
        stride == 1 or len(set(lengths)) == 1 or all(n % stride == 0 for n in lengths)
        for lengths, stride in zip(columns, strides, strict=True)
    )
