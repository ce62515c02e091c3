"""The attention core: what stands between the two linears of an attention, over this rank's heads."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.chain import Run, at_once
from meshwright.tensor.kit import Kit


class AttentionCore(nn.Module):
    """softmax(Q Kᵀ / √E + mask) V with dropout on the weights. It has no parameters, and is cheap to compute again."""

    def __init__(self, kit: Kit, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout
        self.own_randomness = kit.own_randomness
        self.run: Run = at_once

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """Q, K, V [B, A, T, E]; mask [B, 1, 1, T]: true where a token is seen. [B, A, T, E]."""
        attended: Tensor = self.run(self._attend, query, key, value, mask, causal)
        return attended

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        with self.own_randomness(dropout):
            return F.scaled_dot_product_attention(query, key, value, mask, dropout, causal)
