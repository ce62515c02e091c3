"""Qwen3-Next (Qwen team, 2025), and the text models of Qwen3.5: Llama's chain with gated delta nets in most layers.

A gated delta net (Yang et al., arXiv 2412.06464; compute/models/delta_rule.py) has K key heads with r value heads each.
One linear makes the columns of all heads, ordered by key head, so that an equal cut gives ranks whole key heads:

| columns of a key head | width     | then                                                               |
|-----------------------|-----------|--------------------------------------------------------------------|
| query, key, value     | 2 E + r F | convolved over the last W tokens, SiLU; query and key: unit length |
| gate z                | r F       | output · silu(z), after an RMS norm of each value head             |
| b, a                  | r, r      | β = sigmoid(b), g = -exp(logarithm) · softplus(a + offset)         |

Attention has a gate for each number of its output, sigmoid(gate), from the linear of queries, keys and values. A head's
first numbers alone are turned by positions. RMS norms of heads and of the chain have weights around one.

If ranks hold parts of sequences, a delta net sends [B, W - 1, columns] of each part's last tokens, and the transition
[B, A, E, F + E] of each part's states; ranks do not wait for each other's tokens. A cache holds the last W - 1 tokens'
columns and the states.

Shapes: B batch, T sequence, H hidden, K local key heads, A = K r local value heads, E key width, F value width.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.context.spec import AttentionSpec
from meshwright.compute.model import Chunk, Costs, to_device
from meshwright.compute.models.attention import AttentionCore
from meshwright.compute.models.chain import RunsInContext
from meshwright.compute.models.decoder import KeyValueCache
from meshwright.compute.models.delta_rule import (
    CHUNK,
    causal_convolution,
    chunked_delta_rule,
    fla_takes,
    fused_delta_rule,
    states_before,
    transition,
    unit,
)
from meshwright.compute.models.feed_forward import last_initial
from meshwright.compute.models.rope import Rotation, rotate
from meshwright.compute.models.rotary import RotaryBlock, RotaryDecoder, feed_forward_products
from meshwright.compute.parameters.role import DECAY, TAPS
from meshwright.compute.parameters.shard import ONES, Initial
from meshwright.compute.tensor.copies import HeadGroups
from meshwright.compute.tensor.kit import Kit
from meshwright.compute.tensor.linear import autocast_device
from meshwright.config import Config
from meshwright.families.qwen_next.section import QwenNext


class DeltaCore(RunsInContext):
    """The convolution and the gated delta rule over this rank's heads and tokens, cheap to recompute."""

    def __init__(self, model: QwenNext, heads: int) -> None:
        """Make the core. `heads`: key heads of this rank."""
        super().__init__()
        self.heads, self.values = heads, model.linear_value_heads // model.linear_key_heads
        self.widths = model.linear_key_width, model.linear_value_width
        self.past = model.convolution - 1
        """Tokens before a token that the convolution reads."""

    def forward(
        self, mixed: Tensor, rates: Tensor, taps: Tensor, logarithms: Tensor, offsets: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Mix the tokens of whole sequences.

        Args:
            mixed: queries, keys and values [B, t, K (2 E + r F)] of this rank's tokens.
            rates: b and a, [B, t, K, 2 r].
            taps: [W, K (2 E + r F)].
            logarithms: of the decays' factors, [A].
            offsets: [A].
            documents: int64 [B, T] of whole sequences: the position of the first token of each token's document.

        Returns:
            [B, t, A, F], in float32 or wider.
        """
        out: Tensor = self.run(self.mix, mixed, rates, taps, logarithms, offsets, documents)
        return out

    def mix(
        self, mixed: Tensor, rates: Tensor, taps: Tensor, logarithms: Tensor, offsets: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Compute `forward`: pass on states between runs of tokens on one or several ranks."""
        length = mixed.shape[1] * self.context.size
        runs, starts = self.context.runs(length), None
        if documents is not None and (documents.is_meta or documents[:, -1].any()):
            of_runs = torch.cat([documents[:, run.start : run.stop] - run.start for run in runs])
            starts = to_device({"starts": of_runs}, mixed.device)["starts"]
        if self.context.size == 1:
            before, state = self.nothing(mixed)
            return self.follow(mixed, rates, taps, logarithms, offsets, before, state, starts)[0]
        # In a ring a rank holds several runs of a sequence: each is a row of its own, [runs B, t, ...].
        mixed, rates = (torch.cat(x.chunk(len(runs), 1)) for x in (mixed, rates))
        tails, local_runs = self.context.in_order(mixed[:, -self.past :].unflatten(0, (len(runs), -1)), length)
        before = torch.cat([torch.zeros_like(tails[:1]), tails[:-1]])[local_runs].flatten(0, 1)
        with torch.autocast(autocast_device(mixed.device), enabled=False):
            inputs = self.inputs(mixed, rates, taps, logarithms, offsets, before, starts)
            out, reads, after = transition(*inputs, starts)
            transitions, local_runs = self.context.in_order(after.unflatten(0, (len(runs), -1)), length)
            out = out + reads @ states_before(transitions, self.widths[1])[local_runs].flatten(0, 1)
        return torch.cat(out.chunk(len(runs)), 2).transpose(1, 2)

    def shaped(self, function: Callable[..., Any], *inputs: Any) -> Tensor:
        """Return a tensor [B, t, A, F] without values."""
        mixed: Tensor = inputs[0]
        wide = torch.promote_types(mixed.dtype, torch.float32)
        return mixed.new_empty(*mixed.shape[:2], self.heads * self.values, self.widths[1], dtype=wide)

    def nothing(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and the state before a sequence: zeros [B, W - 1, K (2 E + r F)] and [B, A, E, F]."""
        wide = torch.promote_types(mixed.dtype, torch.float32)
        heads = self.heads * self.values
        return mixed.new_zeros(len(mixed), self.past, mixed.shape[2]), mixed.new_zeros(
            len(mixed), heads, *self.widths, dtype=wide
        )

    def follow(
        self, mixed: Tensor, rates: Tensor, taps: Tensor, logarithms: Tensor, offsets: Tensor, before: Tensor,
        state: Tensor, starts: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Mix tokens that follow others.

        Args:
            mixed, rates, taps, logarithms, offsets: As in `forward`.
            before: The last W - 1 rows of `mixed` before these tokens.
            state: [B, A, E, F] before these tokens.
            starts: As in `chunked_delta_rule`.

        Returns:
            [B, t, A, F], and the state after these tokens.
        """
        with torch.autocast(autocast_device(mixed.device), enabled=False):
            query, key, value, decay, rate = self.inputs(mixed, rates, taps, logarithms, offsets, before, starts)
            if fla_takes(mixed):
                query, key, value = (x.to(mixed.dtype) for x in (query, key, value))
                out, state = fused_delta_rule(query, key, value, decay, rate, state, starts)
            else:
                out, state = chunked_delta_rule(query, key, value, decay, rate, state, starts)
        return out.transpose(1, 2), state

    def inputs(
        self, mixed: Tensor, rates: Tensor, taps: Tensor, logarithms: Tensor, offsets: Tensor, before: Tensor,
        starts: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """Return query, key, value, decay and rate of `chunked_delta_rule`, in float32 or wider."""
        wide = torch.promote_types(mixed.dtype, torch.float32)
        (width, value_width), values = self.widths, self.values
        mixed, before, rates, taps, logarithms, offsets = (
            x.to(wide) for x in (mixed, before, rates, taps, logarithms, offsets)
        )
        convolved = F.silu(causal_convolution(mixed, taps, before, starts)).unflatten(-1, (self.heads, -1))
        query, key, value = convolved.split((width, width, values * value_width), -1)
        query, key = unit(query) * width**-0.5, unit(key)
        query, key = (x.unsqueeze(3).expand(-1, -1, -1, values, -1).flatten(2, 3) for x in (query, key))
        value = value.unflatten(-1, (values, -1)).flatten(2, 3)
        rate, decay = (x.flatten(2) for x in rates.split(values, -1))  # [B, t, A]
        decay = -logarithms.exp() * F.softplus(decay + offsets)
        query, key, value, decay, rate = (x.transpose(1, 2) for x in (query, key, value, decay, rate.sigmoid()))
        return query, key, value, decay, rate


class GatedDeltaNet(nn.Module):
    """A gated delta net over this rank's key heads and the value heads of these."""

    def __init__(self, model: QwenNext, kit: Kit, layer: int) -> None:
        super().__init__()
        self.layer, self.heads = layer, kit.local_heads(model.linear_key_heads)
        keys, values = model.linear_key_heads, model.linear_value_heads
        width, value_width = model.linear_key_width, model.linear_value_width
        of_key = values // keys * value_width
        self.parts = 2 * width + of_key, of_key, 2 * values // keys
        convolved = keys * self.parts[0]
        self.columns = kit.branches.expand(model.hidden, keys * sum(self.parts), Initial(0.02), bias=False)
        self.taps = kit.local((model.convolution, convolved), 1, Initial(model.convolution**-0.5, uniform=True), TAPS)
        # As in the authors' code, factors of the decays begin between 0 and 16; here their logarithms are uniform.
        half = math.log(16) / 2
        self.logarithms = kit.local((values,), 0, Initial(half, half, uniform=True), DECAY)
        self.offsets = kit.local((values,), 0, ONES, DECAY)
        self.core = DeltaCore(model, self.heads)
        self.norm = kit.norm(value_width, model.norm_epsilon, kind="rms", inside=True)
        self.output = kit.branches.contract(values * value_width, model.hidden, last_initial(model), bias=False)

    def forward(self, h: Tensor, rotation: Rotation, cache: KeyValueCache | None, documents: Tensor | None) -> Tensor:
        mixed, gate, rates = self.columns(h).unflatten(-1, (self.heads, -1)).split(self.parts, -1)
        mixed, parameters = mixed.flatten(2), (self.taps(), self.logarithms(), self.offsets())
        if cache is None:
            out = self.core(mixed, rates, *parameters, documents)
        else:
            before, state = cache.past_of(self.layer) or self.core.nothing(mixed)
            out, state = self.core.follow(mixed, rates, *parameters, before, state)
            seen = torch.cat([before, mixed], 1)[:, -self.core.past :]
            cache.replace(self.layer, (seen, state), mixed.shape[1])
        gated = self.norm(out).flatten(2) * F.silu(gate.flatten(2).to(out.dtype))
        y: Tensor = self.output(gated.to(h.dtype))
        return y


class GatedAttention(nn.Module):
    """Causal self-attention with output gates over this rank's key-value heads and the queries of these heads."""

    def __init__(self, model: QwenNext, kit: Kit, layer: int) -> None:
        super().__init__()
        self.layer, self.rotary_width = layer, model.rotary_width
        # A query is followed by its gate: a group has 2 G columns of width E, then key and value.
        members, width = model.heads // model.num_key_value_heads, model.head_width
        groups = HeadGroups(model.num_key_value_heads, 2 * members, width)
        # With more ranks than key-value heads, several ranks copy one head and split its queries (tensor/copies.py).
        count = max(kit.local_heads(groups.count), kit.parts)
        self.queries = kit.local_heads(model.heads) // count
        self.parts = (count, 2 * self.queries + 2, width)
        self.core = AttentionCore(kit, AttentionSpec(True, dropout=model.dropout))
        self.query_key_value = kit.branches.expand(
            model.hidden, groups.columns, Initial(0.02), bias=False, heads=groups
        )
        self.query_norm, self.key_norm = (
            kit.norm(width, model.norm_epsilon, kind=model.norm_kind, inside=True) for _ in range(2)
        )
        self.output = kit.branches.contract(model.heads * width, model.hidden, last_initial(model), bias=False)

    def forward(self, h: Tensor, rotation: Rotation, cache: KeyValueCache | None, documents: Tensor | None) -> Tensor:
        heads = self.query_key_value(h).unflatten(-1, self.parts)  # [B, T, K, 2 G + 2, E]
        both, key, value = heads.split((2 * self.queries, 1, 1), 3)
        query, gate = both.unflatten(3, (self.queries, 2)).unbind(4)
        query, key = (self.turned(x, rotation) for x in (self.query_norm(query), self.key_norm(key)))
        query, key, value = (x.flatten(2, 3).transpose(1, 2) for x in (query, key, value))
        if cache is not None:
            key, value = cache.extend(self.layer, key, value)
        attended = self.core(query, key, value, documents=documents).transpose(1, 2).flatten(2)
        y: Tensor = self.output(attended * gate.flatten(2).sigmoid())
        return y

    def turned(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Rotate the first numbers of each head of x [B, T, K, G, E]."""
        if self.rotary_width == x.shape[-1]:
            return rotate(x, rotation)
        first, rest = x.split((self.rotary_width, x.shape[-1] - self.rotary_width), -1)
        return torch.cat([rotate(first, rotation), rest], -1)


class QwenNextModel(RotaryDecoder):
    """Qwen3-Next from tokens to a loss."""

    def __init__(self, model: QwenNext, kit: Kit, chunk: Chunk | None = None) -> None:

        def make_block(layer: int) -> RotaryBlock:
            mixer = (GatedAttention if model.attends(layer) else GatedDeltaNet)(model, kit, layer)
            return RotaryBlock(model, kit, mixer, has_experts=model.has_experts(layer))

        super().__init__(model, kit, chunk, model.rotary_width, make_block)

    @staticmethod
    def products(config: Config) -> Costs:
        """Causal attention counts as if no score were masked; a chunk's triangular system as half a product."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, QwenNext), model
        width = model.heads * model.head_width
        attention = model.hidden * (3 * width + 2 * model.num_key_value_heads * model.head_width)
        attention += 2 * sequence * width
        chunk, keys, values = min(CHUNK, sequence), model.linear_key_width, model.linear_value_width
        numbers = 2 * model.linear_key_heads * keys + model.linear_value_heads * (2 * values + 2)
        linear = model.hidden * (numbers + model.linear_value_heads * values)
        # A chunk's scores, the system and corrections read; then reads and writes of the states, and their transitions.
        within = 2 * chunk * keys + chunk * (keys + values) // 2 + chunk * values
        across = 3 * keys * values + keys * keys + keys * keys * values // chunk
        linear += model.linear_value_heads * (within + across)
        layers = tuple(
            sequence * ((attention if model.attends(layer) else linear) + products)
            for layer, products in enumerate(feed_forward_products(model))
        )
        return Costs(0, layers, sequence * model.padded_vocabulary * model.hidden)
