"""GPT-2 (Radford et al., 2019): a decoder with norms at the input of each sub-layer, learned positions, tanh GELU.

Shapes: B batch, T sequence, H hidden, A local heads, E head width, N inner width, V vocabulary.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from meshwright.config import Config
from meshwright.families.gpt.section import Gpt2
from meshwright.model import Batch, Chunk, Costs, Hidden
from meshwright.models.attention import AttentionCore, split_heads
from meshwright.models.chain import blocks_of
from meshwright.models.decoder import Decoder, KeyValueCache
from meshwright.parameters.shard import Initial
from meshwright.tensor.gelu import gelu
from meshwright.tensor.head import HeadShape
from meshwright.tensor.islands import UsesIslands
from meshwright.tensor.kit import Kit


class GptAttention(nn.Module):
    """Causal self-attention over this rank's heads."""

    def __init__(self, model: Gpt2, kit: Kit, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads = kit.local_heads(model.heads)
        self.core = AttentionCore(kit, model.dropout)
        self.query_key_value = kit.branches.expand(model.hidden, 3 * model.hidden, Initial(0.02), groups=3)
        self.output = kit.branches.contract(model.hidden, model.hidden, Initial(0.02 / math.sqrt(2 * model.layers)))

    def forward(self, h: Tensor, cache: KeyValueCache | None, documents: Tensor | None) -> Tensor:
        query, key, value = split_heads(self.query_key_value(h), self.heads)  # [B, A, T, E]
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        # A single query sees the whole cache; a mask of documents is causal itself.
        causal = query.shape[2] > 1 and documents is None
        # The kernels' causal mask has no offset for several queries after a cache.
        assert not causal or key.shape == query.shape, "only one token at a time can follow a cache"
        return self.output(self.core(query, key, value, documents, causal).transpose(1, 2).flatten(2))


class GptFeedForward(nn.Module, UsesIslands):
    """Two linears with a GELU between."""

    def __init__(self, model: Gpt2, kit: Kit) -> None:
        super().__init__()
        self.expand = kit.expand(model.hidden, model.inner, Initial(0.02))
        # GPT-2 scales the first weights of the 2 L addends of the residual sum by 1 / sqrt(2 L), so that the sum does
        # not grow with depth.
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

    def forward(self, h: Tensor, cache: KeyValueCache | None = None, documents: Tensor | None = None) -> Tensor:
        h = h + self.dropout(self.attention(self.attention_norm(h), cache, documents))
        return h + self.dropout(self.feed_forward(self.feed_forward_norm(h)))  # [B, T, H]


class GPT(Decoder):
    """Tokens to a loss."""

    def __init__(self, model: Gpt2, kit: Kit, chunk: Chunk | None = None) -> None:
        chunk = chunk or Chunk.whole(model.layers)
        super().__init__(chunk)
        hidden, initial = model.hidden, Initial(0.02)
        # The last stage has its own copy of a tied table; the gradients of both are summed (ENDS).
        if chunk.first or (chunk.last and model.tied):
            self.tokens = kit.embedding(model.padded_vocabulary, hidden, initial)
        if chunk.first:
            self.positions = kit.embedding(model.padded(model.positions), hidden, initial)
            self.dropout = nn.Dropout(model.dropout)
        self.blocks = blocks_of(chunk, lambda layer: GptBlock(model, kit, layer))
        if chunk.last:
            self.norm = kit.norm(hidden, model.norm_epsilon)
        if chunk.has_head:
            tied = self.tokens if model.tied else None
            shape = HeadShape(hidden, model.vocabulary, model.padded_vocabulary, initial, over=chunk.head_over)
            self.head = kit.head_loss(shape, tied)

    def embed(self, batch: Batch) -> Hidden:
        return (self._embed(batch["tokens"], batch.get("positions", 0)),)

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        return (block(*hidden, None, batch.get("documents")),)

    def hidden(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        h = self._embed(tokens, cache.num_tokens if cache is not None else 0)
        for block in self.blocks.values():
            h = block(h, cache)
        return self.final_states((h,))

    def _embed(self, tokens: Tensor, at: int | Tensor) -> Tensor:
        """[B, T, H]. `at`: the tokens' positions [B, T], or the first position of consecutive tokens."""
        positions = self.context.positions(at, tokens.shape[1], tokens.device) if isinstance(at, int) else at
        h: Tensor = self.dropout(self.tokens(tokens) + self.positions(positions))
        return h

    @staticmethod
    def products(config: Config) -> Costs:
        """Causal attention counts as if no score were masked."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, Gpt2), model
        # 12 H^2: query, key, value 3, output 1, feed-forward 8. 2 T H: scores and weighted values.
        layer = sequence * (12 * model.hidden**2 + 2 * sequence * model.hidden)
        # Padding rows of the head are multiplied too; embeddings multiply nothing.
        return Costs(0, (layer,) * model.layers, sequence * model.padded_vocabulary * model.hidden)
