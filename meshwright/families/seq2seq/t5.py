"""T5 (Raffel et al., 2020, arXiv 1910.10683): an encoder-decoder with RMS norms at the input of each sub-layer, linears
without biases, and positions as a bias on attention by the distance of two tokens.

The blocks of a stack share one table of biases, so the biases are sent from stage to stage with the hidden states.
Distances are grouped in buckets. For each direction, the first half of the buckets have one distance each; the others
have ranges that grow by powers up to `distance_max`. The encoder uses half of its buckets for tokens ahead and half for
tokens behind.

Scores are not scaled: the initial queries are small instead. The head is scaled by 1/√H, since the table is initialised
with values of about 1.
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
    """T5 from source and target tokens to a loss."""

    def __init__(self, model: T5, kit: Kit, chunk: Chunk | None = None) -> None:
        super().__init__(model, chunk)
        self.model = model
        table, near = Initial(1.0), Initial(model.hidden**-0.5)
        if self.chunk.first or self.chunk.last:
            self.tokens = kit.embedding(model.padded_vocabulary, model.hidden, table)
            self.dropout = nn.Dropout(model.dropout)
        if self.chunk.first:
            shape = (model.distance_buckets, model.heads)
            # Only on the first stage: biases are sent with the hidden states to all blocks.
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
        table = self.encoder_distances()  # [buckets, A], or one for each run of samples
        places = torch.arange(count, device=table.device)
        ahead, half = places - places[:, None], self.model.distance_buckets // 2
        # The encoder sees both directions, so each direction has half of the buckets.
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
        # The table is initialised with values of about 1: initial logits would be about sqrt(H) without the scale.
        normed: Tensor = self.dropout(self.norm(h)) * self.model.hidden**-0.5
        return normed


def distance_buckets(distances: Tensor, num_buckets: int, most: int) -> Tensor:
    """Return the bucket of each distance >= 0 in one direction: half are exact, half even steps of the logarithm."""
    exact = num_buckets // 2
    steps = torch.log(distances.clamp(min=1).float() / exact) / math.log(most / exact) * (num_buckets - exact)
    # `where` keeps near distances, 0 included, without the logarithm.
    far = (exact + steps.long()).clamp(max=num_buckets - 1)
    return torch.where(distances < exact, distances, far)


def _biases(table: Tensor, buckets: Tensor) -> Tensor:
    """Look up rows of the table [buckets, A] by buckets [T, S] -> [1, A, T, S]; of n tables [n, buckets, A], n rows."""
    if table.dim() == 3:
        return torch.cat([_biases(rows, buckets) for rows in table])
    return F.embedding(buckets, table).permute(2, 0, 1).unsqueeze(0)


def _recipe(model: T5, kit: Kit) -> Recipe:
    """Build the recipe with T5's initial values, except for the joint linear of self-attention.

    T5 makes only queries small. In the joint linear, queries, keys and values all get the square root of that factor,
    and the output linear is larger by the inverse. Initial scores and sums have the variances of T5.
    """
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
        # The small initial values of queries replace the factor 1/sqrt(E).
        scale=1.0,
        inner_dropout=model.dropout,
        initials=initials,
    )
