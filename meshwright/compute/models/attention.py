"""Attention over a rank's heads, without linears; the block of GPT-2, BERT and ViT: self-attention and a GELU
feed-forward."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.models.chain import RunsInContext
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.fused import UsesFused
from meshwright.compute.tensor.gelu import gelu
from meshwright.compute.tensor.islands import UsesIslands
from meshwright.compute.tensor.kit import Kit
from meshwright.compute.tensor.whole_vectors import InWholeVectors, in_whole_vectors

if TYPE_CHECKING:
    from meshwright.compute.models.decoder import KeyValueCache
    from meshwright.compute.models.section import Transformer


def split_heads(x: Tensor, heads: int) -> tuple[Tensor, ...]:
    """Split [B, T, G, N/G] into G tensors [B, A, T, E].

    By `unbind`, since the gradient is then one stack; each `select` would have a gradient as large as x.
    """
    return tuple(group.transpose(1, 2) for group in x.unflatten(-1, (heads, -1)).unbind(2))


class AttentionCore(RunsInContext):
    """Attention by a layer's spec, without parameters; cheap to recompute."""

    def __init__(self, kit: Kit, spec: AttentionSpec) -> None:
        """Make the core; `spec` has no tensors, and the dropout of training."""
        super().__init__()
        self.spec = spec
        self.own_randomness = kit.own_randomness

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *, documents: Tensor | None = None, seen: Tensor | None = None,
        bias: Tensor | None = None, sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Attend; further tensors are fields of AttentionSpec.

        Args:
            query: [B, A, T, E].
            key, value: [B, A, S, E].
            documents, seen: As in AttentionSpec.
            bias: A causal layer's bias also hides later tokens.
            sinks: Of this rank's heads (`kit.local`).

        Returns:
            [B, A, T, E].
        """
        base, follows = self.spec, self.spec.causal and key.shape[2] > query.shape[2]
        # The kernels' causal mask has no offset for several queries after a cache. A single query attends to the whole
        # cache, which holds no keys outside of the window.
        assert not follows or query.shape[2] == 1, "only one token at a time can follow a cache"
        assert not follows or base.window is None or key.shape[2] <= base.window, "a cache keeps a window's keys"
        causal, window = base.causal and bias is None and not follows, None if follows else base.window
        dropout = base.dropout if self.training else 0.0
        spec = AttentionSpec(causal, window, base.scale, dropout, documents, seen, bias, base.soft_cap, sinks)
        # With `recompute: selective`, `run` keeps only the arguments and recomputes the scores in the backward pass.
        attended: Tensor = self.run(self._attend, query, key, value, spec)
        return attended

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec) -> Tensor:
        """Attend in this rank's context, with the rank's own random numbers."""
        # Ranks have different heads of one batch; a common random stream would drop the same weights of all heads.
        with self.own_randomness(spec.dropout):
            return self.context.attend(query, key, value, spec.in_dtype(query.dtype))


class SelfAttention(nn.Module, UsesFused):
    """Self-attention over a rank's heads. `causal`: tokens do not attend to later ones; `last`: initial values of the
    output linear."""

    def __init__(self, model: Transformer, kit: Kit, layer: int, last: Initial, *, causal: bool) -> None:
        super().__init__()
        self.layer = layer
        self.heads = kit.local_heads(model.heads)
        self.core = AttentionCore(kit, AttentionSpec(causal, dropout=model.dropout))
        self.query_key_value = kit.branches.expand(model.hidden, 3 * model.hidden, Initial(0.02), groups=3)
        self.output = kit.branches.contract(model.hidden, model.hidden, last)

    def forward(
        self, h: Tensor, seen: Tensor | None, documents: Tensor | None, cache: KeyValueCache | None
    ) -> Tensor:  # fmt: skip
        fused = self.fused if torch.compiler.is_compiling() else None
        split = split_heads if fused is None else fused.heads
        query, key, value = split(self.query_key_value(h), self.heads)  # [B, A, T, E]
        if cache is not None:
            key, value = cache.extend(self.layer, key, value, self.core.spec.window)
        attended = self.core(query, key, value, seen=seen, documents=documents)
        return self.output(attended.transpose(1, 2).flatten(2))


class GeluFeedForward(nn.Module, UsesIslands, UsesFused, InWholeVectors):
    """Two linears with GELU between: exact, or GPT-2's `tanh` approximation."""

    def __init__(self, model: Transformer, kit: Kit, last: Initial, *, tanh: bool) -> None:
        super().__init__()
        self.tanh = tanh
        self.expand = kit.expand(model.hidden, model.inner, Initial(0.02))
        self.contract = kit.contract(model.inner, model.hidden, last)

    def forward(self, h: Tensor) -> Tensor:
        inside, activate = self.expand(h), partial(gelu, islands=self.islands) if self.tanh else F.gelu
        if self.fused is not None and torch.compiler.is_compiling():
            activate = partial(self.fused.gelu, self.tanh)
        return self.contract(in_whole_vectors(activate, inside) if self.padded else activate(inside))


class Block(nn.Module):
    """h + attention(norm(h)), then h + feed_forward(norm(h)); or without `norm_first` norm(h + attention(h)), then
    norm(h + feed_forward(h))."""

    def __init__(
        self, model: Transformer, kit: Kit, layer: int, last: Initial, *, causal: bool = False, tanh: bool = False,
        norm_first: bool = True, last_bias: bool = True,
    ) -> None:  # fmt: skip
        """Make the block. `last`: initial values of the two output linears; `last_bias`: whether the feed-forward's
        norm has a bias."""
        super().__init__()
        self.norm_first = norm_first
        self.attention_norm = kit.norm(model.hidden, model.norm_epsilon)
        self.attention = SelfAttention(model, kit, layer, last, causal=causal)
        self.feed_forward_norm = kit.norm(model.hidden, model.norm_epsilon, bias=last_bias)
        self.feed_forward = GeluFeedForward(model, kit, last, tanh=tanh)
        self.dropout = nn.Dropout(model.dropout)

    def forward(
        self, h: Tensor, *, seen: Tensor | None = None, documents: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> Tensor:  # fmt: skip
        """Run the block on h [B, T, H]; `seen`, `documents`: fields of AttentionSpec."""
        if self.norm_first:
            h = h + self.dropout(self.attention(self.attention_norm(h), seen, documents, cache))
            return h + self.dropout(self.feed_forward(self.feed_forward_norm(h)))
        h = self.attention_norm(h + self.dropout(self.attention(h, seen, documents, cache)))
        normed: Tensor = self.feed_forward_norm(h + self.dropout(self.feed_forward(h)))
        return normed
