"""DeepSeek-V3 (arXiv 2412.19437), and those made like it: Moonlight (arXiv 2502.16982), Kimi-K2 (arXiv 2507.20534).

Llama's chain with multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1). Queries are made of one
vector a token, keys and values of another; a head's key is a part of its own and one that all heads share, which alone
is turned by positions:

| tensor      | of                     | weight            | shape            | its gradient                          |
|-------------|------------------------|-------------------|------------------|---------------------------------------|
| query latent| hidden states          | [H, r_q]          | [B, T, r_q]      | enters a pair: summed over all heads  |
| query       | rms(query latent)      | [r_q, A (E + P)]  | [B, T, A, E + P] | of its head                           |
| latent      | hidden states          | [H, r]            | [B, T, r]        | enters a pair                         |
| key, value  | rms(latent)            | [r, A (E + V)]    | [B, T, A, E + V] | of its head                           |
| shared key  | hidden states          | [H, P]            | [B, T, P]        | enters branches by no linear: `enter` |

Keys are as wide as queries, E + P, and values are not: inside of attention what is narrower has zeros behind it, which
change no score and no output, so that every kernel and every context takes it.

A head's rotated half is stored as halves and not as pairs (models/rope.py); an import orders columns so (convert.py).

Shapes: B batch, T sequence, H hidden, A local heads, E head width, P rotary width, V value width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.config import Config
from meshwright.families.deepseek.section import DeepSeek
from meshwright.model import Chunk, Costs
from meshwright.models.attention import AttentionCore
from meshwright.models.decoder import KeyValueCache
from meshwright.models.feed_forward import last_initial
from meshwright.models.rope import Rotation, rotate
from meshwright.models.rotary import RotaryBlock, RotaryDecoder, feed_forward_products
from meshwright.models.rotary_section import RotaryTransformer
from meshwright.parameters.shard import Initial
from meshwright.tensor.kit import Kit

LATENT_EPSILON = 1e-6
"""The addend of the latents' norms, whatever the model's others have: the authors' code and transformers' fix it."""


class LatentAttention(nn.Module):
    """Causal self-attention over this rank's heads, whose queries, keys and values are made of latents."""

    def __init__(self, model: DeepSeek, kit: Kit, layer: int) -> None:
        super().__init__()
        self.layer, self.enter = layer, kit.enter
        self.all_heads, self.heads = model.heads, kit.local_heads(model.heads)
        self.head_width, self.rotary_width, self.value_width = model.head_width, model.rotary_width, model.value_width
        initial, hidden, rank = Initial(0.02), model.hidden, model.key_value_rank
        expand, query_width = kit.branches.expand, model.heads * model.query_width
        self.has_query_latent = model.query_rank is not None
        if model.query_rank is not None:
            self.query_latent = kit.linear("transform", hidden, model.query_rank, initial, bias=False)
            self.query_norm = kit.norm(model.query_rank, LATENT_EPSILON, kind="rms")
        self.query = expand(model.query_rank or hidden, query_width, initial, bias=False)
        self.latent = kit.linear("transform", hidden, rank, initial, bias=False)
        self.latent_norm = kit.norm(rank, LATENT_EPSILON, kind="rms")
        self.shared_key = kit.linear("transform", hidden, model.rotary_width, initial, bias=False)
        # The columns are ordered by head, each with its key and its value: an equal cut is one into whole heads.
        self.key_value = expand(rank, model.heads * (model.head_width + model.value_width), initial, bias=False)
        self.core = AttentionCore(kit, model.dropout, model.score_scale)
        self.output = kit.branches.contract(model.heads * model.value_width, hidden, last_initial(model), bias=False)

    def forward(self, h: Tensor, rotation: Rotation, cache: KeyValueCache | None, seen: Tensor | None) -> Tensor:
        source = self.query_norm(self.query_latent(h)) if self.has_query_latent else h
        query = self.query(source).unflatten(-1, (self.heads, -1))  # [B, T, A, E + P]
        plain, turned = query.split((self.head_width, self.rotary_width), -1)
        own, value = (
            self.key_value(self.latent_norm(self.latent(h)))
            .unflatten(-1, (self.heads, -1))
            .split((self.head_width, self.value_width), -1)
        )
        # Turned behind `enter`: a kit may hold a part of its numbers on each rank, and pairs of them are turned.
        shared = self.enter(self.shared_key(h), self.all_heads)  # [B, T, A, P]
        query = torch.cat([plain, _turned(turned, rotation)], -1)
        key = torch.cat([own, _turned(shared, rotation)], -1)
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, A, T, E + P], and [B, A, T, V]
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        causal = query.shape[2] > 1 and seen is None
        assert not causal or key.shape[2] == query.shape[2], "only one token at a time can follow a cache"
        width = max(query.shape[-1], self.value_width)
        wide = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
        attended = self.core(*wide, seen, causal)[..., : self.value_width]
        y: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return y


def _turned(x: Tensor, rotation: Rotation) -> Tensor:
    """x [B, T, A, P], turned by its tokens' rotation."""
    return rotate(x.unsqueeze(2), rotation).squeeze(2)


class DeepSeekModel(RotaryDecoder):
    """Tokens to a loss."""

    def __init__(self, model: DeepSeek, kit: Kit, chunk: Chunk | None = None) -> None:
        super().__init__(model, kit, chunk, model.rotary_width)

    def make_block(self, model: RotaryTransformer, kit: Kit, layer: int) -> nn.Module:
        assert isinstance(model, DeepSeek), model
        return RotaryBlock(model, kit, LatentAttention(model, kit, layer), has_experts=model.has_experts(layer))

    @staticmethod
    def products(config: Config) -> Costs:
        """Attention counts whole, though it is causal."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, DeepSeek), model
        attention = attention_products(model) + sequence * model.heads * (model.query_width + model.value_width)
        layers = tuple(sequence * (attention + products) for products in feed_forward_products(model))
        return Costs(0, layers, sequence * model.padded_vocabulary * model.hidden)


def attention_products(model: DeepSeek) -> int:
    """Multiplications of a token by the weights of a layer's attention."""
    hidden, queries, rank = model.hidden, model.heads * model.query_width, model.key_value_rank
    of_queries = hidden * queries if model.query_rank is None else model.query_rank * (hidden + queries)
    of_keys = hidden * (rank + model.rotary_width) + rank * model.heads * (model.head_width + model.value_width)
    return of_queries + of_keys + model.heads * model.value_width * hidden
