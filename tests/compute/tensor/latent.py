"""A model with activations shared by all heads, as in multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): one
key with the positions for all heads enters the branches, and a sum over heads leaves the branches."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.model import Batch, Chunk, Costs, Hidden
from meshwright.compute.models.attention import AttentionCore
from meshwright.compute.models.chain import Chain, blocks_of
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.kit import Kit
from meshwright.config import Config
from meshwright.families.gpt.section import Gpt2

DRAWN = Initial(0.2)


class Latent(Gpt2):
    """GPT-2's fields, with another block."""

    chain: ClassVar[str] = "tests.compute.tensor.latent:LatentModel"

    @property
    def head_width(self) -> int:
        return self.hidden // self.heads


def latent(config: Config) -> Config:
    """Return a run of GPT-2 with these layers instead."""
    return config.model_copy(update={"model": Latent.model_validate(config.model.model_dump(mode="json"))})


class LatentAttention(nn.Module):
    """softmax(q k) v, k = [a head's own part, the part that all heads share]; plus a gate that all heads make."""

    def __init__(self, model: Latent, kit: Kit) -> None:
        super().__init__()
        hidden, width, heads = model.hidden, model.head_width, model.heads
        self.heads, self.all_heads, self.width = kit.local_heads(heads), heads, width
        self.enter, self.leave = kit.enter, kit.leave
        self.down = kit.linear("transform", hidden, hidden, DRAWN, bias=False)
        self.latent_norm = kit.norm(hidden, model.norm_epsilon, kind="rms")
        self.shared_key = kit.linear("transform", hidden, width, DRAWN)
        self.query = kit.branches.expand(hidden, 2 * hidden, DRAWN)
        self.key_value = kit.branches.expand(hidden, 3 * hidden, DRAWN, bias=False)
        self.core = AttentionCore(kit, AttentionSpec(causal=True, dropout=model.dropout))
        self.output = kit.branches.contract(2 * hidden, hidden, DRAWN)
        self.gate = kit.linear("transform", width, hidden, DRAWN)

    def forward(self, h: Tensor, places: Tensor) -> Tensor:
        latent = self.latent_norm(self.down(h))
        query = self.query(h).unflatten(-1, (self.heads, -1))  # [B, T, A, 2E]
        own, value = self.key_value(latent).unflatten(-1, (self.heads, -1)).split((self.width, 2 * self.width), -1)
        shared = self.enter(self.shared_key(h), self.all_heads)  # [B, T, A, E]
        key = torch.cat([own, shared * places.to(h.dtype).div(7).cos()[:, None, None]], -1)
        attended = self.core(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)
        return self.output(attended.flatten(2)) * self.gate(self.leave(own * shared)).tanh()


class LatentBlock(nn.Module):
    def __init__(self, model: Latent, kit: Kit) -> None:
        super().__init__()
        self.attention_norm = kit.norm(model.hidden, model.norm_epsilon)
        self.attention = LatentAttention(model, kit)
        self.feed_forward_norm = kit.norm(model.hidden, model.norm_epsilon)
        self.expand = kit.expand(model.hidden, model.inner, DRAWN)
        self.contract = kit.contract(model.inner, model.hidden, DRAWN)

    def forward(self, h: Tensor, places: Tensor) -> Tensor:
        h = h + self.attention(self.attention_norm(h), places)
        y: Tensor = h + self.contract(self.expand(self.feed_forward_norm(h)).tanh())
        return y


class LatentModel(Chain):
    def __init__(self, model: Latent, kit: Kit, chunk: Chunk | None = None) -> None:
        super().__init__(chunk or Chunk.whole(model.layers))
        if self.chunk.first:
            self.tokens = kit.embedding(model.padded_vocabulary, model.hidden, Initial(1.0))
        self.blocks = blocks_of(self.chunk, lambda layer: LatentBlock(model, kit))
        if self.chunk.last:
            self.norm = kit.norm(model.hidden, model.norm_epsilon)
            self.head = kit.head_loss(HeadShape(model.hidden, model.vocabulary, model.padded_vocabulary, DRAWN))

    def embed(self, batch: Batch) -> Hidden:
        return (self.tokens(batch["tokens"]),)

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        tokens = batch["tokens"]
        return (block(*hidden, self.context.positions(0, tokens.shape[1], tokens.device)),)

    @staticmethod
    def products(config: Config) -> Costs:
        hidden, tokens = config.model.hidden, config.data.lengths.source
        layer = tokens * (17 * hidden**2 + 4 * tokens * hidden)
        return Costs(0, (layer,) * config.model.num_blocks, tokens * config.model.padded_rows * hidden)

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(("tokens", "labels"), (config.data.lengths.source,))
