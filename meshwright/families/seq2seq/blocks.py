"""The blocks of an encoder-decoder, and the cache of keys and values of earlier tokens.

| block   | sub-layers                                 | `norm_first`: T5       | else: Vaswani et al.   |
|---------|--------------------------------------------|------------------------|------------------------|
| encoder | self-attention, feed-forward               | h + sub_layer(norm(h)) | norm(h + sub_layer(h)) |
| decoder | causal self-attention, cross, feed-forward | h + sub_layer(norm(h)) | norm(h + sub_layer(h)) |

With `norm_first` the last sum is normed too: the encoder's in the last block, the decoder's before the head.
Shapes: B batch, S source, T target, H hidden, A local heads, E head width, N inner width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.model import Chunk
from meshwright.compute.models.attention import AttentionCore, split_heads
from meshwright.compute.models.chain import blocks_of
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.dropout import InnerDropout
from meshwright.compute.tensor.kit import Kit
from meshwright.families.seq2seq.section import EncoderDecoder

KeyValue = tuple[Tensor, Tensor]
"""[B, A, n, E] each."""


@dataclass(frozen=True)
class Initials:
    """Initial values of a block's linears: two of self-attention, three of cross-attention, two of the feed-forward."""

    query_key_value: Initial
    output: Initial
    query: Initial
    key_value: Initial
    cross_output: Initial
    expand: Initial
    contract: Initial


@dataclass(frozen=True)
class Recipe:
    """The differences between the blocks of two families.

    width: the width of all heads together.
    norm_first: True for norms at the input of sub-layers (table above).
    bias: True if linears have biases.
    scale: the factor on attention's scores; None: 1/√E.
    inner_dropout: the dropout on attention's weights and inside of feed-forwards.
    """

    model: EncoderDecoder
    width: int
    norm: Callable[[], nn.Module]
    norm_first: bool
    bias: bool
    scale: float | None
    inner_dropout: float
    initials: Initials


@dataclass
class DecoderCache:
    """Keys and values of the target's tokens so far, and of the source, each with one pair for each block."""

    target: KeyValueCache = field(default_factory=KeyValueCache)
    source: list[KeyValue] = field(default_factory=list)

    def select(self, rows: Tensor) -> None:
        """Keep these rows [n] of the batch, in this order, with repetitions."""
        # Beam search keeps several continuations of one hypothesis, and drops others.
        self.target.select(rows)
        self.source = [(key[rows], value[rows]) for key, value in self.source]


class SelfAttention(nn.Module):
    """Self-attention over this rank's heads."""

    def __init__(self, recipe: Recipe, kit: Kit, *, causal: bool) -> None:
        super().__init__()
        hidden, width, initials = recipe.model.hidden, recipe.width, recipe.initials
        self.heads = kit.local_heads(recipe.model.heads)
        self.core = AttentionCore(kit, AttentionSpec(causal, scale=recipe.scale, dropout=recipe.inner_dropout))
        self.query_key_value = kit.branches.expand(
            hidden, 3 * width, initials.query_key_value, groups=3, bias=recipe.bias
        )
        self.output = kit.branches.contract(width, hidden, initials.output, bias=recipe.bias)

    def forward(
        self, h: Tensor, seen: Tensor | None, bias: Tensor | None, keep: Callable[[Tensor, Tensor], KeyValue] | None
    ) -> Tensor:
        """Attend. `keep`: appends keys and values to a cache, and returns the keys and values of all tokens so far."""
        query, key, value = split_heads(self.query_key_value(h), self.heads)  # [B, A, T, E]
        if keep is not None:
            key, value = keep(key, value)
        # A target's bias has causality in it (target_bias).
        return self.output(self.core(query, key, value, seen=seen, bias=bias).transpose(1, 2).flatten(2))


class CrossAttention(nn.Module):
    """Attention of the target's queries to the memory's keys and values, over this rank's heads."""

    def __init__(self, recipe: Recipe, kit: Kit, index: int) -> None:
        super().__init__()
        hidden, width, initials = recipe.model.hidden, recipe.width, recipe.initials
        self.index = index
        self.heads = kit.local_heads(recipe.model.heads)
        self.core = AttentionCore(kit, AttentionSpec(scale=recipe.scale, dropout=recipe.inner_dropout))
        self.query = kit.branches.expand(hidden, width, initials.query, bias=recipe.bias)
        self.key_value = kit.branches.expand(hidden, 2 * width, initials.key_value, groups=2, bias=recipe.bias)
        self.output = kit.branches.contract(width, hidden, initials.cross_output, bias=recipe.bias)

    def forward(self, h: Tensor, memory: Tensor, seen: Tensor, source_cache: list[KeyValue] | None) -> Tensor:
        """Attend. `source_cache`: keys and values of the source; on the first call this block appends a pair."""
        # split_heads needs a dim of groups; there is one group here.
        (query,) = split_heads(self.query(h).unsqueeze(2), self.heads)  # [B, A, T, E]
        # Keys and values of the source do not change from token to token: computed once.
        if source_cache is not None and self.index < len(source_cache):
            key, value = source_cache[self.index]
        else:
            key, value = split_heads(self.key_value(memory), self.heads)  # [B, A, S, E]
            if source_cache is not None:
                source_cache.append((key, value))
        return self.output(self.core(query, key, value, seen=seen).transpose(1, 2).flatten(2))


class CoderFeedForward(nn.Module):
    """Two linears with a ReLU between them."""

    def __init__(self, recipe: Recipe, kit: Kit) -> None:
        super().__init__()
        model, initials = recipe.model, recipe.initials
        self.inner_dropout = InnerDropout(kit, recipe.inner_dropout)
        self.expand = kit.expand(model.hidden, model.inner, initials.expand, bias=recipe.bias)
        self.contract = kit.contract(model.inner, model.hidden, initials.contract, bias=recipe.bias)

    def forward(self, h: Tensor) -> Tensor:
        return self.contract(self.inner_dropout(F.relu(self.expand(h))))


class CoderBlock(nn.Module):
    """Base of the encoder's and the decoder's blocks: self-attention, and a norm before or after each sub-layer."""

    def __init__(self, recipe: Recipe, kit: Kit, *, causal: bool) -> None:
        super().__init__()
        self.norm_first = recipe.norm_first
        self.dropout = nn.Dropout(recipe.model.dropout)
        self.attention_norm = recipe.norm()
        self.attention = SelfAttention(recipe, kit, causal=causal)

    def add(self, h: Tensor, norm: nn.Module, sub_layer: Callable[[Tensor], Tensor]) -> Tensor:
        """Add a sub-layer's output to h, with the norm before the sub-layer or after the sum."""
        if self.norm_first:
            return h + self.dropout(sub_layer(norm(h)))
        normed: Tensor = norm(h + self.dropout(sub_layer(h)))
        return normed


class EncoderBlock(CoderBlock):
    """A block of the encoder. The `last` one returns the memory."""

    def __init__(self, recipe: Recipe, kit: Kit, last: bool) -> None:
        super().__init__(recipe, kit, causal=False)
        self.feed_forward_norm = recipe.norm()
        self.feed_forward = CoderFeedForward(recipe, kit)
        # With `norm_first` the last sum has not been normed yet; else the memory is already normed.
        self.final_norm = recipe.norm() if last and recipe.norm_first else None

    def forward(self, h: Tensor, seen: Tensor, bias: Tensor | None = None) -> Tensor:
        """Run the block: [B, S, H] -> [B, S, H]."""
        h = self.add(h, self.attention_norm, lambda x: self.attention(x, seen, bias, None))
        h = self.add(h, self.feed_forward_norm, self.feed_forward)
        return h if self.final_norm is None else self.dropout(self.final_norm(h))


class DecoderBlock(CoderBlock):
    """A block of the decoder. `index`: the number among the decoder's blocks."""

    def __init__(self, recipe: Recipe, kit: Kit, index: int) -> None:
        super().__init__(recipe, kit, causal=True)
        self.index = index
        self.cross_norm = recipe.norm()
        self.cross = CrossAttention(recipe, kit, index)
        self.feed_forward_norm = recipe.norm()
        self.feed_forward = CoderFeedForward(recipe, kit)

    def forward(
        self, h: Tensor, memory: Tensor, seen: Tensor, bias: Tensor | None = None, cache: DecoderCache | None = None
    ) -> Tensor:
        """Run the block: [B, T, H] -> [B, T, H], with memory [B, S, H]."""
        keep = None if cache is None else partial(cache.target.extend, self.index)
        source_cache = None if cache is None else cache.source
        h = self.add(h, self.attention_norm, lambda x: self.attention(x, None, bias, keep))
        h = self.add(h, self.cross_norm, lambda x: self.cross(x, memory, seen, source_cache))
        return self.add(h, self.feed_forward_norm, self.feed_forward)


def encoder_decoder_blocks(recipe: Recipe, kit: Kit, chunk: Chunk) -> nn.ModuleDict:
    """Build the chunk's blocks: of all blocks, the first half encode and the others decode."""
    half = recipe.model.layers
    # One chain for both halves, so that a pipeline may cut anywhere.
    return blocks_of(
        chunk,
        lambda layer: (
            EncoderBlock(recipe, kit, layer == half - 1) if layer < half else DecoderBlock(recipe, kit, layer - half)
        ),
    )
