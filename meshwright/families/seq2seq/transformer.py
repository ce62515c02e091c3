"""The original Transformer (Vaswani et al., 2017, arXiv 1706.03762): a norm after each residual sum, sinusoidal
positions, one table for source, target and output.

Dropout as in section 5.4: on each sub-layer's output, and on the sums of embeddings and positions.
Shapes: B batch, T sequence, H hidden.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from meshwright.compute.model import Chunk
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.kit import Kit
from meshwright.families.seq2seq.blocks import Initials, Recipe, encoder_decoder_blocks
from meshwright.families.seq2seq.encoder_decoder import EncoderDecoderChain
from meshwright.families.seq2seq.section import Attentional

LONGEST_WAVE = 10000
"""The wave lengths of positions are from 2 pi to LONGEST_WAVE times 2 pi (section 3.5)."""


class TransformerModel(EncoderDecoderChain):
    """The Transformer from source and target tokens to a loss with smoothed labels."""

    def __init__(self, model: Attentional, kit: Kit, chunk: Chunk | None = None) -> None:
        super().__init__(model, chunk)
        self.hidden = model.hidden
        self.slice = kit.slice
        table = Initial(model.hidden**-0.5)
        if self.chunk.first or self.chunk.last:
            self.tokens = kit.embedding(model.padded_vocabulary, model.hidden, table)
        if self.chunk.first:
            self.dropout = nn.Dropout(model.dropout)
        self.blocks = encoder_decoder_blocks(_recipe(model, kit), kit, self.chunk)
        if self.chunk.last:
            vocabulary, padded, smoothing = model.vocabulary, model.padded_vocabulary, model.label_smoothing
            shape = HeadShape(model.hidden, vocabulary, padded, table, smoothing=smoothing)
            self.head = kit.head_loss(shape, self.tokens)

    def embed_tokens(self, ids: Tensor, start: int) -> Tensor:
        # Section 3.4: the shared table is initialised small for the head, and scaled up for the embeddings.
        rows = self.tokens(ids) * math.sqrt(self.hidden)
        places = sinusoids(start, ids.shape[1], self.hidden, ids.device).to(rows.dtype)
        # Each rank computes all columns of the positions, and takes the columns of its kit.
        h: Tensor = self.dropout(rows + self.slice(places, "hidden"))
        return h


def sinusoids(start: int, count: int, hidden: int, device: torch.device) -> Tensor:
    """Encode positions start... [count, H] in float64: sines in the even, cosines in the odd columns."""
    # In float32 the angle of a late position would lose digits of the fraction of a turn.
    positions = torch.arange(start, start + count, device=device, dtype=torch.float64)
    columns = torch.arange(hidden, device=device)
    exponents = (columns - columns % 2).to(torch.float64) / hidden
    angles = positions[:, None] / LONGEST_WAVE**exponents
    return torch.where(columns % 2 == 0, angles.sin(), angles.cos())


def _recipe(model: Attentional, kit: Kit) -> Recipe:
    """Build the recipe with the initial values of Glorot and Bengio, which keep variances from layer to layer."""
    square = Initial(model.hidden**-0.5)
    slanted = Initial(math.sqrt(2 / (model.hidden + model.inner)))
    return Recipe(
        model,
        width=model.hidden,
        norm=lambda: kit.norm(model.hidden, model.norm_epsilon),
        norm_first=False,
        bias=True,
        scale=None,
        inner_dropout=0.0,
        initials=Initials(square, square, square, square, square, slanted, slanted),
    )
