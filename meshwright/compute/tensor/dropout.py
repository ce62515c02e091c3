"""Dropout between the two linears of a pair, over this rank's part of the inner width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.tensor.kit import Kit, LinearPair


class InnerDropout(nn.Module):
    """Dropout of [B, T, N/p] between the two linears of a pair; each rank draws a mask for one part of the width."""

    def __init__(self, kit: Kit, rate: float, pair: LinearPair | None = None) -> None:
        """Make the dropout. `pair`: the factory of the two linears; None: the kit."""
        super().__init__()
        self.rate, self.own_randomness, self.inner = rate, kit.own_randomness, (pair or kit).inner
        self.by_block: nn.Module | None = None
        """Draws instead, if masks are free of the layout."""

    def draw_by(self, by_block: nn.Module) -> None:
        """Draw masks by blocks. `by_block`: drops elements of [B, T, N/p], with equal masks in every layout."""
        self.by_block = by_block

    def forward(self, x: Tensor) -> Tensor:
        if self.by_block is not None:
            dropped: Tensor = self.by_block(x)
            return dropped
        rate = self.rate if self.training else 0.0
        with self.own_randomness(rate):
            return F.dropout(x, rate)
