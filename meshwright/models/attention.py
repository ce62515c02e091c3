"""The attention core: what stands between the two linears of an attention, over this rank's heads."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.context.context import WHOLE_SEQUENCES, Context
from meshwright.models.chain import Run, at_once
from meshwright.tensor.kit import Kit


def split_heads(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """[B, T, G, N/G] -> G times [B, A, T, E].

    `unbind`, whose gradient is one stack: a select's is zeros of all of x with one part copied in, and they add up.
    """
    return tuple(part.transpose(1, 2) for part in x.unflatten(-1, (heads, -1)).unbind(2))


class AttentionCore(nn.Module):
    """softmax(scale · Q Kᵀ + bias + mask) V with dropout on the weights. It has no parameters, and is cheap to compute
    again."""

    def __init__(self, kit: Kit, dropout: float, scale: float | None = None) -> None:
        """`scale`: None: 1/√E."""
        super().__init__()
        self.dropout, self.scale = dropout, scale
        self.own_randomness = kit.own_randomness
        self.run: Run = at_once
        self.context: Context = WHOLE_SEQUENCES

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, bias: Tensor | None = None
    ) -> Tensor:
        """Q [B, A, T, E]; K, V [B, A, S, E]; mask [B, 1, 1, S]: true where a token is seen; or int64
        [B, T]: where each token's document begins (context/documents.py). [B, A, T, E].

        bias [1, A, T, S]: is added to the scores; what may not be seen for causality is in it, so `causal` is false.
        """
        # `run` may keep the arguments alone and compute the scores again in the backward pass (recompute: selective).
        attended: Tensor = self.run(self._attend, query, key, value, mask, causal, bias)
        return attended

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, bias: Tensor | None
    ) -> Tensor:
        if bias is not None:
            bias = bias.to(query.dtype)
            # The least finite number, not -inf: a row in which nothing may be seen would be 0 / 0.
            mask = bias if mask is None else bias.masked_fill(~mask, torch.finfo(bias.dtype).min)
        elif mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)  # autocast's queries are narrower than what passes between layers
        dropout = self.dropout if self.training else 0.0
        # Ranks have different heads of one batch: with a common random stream all heads would drop the same weights.
        with self.own_randomness(dropout):
            return self.context.attend(query, key, value, mask, dropout, causal, self.scale)
