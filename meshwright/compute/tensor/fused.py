"""Functions in compiled layers whose backward passes sum columns on the way (`compile: kernels`), as modules hold them.

The functions are in column_sums.py, which imports Triton. Runs without them import this file alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Fused:
    """Table of the functions, each for use in a compiled graph."""

    norm: Callable[[Tensor, Tensor, Tensor | None, float, bool], Tensor]
    """norm(x, weight, bias, epsilon, centred): a layer norm, or without `centred` an RMS norm, over the last dim."""
    gelu: Callable[[bool, Tensor], Tensor]
    """gelu(tanh, x): GELU of x, in the tanh form or exact."""
    heads: Callable[[Tensor, int], tuple[Tensor, ...]]
    """heads(x, heads): x [B, T, G, N] as G tensors [B, heads, T, N/heads]."""


class UsesFused:
    """Module that uses these functions in compiled graphs after a call of `use_fused`."""

    fused: Fused | None = None

    def use_fused(self, fused: Fused) -> None:
        """Use the functions from now on.

        Args:
            fused: the functions by name.
        """
        self.fused = fused
