"""Activation checkpointing: keep what groups of layers read, and compute what is between again in the backward pass.

Chen et al., arXiv 1604.06174. torch's own checkpoint, which gives the second pass the random numbers of the first, so
that dropout masks are the same. In a stage of l of the network's N layers, groups of a cost about l/a inputs and the
activations of a layers: least where a is near √N (AxoNN, arXiv 2110.13005, section 4.2).

Not everything is worth it: GELU alone is never recomputed, since the next linear keeps its output anyway. Groups of one
layer held half as much at the peak as the paper's in our measurements, at no more time (docs/memory.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Any], *arguments: Any) -> Any:
    """function(*arguments), of which only the arguments are kept."""
    return checkpoint(function, *arguments, use_reentrant=False)


def groups_of(layers: range, every: int) -> tuple[range, ...]:
    """The layers in groups of `every`; the last one takes what is left."""
    return tuple(layers[start : start + every] for start in range(0, len(layers), every))


def best_group(stage_layers: int, network_layers: int) -> int:
    """The factor of a stage's layers nearest to the square root of the network's; of two as near, the smaller."""
    factors = [size for size in range(1, stage_layers + 1) if stage_layers % size == 0]
    return min(factors, key=lambda size: abs(size - math.sqrt(network_layers)), default=1)
