"""Sequence to sequence (Vaswani et al., arXiv 1706.03762, section 3): blocks that read the source, then blocks that
write the target and look at what was read.

What passes from block to block: (encoder h [B, S, H], decoder h [B, T, H]), and where positions are biases on
attention (source bias [1, A, S, S], target bias [1, A, T, T]) behind these. An encoder's block changes the first, a
decoder's the second. After the last encoder block the first is the memory that the decoder attends to.

Shapes: B batch, S source, T target, H hidden, A local heads.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compute.model import Batch, Chunk, Costs, Hidden
from meshwright.compute.models.chain import Chain
from meshwright.config import Config
from meshwright.families.seq2seq.blocks import DecoderCache, EncoderBlock
from meshwright.families.seq2seq.section import T5, EncoderDecoder


class _Together(torch.autograd.Function):
    """The identity, under which every input has a gradient: zeros where nothing reads its output."""

    @staticmethod
    def forward(ctx: Any, *hidden: Tensor) -> Hidden:
        return tuple(x.view_as(x) for x in hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Hidden:
        return gradients


class EncoderDecoderChain(Chain):
    """Batch: `source`, `source_mask` (1 real, 0 padding) [B, S]; `target`, which begins with the start token, and
    `labels` [B, T]. Subclasses give embed, the biases and normed."""

    inside = ("source_mask",)

    def __init__(self, model: EncoderDecoder, chunk: Chunk | None) -> None:
        super().__init__(chunk or Chunk.whole(model.num_blocks))
        self.num_encoders = model.layers

    @abstractmethod
    def embed_tokens(self, ids: Tensor, start: int) -> Tensor:
        """Tokens [B, T] at places start... -> [B, T, H]."""

    def normed(self, h: Tensor) -> Tensor:
        """The head's input, from the last block's output [B, T, H]: that itself, where blocks end in norms."""
        return h

    def source_bias(self, count: int) -> Hidden:
        """(The bias [1, A, S, S] on self-attention among `count` tokens of the source,), or ()."""
        return ()

    def target_bias(self, start: int, count: int) -> Hidden:
        """(The bias [1, A, count, start + count] of the target's tokens start...,), or (): causal without."""
        return ()

    def embed(self, batch: Batch) -> Hidden:
        source, target = batch["source"], batch["target"]
        biases = (*self.source_bias(source.shape[1]), *self.target_bias(0, target.shape[1]))
        # The target waits beside the encoder's states, since any stage may hold the first decoder block: bytes, but no
        # wait.
        return (self.embed_tokens(source, 0), self.embed_tokens(target, 0), *biases)

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        seen, (first, h, *biases) = _seen(batch["source_mask"]), hidden
        if isinstance(block, EncoderBlock):  # `first`: the source's states, beside which the target waits
            return (block(first, seen, *biases[:1]), h, *biases)
        return (first, block(h, first, seen, *biases[1:]), *biases)  # `first`: the memory

    def final_states(self, hidden: Hidden) -> Tensor:
        # A stage is asked for the gradient of all that it was given, also of what none of its blocks reads.
        _, h, *_ = _Together.apply(*hidden)
        return self.normed(h)

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        """The memory [B, S, H] of source tokens [B, S]. Of a whole model on one device."""
        h, seen, bias = self.embed_tokens(source, 0), _seen(source_mask), self.source_bias(source.shape[1])
        for index in range(self.num_encoders):
            h = self.blocks[str(index)](h, seen, *bias)
        return h

    def decode(self, target: Tensor, memory: Tensor, source_mask: Tensor, cache: DecoderCache | None = None) -> Tensor:
        """The normed hidden states [B, T, H] of target tokens [B, T] that follow those in the cache, which is extended.

        Of a whole model on one device.
        """
        start = 0 if cache is None else cache.target.num_tokens
        (bias,) = self.target_bias(start, target.shape[1]) or (None,)
        h, seen = self.embed_tokens(target, start), _seen(source_mask)
        for index in range(self.num_encoders, 2 * self.num_encoders):
            h = self.blocks[str(index)](h, memory, seen, bias, cache)
        return self.normed(h)

    @staticmethod
    def products(config: Config) -> Costs:
        """Multiplications of weights and in attention in a pair's forward pass."""
        model, (read, written) = config.model, config.data.lengths
        assert isinstance(model, EncoderDecoder), model
        width = model.heads * model.head_width if isinstance(model, T5) else model.hidden  # of a block's heads together
        # 4 linears of a self-attention; in cross-attention 2 of the target (query, output) and 2 of the source (key,
        # value).
        linear, feed_forward = model.hidden * width, 2 * model.hidden * model.inner
        encoder = read * (4 * linear + 2 * read * width + feed_forward)
        cross = written * (2 * linear + 2 * read * width) + read * 2 * linear
        decoder = written * (4 * linear + 2 * written * width + feed_forward) + cross
        layers = (encoder,) * model.layers + (decoder,) * model.layers
        return Costs(0, layers, written * model.padded_vocabulary * model.hidden)

    @staticmethod
    def tokens_per_sample(config: Config) -> int:
        """Positions of source and target together."""
        return sum(config.data.lengths)

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        read, written = config.data.lengths
        return {"source": (read,), "source_mask": (read,), "target": (written,), "labels": (written,)}


def _seen(source_mask: Tensor) -> Tensor:
    """[B, S] of 0 and 1 -> [B, 1, 1, S]: true where a token is seen."""
    return source_mask.bool()[:, None, None, :]
