"""The chain of decoders with rotary positions and RMS norms; the Llama and DeepSeek families each add their blocks.

Feed-forwards may be mixtures of experts (tensor/experts.py). If the routers' losses are a part of the loss, each layer
passes on the hidden states and the sum of the routers' losses of all layers so far, [B].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from meshwright.compute.model import EMBEDDINGS, SAMPLES, Batch, Chunk, Crossing, Hidden, Pieces, Scales, to_device
from meshwright.compute.models.chain import blocks_of
from meshwright.compute.models.decoder import Decoder, KeyValueCache
from meshwright.compute.models.feed_forward import FeedForward, experts_of
from meshwright.compute.models.rope import Rotation, angles_of, rotation_of
from meshwright.compute.models.rotary_section import NormPlaces, RotaryTransformer
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.experts import Dispatch, Experts
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.kit import Kit


class RotaryBlock(nn.Module):
    """Block: h + attention(h, rotation, cache, documents), then h + feed_forward(h), each with a norm before or behind
    it, or both: h + end_norm(attention(norm(h)))."""

    def __init__(
        self, model: RotaryTransformer, kit: Kit, attention: nn.Module, *, has_experts: bool, bias: bool = False,
        norms: NormPlaces = "before", rope: int = 0,
    ) -> None:  # fmt: skip
        """Make the block.

        Args:
            bias: whether a dense feed-forward's linears have biases.
            norms: where the two sub-layers have norms.
            rope: the index, in the model's `ropes`, of the block's rotary positions.
        """
        super().__init__()
        self.rope, norm = rope, partial(kit.norm, model.hidden, model.norm_epsilon, kind=model.norm_kind)
        before, behind = norms != "behind", norms != "before"
        self.attention_norm = norm() if before else None
        self.attention = attention
        self.attention_end_norm = norm() if behind else None
        self.feed_forward_norm = norm() if before else None
        self.has_experts = has_experts
        self.feed_forward = experts_of(model, kit) if has_experts else FeedForward(model, model.inner, kit, bias=bias)
        self.shared_expert = None
        if has_experts and model.experts is not None and model.experts.shared:
            shared, gated = model.experts.shared, model.experts.shared_gate
            self.shared_expert = FeedForward(model, shared, kit, gated=gated)
        self.feed_forward_end_norm = norm() if behind else None
        self.dropout = nn.Dropout(model.dropout)

    def forward(
        self, hidden: Hidden, rotation: Rotation, cache: KeyValueCache | None = None, documents: Tensor | None = None,
        places: Tensor | None = None,
    ) -> Hidden:  # fmt: skip
        """Map ([B, T, H],) or, with the sum of the routers' losses, ([B, T, H], [B]) to the same shapes."""
        h, *losses = hidden
        h, normed = self._attended(h, rotation, cache, documents)
        if not self.has_experts:
            return (self._ended(h, self.feed_forward(normed)), *losses)
        y, *routed = self.feed_forward(normed, places)
        if self.shared_expert is not None:
            y = y + self.shared_expert(normed)
        return self._ended(h, y), *(total + loss for total, loss in zip(losses, routed, strict=True))

    def _attended(
        self, h: Tensor, rotation: Rotation, cache: KeyValueCache | None, documents: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the hidden states [B, T, H] after attention, and the normed ones that the feed-forward reads."""
        normed = h if self.attention_norm is None else self.attention_norm(h)
        y = self.attention(normed, rotation, cache, documents)
        h = h + self.dropout(y if self.attention_end_norm is None else self.attention_end_norm(y))
        return h, h if self.feed_forward_norm is None else self.feed_forward_norm(h)

    def _ended(self, h: Tensor, y: Tensor) -> Tensor:
        """Add the feed-forward's output y [B, T, H] to the hidden states."""
        return h + self.dropout(y if self.feed_forward_end_norm is None else self.feed_forward_end_norm(y))

    def to_experts(
        self, hidden: Hidden, rotation: Rotation, documents: Tensor | None, places: Tensor
    ) -> tuple[Hidden, Dispatch]:
        """Run the block until rows are sent to experts. Returns a tuple and the dispatch plan of the rows.

        The tuple: rows [R, H], h, weights, the shared expert's input (if there is one), the routers' losses (if any).
        """
        h, *losses = hidden
        h, normed = self._attended(h, rotation, None, documents)
        (rows, weights, routed), plan = self.experts.dispatch(normed, places)
        shared = () if self.shared_expert is None else (normed,)
        return (rows, h, weights, *shared, *(total + loss for total, loss in zip(losses, routed, strict=True))), plan

    def from_experts(self, y: Tensor, stayed: Hidden, plan: Dispatch) -> Hidden:
        """Run the rest of the block on the experts' outputs y [R, H]. `stayed`: the tuple of `to_experts` without
        rows."""
        h, weights, *rest = stayed
        y = self.experts.combine(y, weights, plan)
        if self.shared_expert is not None:
            y = y + self.shared_expert(rest.pop(0))
        return self._ended(h, y), *rest

    @property
    def experts(self) -> Experts:
        """The block's mixture of experts. Only valid if `has_experts`."""
        return cast(Experts, self.feed_forward)


class RotaryDecoder(Decoder):
    """Decoder with rotary positions, from tokens to a loss."""

    def __init__(
        self, model: RotaryTransformer, kit: Kit, chunk: Chunk | None, rotary_width: int,
        make_block: Callable[[int], RotaryBlock],
    ) -> None:  # fmt: skip
        """`rotary_width`: number of elements of a head that are rotated. `make_block(layer)` makes a layer's block."""
        super().__init__(chunk or Chunk.whole(model.layers))
        self.embedding_scale = model.embedding_scale
        self.frequencies = [angles_of(rope, rotary_width) for rope in model.ropes]
        """Angles of each of the model's `ropes`, as numbers: a start on a GPU holds no tensor on the host."""
        # The loss has the mean over layers; layers pass on the sum.
        self.loss_share = 1 / model.expert_layers if model.router_losses else 0.0
        """The factor of the sum of the routers' losses in the loss."""
        hidden, initial = model.hidden, Initial(0.02)
        if self.chunk.first or (self.chunk.last and model.tied):
            self.tokens = kit.embedding(model.padded_vocabulary, hidden, initial)
        if self.chunk.first:
            self.dropout = nn.Dropout(model.dropout)
        self.blocks = blocks_of(self.chunk, make_block)
        if self.chunk.last:
            self.norm = kit.norm(hidden, model.norm_epsilon, kind=model.norm_kind)
        if self.chunk.has_head:
            tied = self.tokens if model.tied else None
            shape = HeadShape(
                hidden, model.vocabulary, model.padded_vocabulary, initial, over=self.chunk.head_over,
                cap=model.head_cap,
            )  # fmt: skip
            self.head = kit.head_loss(shape, tied)

    def embed(self, batch: Batch) -> Hidden:
        tokens = batch["tokens"]
        h = self.tokens(tokens)
        if self.embedding_scale != 1:  # rounded to the dtype of the embeddings, as in transformers
            h = h * torch.full((), self.embedding_scale, dtype=h.dtype, device=h.device)
        h = self.dropout(h)
        if not self.loss_share:
            return (h,)
        # float32: a sum over layers of numbers near one would lose digits in half precision. It requires a gradient,
        # since a stage must return gradients of all its inputs.
        wide = torch.promote_types(h.dtype, torch.float32)
        return h, torch.zeros(tokens.shape[0], dtype=wide, device=h.device, requires_grad=True)

    def run_layers(self, hidden: Hidden, batch: Batch, chunk: Chunk) -> Hidden:
        """Run the layers with a rotation that is computed once and passed in the batch."""
        batch = batch | self.turned(batch)
        if not self.keeps_rows:
            return super().run_layers(hidden, batch, chunk)
        flow, given = self._layers_in_pieces(hidden, batch, chunk), None
        while True:
            try:
                crossing = next(flow) if given is None else flow.send(given)
            except StopIteration as end:
                return cast(Hidden, end.value)
            experts = next(module for module in self.blocks.modules() if isinstance(module, Experts))
            given = experts.traded(crossing.rows, crossing.given, crossing.taken), *crossing.stays

    def in_pieces(self, batch: Batch, scales: Scales, incoming: Hidden = (), chunk: Chunk | None = None) -> Pieces:
        current = chunk or self.chunk
        hidden = self.run_part(EMBEDDINGS, self.embed, batch) if current.first else incoming
        hidden = yield from self._layers_in_pieces(hidden, batch | self.turned(batch), current)
        return self.ended(hidden, batch, scales) if current.last else hidden

    def _layers_in_pieces(self, hidden: Hidden, batch: Batch, chunk: Chunk) -> Pieces:
        documents = batch.get("documents")
        groups = {layer: group for group in self.groups for layer in group.layers}
        for layer in chunk.layers:
            run_group = self.run_of(groups[layer])
            block = cast(RotaryBlock, self.blocks[str(layer)])
            if not block.has_experts:
                hidden = run_group(partial(self._layers, (layer,), batch), hidden)
                continue
            # Each part of the layer is recomputed separately: rows received from other ranks are kept and sent once.
            run = partial(self.run_part, layer, run_group)
            rotation = rotation_in(batch, block.rope)
            (rows, *stays), plan = run(block.to_experts, hidden, rotation, documents, batch["places"])
            trade = block.experts.trade_of(plan, rows.device)
            rows, *stayed = yield Crossing(rows, trade.given, trade.taken, tuple(stays))
            rows = run(block.experts.outputs_here, rows, trade)
            (rows,) = yield Crossing(rows, trade.taken, trade.given)
            hidden = run(block.from_experts, rows, tuple(stayed), plan)
        return hidden

    def turned(self, batch: Batch) -> Batch:
        """Return the batch entries of token positions: `cosines`, `sines` and `places`; of the second of two rotations
        `cosines1` and `sines1`."""
        tokens = batch["tokens"]
        places = self.context.positions(0, tokens.shape[1], tokens.device)
        turned: Batch = {"places": places}
        # Once a microbatch and not once a layer.
        for index, rotation in enumerate(self._rotations(places, batch.get("documents"))):
            turned |= {f"{name}{index or ''}": table for name, table in rotation._asdict().items()}
        return turned

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        rotation = rotation_in(batch, cast(RotaryBlock, block).rope)
        passing: Hidden = block(hidden, rotation, None, batch.get("documents"), batch["places"])
        return passing

    def with_layers_losses(self, loss: Tensor, hidden: Hidden, scales: Scales) -> Tensor:
        # A router's loss is a mean over sequences, so its scale counts samples and not tokens.
        return loss + hidden[1].sum() * (self.loss_share * scales[SAMPLES]) if self.loss_share else loss

    def hidden(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        start = cache.num_tokens if cache is not None else 0
        rotations = self._rotations(self.context.positions(start, tokens.shape[1], tokens.device))
        hidden = self.embed({"tokens": tokens})
        for block in self.blocks.values():
            hidden = cast(Hidden, block(hidden, rotations[cast(RotaryBlock, block).rope], cache))
        return self.final_states(hidden)

    def _rotations(self, positions: Tensor, documents: Tensor | None = None) -> list[Rotation]:
        """Return the rotations, one for each rope of the model, of tokens at `positions` of every sequence.

        documents [B, T]: index in the whole sequence of the first token of each token's document (position 0).
        """
        if documents is not None:
            positions = positions - to_device({"starts": documents}, positions.device)["starts"][:, positions]
        return [rotation_of(*each, positions) for each in self.frequencies]


def rotation_in(batch: Batch, index: int) -> Rotation:
    """Return the rotation of a batch's tokens by the rope of this index (`RotaryDecoder.turned`)."""
    return Rotation(batch[f"cosines{index or ''}"], batch[f"sines{index or ''}"])


def feed_forward_products(model: RotaryTransformer) -> tuple[int, ...]:
    """Count a token's multiplications in each layer's feed-forward; with experts, in its experts and the router."""
    linears = model.expand_groups + 1  # gate, up and down, or up and down
    dense, experts = linears * model.hidden * model.inner, model.experts
    if experts is None:
        return (dense,) * model.layers
    widths = experts.per_token * model.expert_width + experts.shared
    # An expert's linears, the router's scores, the shared feed-forward's gate.
    routed = model.hidden * (linears * widths + experts.count + experts.shared_gate)
    return tuple(routed if model.has_experts(layer) else dense for layer in range(model.layers))
