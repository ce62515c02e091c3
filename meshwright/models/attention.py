"""The attention core: what stands between the two linears of an attention, over this rank's heads; and the block of
self-attention and a GELU feed-forward that GPT-2, BERT and ViT have."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.context.context import WHOLE_SEQUENCES, Context
from meshwright.model import Run, RunsAttention, at_once
from meshwright.parameters.shard import Initial
from meshwright.tensor.gelu import gelu
from meshwright.tensor.islands import UsesIslands
from meshwright.tensor.kit import Kit

if TYPE_CHECKING:
    from meshwright.models.decoder import KeyValueCache
    from meshwright.models.section import Transformer


def split_heads(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """[B, T, G, N/G] -> G times [B, A, T, E].

    `unbind`, whose gradient is one stack: a select's is zeros of all of x with one part copied in, and they add up.
    """
    return tuple(part.transpose(1, 2) for part in x.unflatten(-1, (heads, -1)).unbind(2))


class AttentionCore(RunsAttention):
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
        # `run` may keep the arguments alone and compute the scores again in the backward pass (memory.recompute).
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


class SelfAttention(nn.Module):
    """Self-attention over this rank's heads. `causal`: a token sees none behind it; `last`: the first values of the
    linear that ends in the residual stream."""

    def __init__(self, model: Transformer, kit: Kit, layer: int, last: Initial, *, causal: bool) -> None:
        super().__init__()
        self.layer, self.causal = layer, causal
        self.heads = kit.local_heads(model.heads)
        self.core = AttentionCore(kit, model.dropout)
        self.query_key_value = kit.branches.expand(model.hidden, 3 * model.hidden, Initial(0.02), groups=3)
        self.output = kit.branches.contract(model.hidden, model.hidden, last)

    def forward(self, h: Tensor, mask: Tensor | None, cache: KeyValueCache | None) -> Tensor:
        query, key, value = split_heads(self.query_key_value(h), self.heads)  # [B, A, T, E]
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        # A single query sees the whole cache; a mask of documents is causal itself.
        causal = self.causal and query.shape[2] > 1 and mask is None
        # The kernels' causal mask has no offset for several queries after a cache.
        assert not causal or key.shape == query.shape, "only one token at a time can follow a cache"
        return self.output(self.core(query, key, value, mask, causal).transpose(1, 2).flatten(2))


class GeluFeedForward(nn.Module, UsesIslands):
    """Two linears with a GELU between: exact, or in GPT-2's `tanh` form."""

    def __init__(self, model: Transformer, kit: Kit, last: Initial, *, tanh: bool) -> None:
        super().__init__()
        self.tanh = tanh
        self.expand = kit.expand(model.hidden, model.inner, Initial(0.02))
        self.contract = kit.contract(model.inner, model.hidden, last)

    def forward(self, h: Tensor) -> Tensor:
        inside = self.expand(h)
        return self.contract(gelu(inside, self.islands) if self.tanh else F.gelu(inside))


class Block(nn.Module):
    """h + attention(norm(h)), then h + feed_forward(norm(h)); or without `norm_first` norm(h + attention(h)), then
    norm(h + feed_forward(h))."""

    def __init__(
        self, model: Transformer, kit: Kit, layer: int, last: Initial, *, causal: bool = False, tanh: bool = False,
        norm_first: bool = True, last_bias: bool = True,
    ) -> None:  # fmt: skip
        """`last`: the first values of the linears that end in the residual stream; `last_bias`: whether the
        feed-forward's norm, the block's last where norms are behind the sums, has a bias."""
        super().__init__()
        self.norm_first = norm_first
        self.attention_norm = kit.norm(model.hidden, model.norm_epsilon)
        self.attention = SelfAttention(model, kit, layer, last, causal=causal)
        self.feed_forward_norm = kit.norm(model.hidden, model.norm_epsilon, bias=last_bias)
        self.feed_forward = GeluFeedForward(model, kit, last, tanh=tanh)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, h: Tensor, mask: Tensor | None = None, cache: KeyValueCache | None = None) -> Tensor:
        """[B, T, H]. `mask`: as AttentionCore has it."""
        if self.norm_first:
            h = h + self.dropout(self.attention(self.attention_norm(h), mask, cache))
            return h + self.dropout(self.feed_forward(self.feed_forward_norm(h)))
        h = self.attention_norm(h + self.dropout(self.attention(h, mask, cache)))
        normed: Tensor = self.feed_forward_norm(h + self.dropout(self.feed_forward(h)))
        return normed
