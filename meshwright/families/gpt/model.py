"""GPT-2 (Radford et al., 2019): a decoder with norms at the input of each sub-layer, learned positions, tanh GELU.

Shapes: B batch, T sequence, H hidden, A local heads, E head width, N inner width, V vocabulary.
"""

from __future__ import annotations

import math

from torch import Tensor, nn

from meshwright.compute.model import Batch, Chunk, Costs, Hidden
from meshwright.compute.models.attention import Block
from meshwright.compute.models.chain import blocks_of
from meshwright.compute.models.decoder import Decoder, KeyValueCache
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.kit import Kit
from meshwright.config import Config
from meshwright.families.gpt.section import Gpt2


class GPT(Decoder):
    """GPT-2 from tokens to a loss."""

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
        # GPT-2 scales the first weights of the 2 L addends of the residual sum by 1 / sqrt(2 L), so that the sum does
        # not grow with depth.
        last = Initial(0.02 / math.sqrt(2 * model.layers))
        self.blocks = blocks_of(chunk, lambda layer: Block(model, kit, layer, last, causal=True, tanh=True))
        if chunk.last:
            self.norm = kit.norm(hidden, model.norm_epsilon)
        if chunk.has_head:
            tied = self.tokens if model.tied else None
            shape = HeadShape(hidden, model.vocabulary, model.padded_vocabulary, initial, over=chunk.head_over)
            self.head = kit.head_loss(shape, tied)

    def embed(self, batch: Batch) -> Hidden:
        tokens, positions = batch["tokens"], batch.get("positions")
        if positions is None:
            positions = self.context.positions(0, tokens.shape[1], tokens.device)
        return (self.dropout(self.tokens(tokens) + self.positions(positions)),)  # [B, T, H]

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        return (block(*hidden, documents=batch.get("documents")),)

    def hidden(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        start = cache.num_tokens if cache is not None else 0
        positions = self.context.positions(start, tokens.shape[1], tokens.device)
        (h,) = self.embed({"tokens": tokens, "positions": positions})
        for block in self.blocks.values():
            h = block(h, cache=cache)
        return self.final_states((h,))

    @staticmethod
    def products(config: Config) -> Costs:
        """Count multiplications, with causal attention as if no score were masked."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, Gpt2), model
        # 12 H^2: query, key, value 3, output 1, feed-forward 8. 2 T H: scores and weighted values.
        layer = sequence * (12 * model.hidden**2 + 2 * sequence * model.hidden)
        # Padding rows of the head are multiplied too; embeddings multiply nothing.
        return Costs(0, (layer,) * model.layers, sequence * model.padded_vocabulary * model.hidden)
