"""GPT-2 (Radford et al., 2019): a decoder with norms at the input of each sub-layer, learned positions, tanh GELU.

Shapes: B batch, T sequence, H hidden, A local heads, E head width, N inner width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor, nn

from meshwright.config import Config
from meshwright.model import Batch, Chunk, Costs, Hidden, Scales
from meshwright.models.attention import AttentionCore, split_heads
from meshwright.models.chain import Chain, blocks_of
from meshwright.models.section import Gpt2
from meshwright.parameters.shard import Initial
from meshwright.tensor.gelu import gelu
from meshwright.tensor.head import HeadShape
from meshwright.tensor.islands import UsesIslands
from meshwright.tensor.kit import Head, Kit


@dataclass
class KeyValueCache:
    """Keys and values of the tokens seen so far, one pair a block, [B, A, T, E] each."""

    layers: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def extend(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append to a layer's pair and return the whole pair."""
        if layer == len(self.layers):
            self.layers.append((key, value))
        else:
            past_key, past_value = self.layers[layer]
            self.layers[layer] = (torch.cat([past_key, key], 2), torch.cat([past_value, value], 2))
        return self.layers[layer]


class GptAttention(nn.Module):
    """Causal self-attention over this rank's heads."""

    def __init__(self, model: Gpt2, kit: Kit, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = kit.local_heads(model.heads)
        self.core = AttentionCore(kit, model.dropout)
        self.query_key_value = kit.branches.expand(model.hidden, 3 * model.hidden, Initial(0.02), groups=3)
        self.output = kit.branches.contract(model.hidden, model.hidden, Initial(0.02 / math.sqrt(2 * model.layers)))

    def forward(self, h: Tensor, cache: KeyValueCache | None) -> Tensor:
        query, key, value = split_heads(self.query_key_value(h), self.heads)  # [B, A, T, E]
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        causal = query.shape[2] > 1
        assert not causal or key.shape == query.shape, "only one token at a time can follow a cache"
        return self.output(self.core(query, key, value, None, causal).transpose(1, 2).flatten(2))


class GptFeedForward(nn.Module, UsesIslands):
    """Two linears with a GELU between."""

    def __init__(self, model: Gpt2, kit: Kit) -> None:
        super().__init__()
        self.expand = kit.expand(model.hidden, model.inner, Initial(0.02))
        self.contract = kit.contract(model.inner, model.hidden, Initial(0.02 / math.sqrt(2 * model.layers)))

    def forward(self, h: Tensor) -> Tensor:
        return self.contract(gelu(self.expand(h), self.islands))


class GptBlock(nn.Module):
    """h + attention(norm(h)), then h + feed_forward(norm(h))."""

    def __init__(self, model: Gpt2, kit: Kit, layer: int) -> None:
        super().__init__()
        self.attention_norm = kit.norm(model.hidden, model.norm_epsilon)
        self.attention = GptAttention(model, kit, layer)
        self.feed_forward_norm = kit.norm(model.hidden, model.norm_epsilon)
        self.feed_forward = GptFeedForward(model, kit)
        self.dropout = nn.Dropout(model.dropout)

    def forward(self, h: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        h = h + self.dropout(self.attention(self.attention_norm(h), cache))
        return h + self.dropout(self.feed_forward(self.feed_forward_norm(h)))  # [B, T, H]


class GPT(Chain):
    """Tokens to a loss. Batch: `tokens` and `labels`, both [B, T]."""

    labels = ("labels",)

    def __init__(self, model: Gpt2, kit: Kit, chunk: Chunk | None = None) -> None:
        chunk = chunk or Chunk.whole(model.layers)
        super().__init__(chunk)
        hidden, initial = model.hidden, Initial(0.02)
        if chunk.first or (chunk.last and model.tied):
            self.tokens = kit.embedding(model.padded_vocabulary, hidden, initial)
        if chunk.first:
            self.positions = kit.embedding(model.positions, hidden, initial)
            self.dropout = nn.Dropout(model.dropout)
        self.blocks = blocks_of(chunk, lambda layer: GptBlock(model, kit, layer))
        if chunk.last:
            self.norm = kit.norm(hidden, model.norm_epsilon)
            tied = self.tokens if model.tied else None
            shape = HeadShape(hidden, model.vocabulary, model.padded_vocabulary, initial)
            self.head = kit.head_loss(shape, tied)

    def embed(self, batch: Batch) -> Hidden:
        return (self._embed(batch["tokens"], 0),)

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        return (block(*hidden),)

    def final_states(self, hidden: Hidden) -> Tensor:
        h: Tensor = self.norm(*hidden)
        return h

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        loss: Tensor = self.head(h, batch["labels"], scales["labels"])
        return loss

    def num_correct(self, h: Tensor, batch: Batch) -> list[int]:
        return [cast(Head, self.head).num_correct(h, batch["labels"])]

    def hidden(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """The normed hidden states [B, T, H] of tokens that follow those in the cache."""
        h = self._embed(tokens, cache.num_tokens if cache is not None else 0)
        for block in self.blocks.values():
            h = block(h, cache)
        return self.final_states((h,))

    def _embed(self, tokens: Tensor, start: int) -> Tensor:
        positions = self.context.positions(start, tokens.shape[1], tokens.device)
        h: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return h

    @staticmethod
    def products(config: Config) -> Costs:
        """Attention counts whole, though it is causal."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, Gpt2), model
        layer = sequence * (12 * model.hidden**2 + 2 * sequence * model.hidden)
        return Costs(0, (layer,) * model.layers, sequence * model.padded_vocabulary * model.hidden)

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        return {"tokens": (config.data.lengths.source,), "labels": (config.data.lengths.source,)}
