"""BERT (Devlin et al., 2018, arXiv 1810.04805): a bidirectional encoder that predicts masked tokens from the context,
and whether the second text follows the first.

`norm_order` original: norm(h + sub_layer(h)), and a norm on the embeddings. megatron: h + sub_layer(norm(h)), and a
norm at the end; large models do not train otherwise (Megatron-LM, arXiv 1909.08053, section 5.3).

Shapes: B batch, T sequence, H hidden, A local heads, E head width, N inner width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import Batch, Chunk, Costs, Hidden, Scales
from meshwright.compute.models.attention import Block
from meshwright.compute.models.chain import Chain, blocks_of
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.kit import Kit
from meshwright.config import Config
from meshwright.families.bert.section import ASKED_SHARE, Bert, BertTrunk

NUM_SEGMENTS = 2
NUM_ANSWERS = 2
"""The classes of next-sentence prediction: 0, the second text follows the first; 1, it does not."""


class BERT(Chain):
    """BERT from tokens to the masked-language-model loss and, with `next_sentence`, the next-sentence loss.

    Batch: `tokens`, `segments` (0 first text, 1 second), `mask` (1 real, 0 padding) and `labels` (-100: no label), all
    [B, T]; `next_sentence` [B, 1], 0 if the second text follows the first, else 1.
    """

    inside = ("mask",)
    pooled_dropout: nn.Module
    ties: ClassVar[bool] = True
    """True if the head's weight is the table of embeddings."""
    last_norm_bias: ClassVar[bool] = True
    """True if the norm before the heads has a bias."""

    def __init__(self, model: BertTrunk, kit: Kit, chunk: Chunk | None = None) -> None:
        chunk = chunk or Chunk.whole(model.layers)
        super().__init__(chunk)
        hidden, initial = model.hidden, Initial(0.02)
        self.norm_first = model.norm_order == "megatron"
        # The masked-language-model head uses the table of embeddings. Tasks have other heads, and need no copy of the
        # table on the last stage.
        if chunk.first or (chunk.last and self.ties):
            self.tokens = kit.embedding(model.padded_vocabulary, hidden, initial)
        if chunk.first:
            self.positions = kit.embedding(model.padded(model.positions), hidden, initial)
            self.segments = kit.embedding(model.padded(NUM_SEGMENTS), hidden, initial)
            self.dropout = nn.Dropout(model.dropout)
        if chunk.last if self.norm_first else chunk.first:  # on the last hidden states, or on the embeddings
            self.norm = kit.norm(hidden, model.norm_epsilon, bias=self.last_norm_bias or not self.norm_first)
        bare = None if self.last_norm_bias or self.norm_first else model.layers - 1  # the block with the last norm
        # As in Megatron-LM, linears that add to the residual sum have smaller initial weights: the sums are not normed.
        last = Initial(0.02 / math.sqrt(2 * model.layers) if self.norm_first else 0.02)
        self.blocks = blocks_of(
            chunk,
            lambda layer: Block(model, kit, layer, last, norm_first=self.norm_first, last_bias=layer != bare),
        )
        if isinstance(model, Bert):  # every chunk knows the labels; a fine-tuning has them as a class attribute
            self.labels = ("labels", "next_sentence") if model.next_sentence else ("labels",)
        if chunk.last:
            self.make_heads(model, kit)

    def make_heads(self, model: BertTrunk, kit: Kit) -> None:
        """Build the layers after the last block and the norm."""
        assert isinstance(model, Bert), model
        hidden, initial = model.hidden, Initial(0.02)
        self.transform = kit.linear("transform", hidden, hidden, initial)
        self.transform_norm = kit.norm(hidden, model.norm_epsilon)
        # With a small share of labelled tokens the head computes logits only for labelled tokens.
        shape = HeadShape(hidden, model.vocabulary, model.padded_vocabulary, initial, bias=True, labelled=ASKED_SHARE)
        self.head = kit.head_loss(shape, self.tokens)
        if model.next_sentence:
            self.pooler = kit.linear("transform", hidden, hidden, initial)
            self.pooled_dropout = nn.Identity()  # a dropout in fine-tunings
            answers = model.padded(NUM_ANSWERS)
            self.next_sentence_head = kit.head_loss(HeadShape(hidden, NUM_ANSWERS, answers, initial, bias=True))

    def embed(self, batch: Batch) -> Hidden:
        # [B, T]; for samples of several texts [B, K, T], and each text becomes a row.
        tokens, segments = batch["tokens"].flatten(0, -2), batch["segments"].flatten(0, -2)
        positions = self.context.positions(0, tokens.shape[1], tokens.device)
        h = self.tokens(tokens) + self.positions(positions) + self.segments(segments)
        return (self.dropout(h if self.norm_first else self.norm(h)),)  # [B, T, H]

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        # No token attends to padding. The outputs at padding are computed, but never used.
        seen = batch["mask"].flatten(0, -2).bool()[:, None, None, :]  # [B, 1, 1, T]
        return (block(*hidden, seen=seen),)

    def final_states(self, hidden: Hidden) -> Tensor:
        (h,) = hidden
        return self.norm(h) if self.norm_first else h

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        # The head of a label with scale 0 is skipped, as in an evaluation of one label at a time.
        total = h.new_zeros(())
        if scales["labels"]:
            total = total + self.head(self.transformed(h), batch["labels"], scales["labels"])
        if "next_sentence" in self.labels and scales["next_sentence"]:
            answers = batch["next_sentence"]
            total = total + self.next_sentence_head(self.pooled(h), answers, scales["next_sentence"])
        return total

    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        counts = [cast(TableHead, self.head).num_correct(self.transformed(h), batch["labels"])]
        if "next_sentence" in self.labels:
            counts.append(cast(TableHead, self.next_sentence_head).num_correct(self.pooled(h), batch["next_sentence"]))
        return counts

    def transformed(self, h: Tensor) -> Tensor:
        """Compute the input of the masked-language-model head: [B, T, H]."""
        return self.transform_norm(F.gelu(self.transform(h)))

    def pooled(self, h: Tensor) -> Tensor:
        """Compute the input of a head on whole texts from the first token: [B, 1, H]."""
        # h[:, :1], not h[:, 0]. With context parallelism each rank returns the first token of its part of the sequence,
        # and only the first part has a label.
        pooled: Tensor = self.pooled_dropout(torch.tanh(self.pooler(h[:, :1])))
        return pooled

    @staticmethod
    def products(config: Config) -> Costs:
        """Count multiplications, without the pooler (one token); the head computes logits of labelled tokens."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, Bert), model
        layer = sequence * (12 * model.hidden**2 + 2 * sequence * model.hidden)
        # The head computes logits only for labelled tokens.
        classes = round(ASKED_SHARE * sequence) * model.padded_vocabulary * model.hidden
        return Costs(0, (layer,) * model.layers, sequence * model.hidden**2 + classes)

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        sequence = (config.data.lengths.source,)
        return {"tokens": sequence, "segments": sequence, "mask": sequence, "labels": sequence, "next_sentence": (1,)}
