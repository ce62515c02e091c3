"""The reference model of the benchmarks, and random data: small enough for two cores, and bound by products.

4 layers, hidden 256, 8 heads, sequence 128, global batch 8, vocabulary 8192, untied head, no dropout, float32, AdamW,
one thread a rank: 7.39 M parameters, about 33 Gflop a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reference:
    """Sizes and AdamW's settings. `batch`: sequences in the global batch."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8
    sequence: int = 128
    batch: int = 8
    vocabulary: int = 8192
    learning_rate: float = 3e-4
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1


REFERENCE = Reference()

WIDE = Reference(hidden=768, heads=12, batch=4)
"""For tensor parallelism: products of 512 tokens take longer than DTensor's dispatch."""


def rank_rows(rank: int, ranks: int, sizes: Reference = REFERENCE) -> slice:
    """Return the sequences of the global batch that a data-parallel rank sees.

    Raises:
        ValueError: The ranks do not divide the batch.
    """
    if sizes.batch % ranks:
        raise ValueError(f"{ranks} ranks do not divide the global batch of {sizes.batch} sequences")
    each = sizes.batch // ranks
    return slice(rank * each, (rank + 1) * each)


def global_batch(step: int, sizes: Reference = REFERENCE) -> tuple[Tensor, Tensor]:
    """Draw inputs and next-token labels of a step, [B, T] each: random tokens, equal on every rank."""
    generator = torch.Generator().manual_seed(step)
    shape = (sizes.batch, sizes.sequence + 1)
    tokens = torch.randint(sizes.vocabulary, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
