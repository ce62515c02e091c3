"""T5 (Raffel et al., 2020, arXiv 1910.10683): an encoder-decoder with RMS norms at the input of each sub-layer, linears
without biases, and positions as a bias on attention by the distance of two tokens.

A stack's table of biases is shared by its blocks, so what it makes travels with the hidden states. Distances are in
buckets: of n buckets of one direction the first half are for one distance each, the others for ranges that grow by
powers up to `distance_max`. The encoder has as many buckets for tokens ahead as for those behind.

Scores are not scaled, queries begin small instead; the head is scaled by 1/√H, as its table begins with values about 1.
Shapes: B batch, S source, T target, H hidden, A local heads.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import Chunk, Hidden
from meshwright.compute.parameters.role import BIAS
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.kit import Kit
from meshwright.families.seq2seq.blocks import Initials, Recipe, encoder_decoder_blocks
from meshwright.families.seq2seq.encoder_decoder import EncoderDecoderChain
from meshwright.families.seq2seq.section import T5


class T5Model(EncoderDecoderChain):
    """Source and target tokens to a loss."""

    def __init__(self, model: T5, kit: Kit, chunk: Chunk | None = None) -> None:
        super().__init__(model, chunk)
        self.model = model
        table, near = Initial(1.0), Initial(model.hidden**-0.5)
        if self.chunk.first or self.chunk.last:
            self.tokens = kit.embedding(model.padded_vocabulary, model.hidden, table)
            self.dropout = nn.Dropout(model.dropout)
        if self.chunk.first:
            shape = (model.distance_buckets, model.heads)
            # On the first stage alone: biases travel with the hidden states to all blocks.
            self.encoder_distances = kit.local(shape, 1, near, BIAS)
            self.decoder_distances = kit.local(shape, 1, near, BIAS)
        self.blocks = encoder_decoder_blocks(_recipe(model, kit), kit, self.chunk)
        if self.chunk.last:
            self.norm = kit.norm(model.hidden, model.norm_epsilon, kind="rms")
            vocabulary, padded, smoothing = model.vocabulary, model.padded_vocabulary, model.label_smoothing
            head = HeadShape(model.hidden, vocabulary, padded, table, smoothing=smoothing)
            self.head = kit.head_loss(head, self.tokens)

    def embed_tokens(self, ids: Tensor, start: int) -> Tensor:
        h: Tensor = self.dropout(self.tokens(ids))
        return h

    def source_bias(self, count: int) -> Hidden:
        table = self.encoder_distances()  # [buckets, A]
        places = torch.arange(count, device=table.device)
        ahead, half = places - places[:, None], self.model.distance_buckets // 2
        # Both directions are seen, so each has half of the buckets.
        buckets = distance_buckets(ahead.abs(), half, self.model.distance_max) + half * (ahead > 0)
        return (_biases(table, buckets),)

    def target_bias(self, start: int, count: int) -> Hidden:
        table = self.decoder_distances()
        places = torch.arange(start + count, device=table.device)
        ahead = places - places[start:, None]  # [count, start + count]
        behind = ahead.neg().clamp(min=0)
        biases = _biases(table, distance_buckets(behind, self.model.distance_buckets, self.model.distance_max))
        # Causality is in the bias, since torch's kernels take a mask or `causal`, not both.
        return (biases.masked_fill(ahead > 0, torch.finfo(biases.dtype).min),)

    def normed(self, h: Tensor) -> Tensor:
        # The table begins with values about 1: unscaled logits would begin about sqrt(H) large.
        normed: Tensor = self.dropout(self.norm(h)) * self.model.hidden**-0.5
        return normed


def distance_buckets(distances: Tensor, num_buckets: int, most: int) -> Tensor:
    """The bucket of each distance >= 0 of one direction: half are exact, the others as even steps of its logarithm."""
    exact = num_buckets // 2
    steps = torch.log(distances.clamp(min=1).float() / exact) / math.log(most / exact) * (num_buckets - exact)
    # The logarithm of 0 and of near distances is not taken: `where` takes these as they are.
    far = (exact + steps.long()).clamp(max=num_buckets - 1)
    return torch.where(distances < exact, distances, far)


def _biases(table: Tensor, buckets: Tensor) -> Tensor:
    """Rows of [buckets, A] by buckets [T, S] -> [1, A, T, S]."""
    return F.embedding(buckets, table).permute(2, 0, 1).unsqueeze(0)


def _recipe(model: T5, kit: Kit) -> Recipe:
    """First values as T5's, but for self-attention's three linears in one: queries and keys share the small factor of
    queries evenly, and what values lose by it the output has more. Scores and sums begin with the same variances."""
    hidden, width, inner = model.hidden, model.heads * model.head_width, model.inner
    shared = model.head_width**0.25
    initials = Initials(
        query_key_value=Initial(hidden**-0.5 / shared),
        output=Initial(width**-0.5 * shared),
        query=Initial((hidden * model.head_width) ** -0.5),
        key_value=Initial(hidden**-0.5),
        cross_output=Initial(width**-0.5),
        expand=Initial(hidden**-0.5),
        contract=Initial(inner**-0.5),
    )
    return Recipe(
        model,
        width=width,
        norm=lambda: kit.norm(hidden, model.norm_epsilon, kind="rms"),
        norm_first=True,
        bias=False,
        # The small first values of queries stand in for 1/sqrt(E).
        scale=1.0,
        inner_dropout=model.dropout,
        initials=initials,
    )
