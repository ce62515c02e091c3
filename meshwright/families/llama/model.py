"""Llama (Touvron et al., arXiv 2302.13971, 2307.09288) and those made like it: Qwen2, Qwen3, Mistral, SmolLM, Mixtral.

A decoder with RMS norms at the input of each sub-layer, rotary positions (rope.py), SwiGLU, and K key-value heads, to
each of which G queries attend (grouped queries, Ainslie et al., arXiv 2305.13245). One linear makes queries, keys and
values: its columns are ordered by key-value head, each with its G queries, its key and its value, [H, K (G + 2) E]. So
a cut of the columns into equal runs gives each rank whole key-value heads with their queries.

Feed-forwards may be of experts (tensor/experts.py). What passes from layer to layer then has the balances' sum over
layers [B] beside the hidden states, where these are a part of the loss.

Shapes: B batch, T sequence, H hidden, K local key-value heads, G queries of each, E head width, N inner width.
"""

from __future__ import annotations

import math
from typing import cast

import torch
from torch import Tensor, nn

from meshwright.config import Config
from meshwright.families.llama.rope import Rotation, rotate, rotation_of
from meshwright.families.llama.section import Llama
from meshwright.model import SAMPLES, Batch, Chunk, Costs, Hidden, Scales
from meshwright.models.attention import AttentionCore
from meshwright.models.chain import blocks_of
from meshwright.models.decoder import Decoder, KeyValueCache
from meshwright.parameters.shard import Initial
from meshwright.tensor.copies import HeadGroups
from meshwright.tensor.experts import ExpertsShape
from meshwright.tensor.head import HeadShape
from meshwright.tensor.kit import ExpertsKit, Kit
from meshwright.tensor.swiglu import swiglu


class LlamaAttention(nn.Module):
    """Causal self-attention over this rank's key-value heads and their queries."""

    def __init__(self, model: Llama, kit: Kit, layer: int) -> None:
        super().__init__()
        self.layer = layer
        groups = HeadGroups(model.num_key_value_heads, model.members_of_branch, model.width_of_head)
        # More ranks than key-value heads: several ranks share one, each with some of its queries (tensor/copies.py).
        count = max(kit.local_heads(groups.count), kit.parts)
        self.queries = kit.local_heads(model.heads) // count
        self.parts = (count, self.queries + 2, groups.width)
        self.core = AttentionCore(kit, model.dropout)
        width = model.heads * groups.width
        initial, last = Initial(0.02), Initial(0.02 / math.sqrt(2 * model.layers))
        biased = "query-key-value" in model.biases
        self.query_key_value = kit.branches.expand(model.hidden, groups.columns, initial, bias=biased, heads=groups)
        if model.head_norms:
            self.query_norm = kit.norm(model.width_of_head, model.norm_epsilon, kind="rms", inside=True)
            self.key_norm = kit.norm(model.width_of_head, model.norm_epsilon, kind="rms", inside=True)
        self.head_norms = model.head_norms
        self.output = kit.branches.contract(width, model.hidden, last, bias="output" in model.biases)

    def forward(self, h: Tensor, rotation: Rotation, cache: KeyValueCache | None, seen: Tensor | None) -> Tensor:
        heads = self.query_key_value(h).unflatten(-1, self.parts)  # [B, T, K, G + 2, E]
        query, key, value = heads.split((self.queries, 1, 1), 3)
        if self.head_norms:
            # Before the rotation, as Qwen3 has it: the norm's weight, an element's each, does not commute with it.
            query, key = self.query_norm(query), self.key_norm(key)
        query, key, value = (
            part.flatten(2, 3).transpose(1, 2) for part in (rotate(query, rotation), rotate(key, rotation), value)
        )  # [B, K G, T, E], twice [B, K, T, E]
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        causal = query.shape[2] > 1 and seen is None
        assert not causal or key.shape[2] == query.shape[2], "only one token at a time can follow a cache"
        return self.output(self.core(query, key, value, seen, causal).transpose(1, 2).flatten(2))


class LlamaFeedForward(nn.Module):
    """contract(silu(gate) · up), both of one linear."""

    def __init__(self, model: Llama, kit: Kit) -> None:
        super().__init__()
        biased, last = "feed-forward" in model.biases, Initial(0.02 / math.sqrt(2 * model.layers))
        self.expand = kit.expand(model.hidden, 2 * model.inner, Initial(0.02), groups=2, bias=biased)
        self.contract = kit.contract(model.inner, model.hidden, last, bias=biased)

    def forward(self, h: Tensor) -> Tensor:
        return self.contract(swiglu(self.expand(h)))


def experts_of(model: Llama, kit: Kit) -> nn.Module:
    """A feed-forward of experts."""
    experts, last = model.experts, Initial(0.02 / math.sqrt(2 * model.layers))
    assert experts is not None, "a model without experts"
    return cast(ExpertsKit, kit).experts(
        ExpertsShape(
            model.hidden, model.inner, experts.count, experts.per_token, experts.renormalise, experts.balance > 0,
            experts.capacity, Initial(0.02), last,
        )
    )  # fmt: skip


class LlamaBlock(nn.Module):
    """h + attention(norm(h)), then h + feed_forward(norm(h))."""

    def __init__(self, model: Llama, kit: Kit, layer: int) -> None:
        super().__init__()
        self.attention_norm = kit.norm(model.hidden, model.norm_epsilon, kind="rms")
        self.attention = LlamaAttention(model, kit, layer)
        self.feed_forward_norm = kit.norm(model.hidden, model.norm_epsilon, kind="rms")
        self.has_experts = model.experts is not None
        self.feed_forward = experts_of(model, kit) if self.has_experts else LlamaFeedForward(model, kit)
        self.dropout = nn.Dropout(model.dropout)

    def forward(
        self, hidden: Hidden, rotation: Rotation, cache: KeyValueCache | None = None, seen: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Hidden:  # fmt: skip
        """([B, T, H],), or with the balances so far ([B, T, H], [B]), to the same."""
        h, *balances = hidden
        h = h + self.dropout(self.attention(self.attention_norm(h), rotation, cache, seen))
        normed = self.feed_forward_norm(h)
        if not self.has_experts:
            return (h + self.dropout(self.feed_forward(normed)),)
        y, *own = self.feed_forward(normed, places)
        return h + self.dropout(y), *(total + one for total, one in zip(balances, own, strict=True))


class LlamaModel(Decoder):
    """Tokens to a loss."""

    def __init__(self, model: Llama, kit: Kit, chunk: Chunk | None = None) -> None:
        super().__init__(chunk or Chunk.whole(model.layers))
        self.rope, self.head_width = model.rope, model.width_of_head
        # The mean over layers: what passes on is their sum.
        self.balance = model.experts.balance / model.layers if model.experts is not None else 0.0
        """The factor of the balances' sum in the loss."""
        hidden, initial = model.hidden, Initial(0.02)
        if self.chunk.first or (self.chunk.last and model.tied):
            self.tokens = kit.embedding(model.padded_vocabulary, hidden, initial)
        if self.chunk.first:
            self.dropout = nn.Dropout(model.dropout)
        self.blocks = blocks_of(self.chunk, lambda layer: LlamaBlock(model, kit, layer))
        if self.chunk.last:
            self.norm = kit.norm(hidden, model.norm_epsilon, kind="rms")
            tied = self.tokens if model.tied else None
            shape = HeadShape(hidden, model.vocabulary, model.padded_vocabulary, initial)
            self.head = kit.head_loss(shape, tied)

    def embed(self, batch: Batch) -> Hidden:
        return self._embedded(batch["tokens"])

    def _embedded(self, tokens: Tensor) -> Hidden:
        h = self.dropout(self.tokens(tokens))
        if not self.balance:
            return (h,)
        # A sum over layers of numbers near one, of which half precision would lose digits. It requires a gradient,
        # since a stage is asked for the gradient of all that it was given.
        wide = torch.promote_types(h.dtype, torch.float32)
        return h, torch.zeros(tokens.shape[0], dtype=wide, device=h.device, requires_grad=True)

    def run_layers(self, hidden: Hidden, batch: Batch, chunk: Chunk) -> Hidden:
        """The rotation is computed once, and goes through the layers with the batch."""
        tokens = batch["tokens"]
        places = self.context.positions(0, tokens.shape[1], tokens.device)
        # Once a microbatch and not once a layer.
        rotation = self._rotation(places, batch.get("documents"))
        return super().run_layers(hidden, batch | rotation._asdict() | {"places": places}, chunk)

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        rotation = Rotation(batch["cosines"], batch["sines"])
        passing: Hidden = block(hidden, rotation, None, batch.get("seen"), batch["places"])
        return passing

    def final_states(self, hidden: Hidden) -> Tensor:
        return super().final_states(hidden[:1])

    def with_layers_losses(self, loss: Tensor, hidden: Hidden, scales: Scales) -> Tensor:
        # The balance is a mean over sequences, so its scale counts samples and not tokens.
        return loss + hidden[1].sum() * (self.balance * scales[SAMPLES]) if self.balance else loss

    def hidden(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        start = cache.num_tokens if cache is not None else 0
        rotation = self._rotation(self.context.positions(start, tokens.shape[1], tokens.device))
        hidden = self._embedded(tokens)
        for block in self.blocks.values():
            hidden = block(hidden, rotation, cache)
        return self.final_states(hidden)

    def _rotation(self, positions: Tensor, documents: Tensor | None = None) -> Rotation:
        """The rotation of tokens at these places of every sequence.

        documents [B, T]: where in whole sequences each token's document begins; there positions are 0.
        """
        return rotation_of(
            self.rope, self.head_width, positions if documents is None else positions - documents[:, positions]
        )

    @staticmethod
    def products(config: Config) -> Costs:
        """Attention counts whole, though it is causal; of experts those that a token takes, and the router."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, Llama), model
        width, pairs = model.heads * model.width_of_head, 2 * model.num_key_value_heads * model.width_of_head
        experts = model.experts
        taken, scores = (1, 0) if experts is None else (experts.per_token, experts.count)
        # 2 width: queries and the output; pairs: keys and values; 3 N: gate, up and down of each expert taken; scores:
        # the router.
        weights = model.hidden * (2 * width + pairs + 3 * taken * model.inner + scores)
        layer = sequence * (weights + 2 * sequence * width)
        return Costs(0, (layer,) * model.layers, sequence * model.padded_vocabulary * model.hidden)
