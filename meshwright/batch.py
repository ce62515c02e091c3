"""A batch: what a model reads, as named tensors whose first dim counts the samples (sequences, images).

A label of IGNORED is not counted. Every loss of a model is a sum over the counted elements of one entry, its label;
divided by their number in the global batch it is a mean, also where ranks and microbatches count different numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

IGNORED = -100

Batch = dict[str, Tensor]
"""By name, each [B, ...]."""

Scales = Mapping[str, float]
"""What the sum of each loss is multiplied with, by the name of its label."""

LoadRows = Callable[[int, int], Batch]
"""load(first, count): rows first..first+count of the step's global batch."""


class Samples(Protocol):
    """A split of a data set. Nothing in it has state: a sample's number is its whole cursor."""

    def __len__(self) -> int:
        """Samples an epoch."""

    def samples(self, first: int, count: int) -> Batch:
        """Samples first ... first + count - 1 of the run, shuffled anew in each epoch; the same in every layout."""

    def held_out(self, first: int, count: int) -> Batch:
        """Samples first ... first + count - 1 in the file's order, each time the same; first + count <= len."""


def rows_of(batch: Batch, rows: slice) -> Batch:
    """The same rows of every entry."""
    return {name: x[rows] for name, x in batch.items()}


def counts_of(batch: Batch, labels: Sequence[str]) -> list[int]:
    """How many elements of each label count."""
    return [int((batch[name] != IGNORED).sum()) for name in labels]


def scales_of(labels: Sequence[str], counts: Sequence[int], scale: float) -> Scales:
    """The scales that turn each loss into `scale` times its mean over `counts` elements."""
    return {name: scale / max(1, count) for name, count in zip(labels, counts, strict=True)}


def to_device(batch: Batch, device: torch.device) -> Batch:
    return {name: x.to(device) for name, x in batch.items()}
