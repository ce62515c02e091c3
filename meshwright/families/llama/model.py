"""Llama (Touvron et al., arXiv 2302.13971, 2307.09288) and similar decoders: Qwen2, Qwen3, Mistral, SmolLM, Mixtral.

A decoder with RMS norms at the input of each sub-layer, rotary positions (rope.py), SwiGLU, and K key-value heads with
G queries each (grouped queries, Ainslie et al., arXiv 2305.13245). One linear makes queries, keys and values. The
columns are ordered by key-value head: G queries, a key and a value for each head, [H, K (G + 2) E]. Equal slices of the
columns then give each tensor-parallel rank whole key-value heads with all queries of these heads.

With `has_sinks` (gpt-oss) a head has one logit more in its softmax, without a value: a parameter [A], cut as queries.

Shapes: B batch, T sequence, H hidden, K local key-value heads, G queries of each, E head width, N inner width.
"""

from __future__ import annotations

from torch import Tensor, nn

from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.model import Chunk, Costs
from meshwright.compute.models.attention import AttentionCore
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.compute.models.feed_forward import last_initial
from meshwright.compute.models.rope import Rotation, rotate
from meshwright.compute.models.rotary import RotaryBlock, RotaryDecoder, feed_forward_products
from meshwright.compute.parameters.role import BIAS
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.copies import HeadGroups
from meshwright.compute.tensor.kit import Kit
from meshwright.config import Config
from meshwright.families.llama.section import Llama


class LlamaAttention(nn.Module):
    """Causal self-attention over this rank's key-value heads and the queries of these heads."""

    def __init__(self, model: Llama, kit: Kit, layer: int) -> None:
        super().__init__()
        self.layer, self.rotates = layer, model.rotates(layer)
        groups = HeadGroups(model.num_key_value_heads, model.heads // model.num_key_value_heads, model.width_of_head)
        # With more ranks than key-value heads, several ranks copy one head and split its queries (tensor/copies.py).
        count = max(kit.local_heads(groups.count), kit.parts)
        self.queries = kit.local_heads(model.heads) // count
        self.parts = (count, self.queries + 2, groups.width)
        self.core = AttentionCore(
            kit,
            AttentionSpec(True, model.window_of(layer), model.score_scale, model.dropout, soft_cap=model.score_bound),
        )
        self.sinks = kit.local((model.heads,), 0, Initial(0.02), BIAS, by_run=True) if model.has_sinks else None
        width = model.heads * groups.width
        initial, last = Initial(0.02), last_initial(model)
        biased = "query-key-value" in model.biases
        self.query_key_value = kit.branches.expand(model.hidden, groups.columns, initial, bias=biased, heads=groups)
        if model.head_norms:
            self.query_norm, self.key_norm = (
                kit.norm(model.width_of_head, model.norm_epsilon, kind=model.norm_kind, inside=True) for _ in range(2)
            )
        elif model.whole_norms:
            widths = width, groups.count * groups.width
            self.query_norm, self.key_norm = (
                kit.norm(all_heads, model.norm_epsilon, kind=model.norm_kind, inside=True, over_heads=True)
                for all_heads in widths
            )
        self.head_norms, self.whole_norms = model.head_norms, model.whole_norms
        self.output = kit.branches.contract(width, model.hidden, last, bias="output" in model.biases)

    def forward(self, h: Tensor, rotation: Rotation, cache: KeyValueCache | None, documents: Tensor | None) -> Tensor:
        heads = self.query_key_value(h).unflatten(-1, self.parts)  # [B, T, K, G + 2, E]
        query, key, value = heads.split((self.queries, 1, 1), 3)
        if self.head_norms:
            # Qwen3 norms before the rotation, which does not commute with the norm's element-wise weight.
            query, key = self.query_norm(query), self.key_norm(key)
        elif self.whole_norms:
            query, key = (
                norm(x.flatten(2)).view(x.shape) for norm, x in ((self.query_norm, query), (self.key_norm, key))
            )
        if self.rotates:
            query, key = rotate(query, rotation), rotate(key, rotation)
        query, key, value = (
            x.flatten(2, 3).transpose(1, 2) for x in (query, key, value)
        )  # [B, K G, T, E], twice [B, K, T, E]
        if cache is not None:
            key, value = cache.extend(self.layer, key, value, self.core.spec.window)
        sinks = None if self.sinks is None else self.sinks()
        return self.output(self.core(query, key, value, documents=documents, sinks=sinks).transpose(1, 2).flatten(2))


class LlamaModel(RotaryDecoder):
    """Llama from tokens to a loss."""

    def __init__(self, model: Llama, kit: Kit, chunk: Chunk | None = None) -> None:
        biased = "feed-forward" in model.biases
        super().__init__(
            model, kit, chunk, model.width_of_head,
            lambda layer: RotaryBlock(
                model, kit, LlamaAttention(model, kit, layer), has_experts=model.has_experts(layer), bias=biased,
                norms=model.norms, rope=model.rope_of(layer),
            ),
        )  # fmt: skip

    @staticmethod
    def products(config: Config) -> Costs:
        """Count multiplications. A token's keys are all of a window, or of the sequence as if no score were masked."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, Llama), model
        width, pairs = model.heads * model.width_of_head, 2 * model.num_key_value_heads * model.width_of_head
        # 2 width: queries and the output; pairs: keys and values.
        weights = model.hidden * (2 * width + pairs)
        layers = tuple(
            sequence * (weights + products + 2 * min(sequence, model.window_of(layer) or sequence) * width)
            for layer, products in enumerate(feed_forward_products(model))
        )
        return Costs(0, layers, sequence * model.padded_vocabulary * model.hidden)
