"""Sequence to sequence (Vaswani et al., arXiv 1706.03762, section 3): one chain of encoder blocks and decoder blocks.

Every block receives and returns (encoder h [B, S, H], decoder h [B, T, H]). If positions are biases on attention,
(source bias [1, A, S, S], target bias [1, A, T, T]) follow. An encoder block changes the first tensor, a decoder block
the second. After the last encoder block the first tensor is the memory that the decoder attends to.

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
    """The identity with a gradient for every input: zeros for an output that is not used."""

    @staticmethod
    def forward(ctx: Any, *hidden: Tensor) -> Hidden:
        return tuple(x.view_as(x) for x in hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Hidden:
        return gradients


class EncoderDecoderChain(Chain):
    """The base of encoder-decoders. Subclasses define embed_tokens, the biases and normed.

    Batch: `source`, `source_mask` (1 real, 0 padding) [B, S]; `target`, beginning with the start token, and `labels`
    [B, T].
    """

    inside = ("source_mask",)

    def __init__(self, model: EncoderDecoder, chunk: Chunk | None) -> None:
        super().__init__(chunk or Chunk.whole(model.num_blocks))
        self.num_encoders = model.layers

    @abstractmethod
    def embed_tokens(self, ids: Tensor, start: int) -> Tensor:
        """Embed tokens [B, T] at positions start... -> [B, T, H]."""

    def normed(self, h: Tensor) -> Tensor:
        """Return the head's input from the last block's output [B, T, H]: unchanged if blocks end in norms."""
        return h

    def source_bias(self, count: int) -> Hidden:
        """Return (the bias [1, A, S, S] on self-attention among `count` source tokens,), or () without a bias."""
        return ()

    def target_bias(self, start: int, count: int) -> Hidden:
        """Return (the bias [1, A, count, start + count] of the target's tokens start...,), or () for a causal mask."""
        return ()

    def embed(self, batch: Batch) -> Hidden:
        source, target = batch["source"], batch["target"]
        biases = (*self.source_bias(source.shape[1]), *self.target_bias(0, target.shape[1]))
        # The target is embedded here and sent along with the encoder's states, since any stage may have the first
        # decoder block. This costs bytes, but no waiting.
        return (self.embed_tokens(source, 0), self.embed_tokens(target, 0), *biases)

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        seen, (first, h, *biases) = _seen(batch["source_mask"]), hidden
        if isinstance(block, EncoderBlock):  # `first`: the source's states; h, the target's, is passed on unchanged
            return (block(first, seen, *biases[:1]), h, *biases)
        return (first, block(h, first, seen, *biases[1:]), *biases)  # `first`: the memory

    def final_states(self, hidden: Hidden) -> Tensor:
        # A stage must return a gradient of every received tensor, also of tensors that none of its blocks reads.
        _, h, *_ = _Together.apply(*hidden)
        return self.normed(h)

    def encode(self, source: Tensor, source_mask: Tensor) -> Tensor:
        """Compute the memory [B, S, H] of source tokens [B, S], with a whole model on one device."""
        h, seen, bias = self.embed_tokens(source, 0), _seen(source_mask), self.source_bias(source.shape[1])
        for index in range(self.num_encoders):
            h = self.blocks[str(index)](h, seen, *bias)
        return h

    def decode(self, target: Tensor, memory: Tensor, source_mask: Tensor, cache: DecoderCache | None = None) -> Tensor:
        """Compute the head's input [B, T, H] for target tokens [B, T], with a whole model on one device.

        The tokens follow the tokens of the cache, and the cache is extended.
        """
        start = 0 if cache is None else cache.target.num_tokens
        (bias,) = self.target_bias(start, target.shape[1]) or (None,)
        h, seen = self.embed_tokens(target, start), _seen(source_mask)
        for index in range(self.num_encoders, 2 * self.num_encoders):
            h = self.blocks[str(index)](h, memory, seen, bias, cache)
        return self.normed(h)

    @staticmethod
    def products(config: Config) -> Costs:
        """Count the multiplications with weights and in attention of a pair's forward pass."""
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
        """Count the positions of source and target together."""
        return sum(config.data.lengths)

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        read, written = config.data.lengths
        return {"source": (read,), "source_mask": (read,), "target": (written,), "labels": (written,)}


def _seen(source_mask: Tensor) -> Tensor:
    """Turn a mask [B, S] of 0 and 1 into [B, 1, 1, S]: True for tokens that attention sees."""
    return source_mask.bool()[:, None, None, :]
