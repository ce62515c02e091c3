"""BERT (Devlin et al., 2018, arXiv 1810.04805): an encoder that sees both ways, told masked tokens from their context
and whether its second text follows the first.

`norm_order` original: norm(h + sub_layer(h)), and a norm on the embeddings. megatron: h + sub_layer(norm(h)), and a
norm at the end, which large models need in order to train at all (Megatron-LM, arXiv 1909.08053, section 5.3).

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
"""Does the second text follow the first? 0 yes, 1 no."""


class BERT(Chain):
    """Tokens to the masked-language-model loss and, with `next_sentence`, that of next-sentence prediction.

    Batch: `tokens`, `segments` (0 first text, 1 second), `mask` (1 real, 0 padding) and `labels` (-100: not asked for),
    all [B, T]; `next_sentence` [B, 1], 0 where the second text follows the first, 1 where it does not.
    """

    inside = ("mask",)
    pooled_dropout: nn.Module
    ties: ClassVar[bool] = True
    """Whether the head's table is the embeddings'."""
    last_norm_bias: ClassVar[bool] = True
    """Whether the norm that the heads read from has a bias."""

    def __init__(self, model: BertTrunk, kit: Kit, chunk: Chunk | None = None) -> None:
        chunk = chunk or Chunk.whole(model.layers)
        super().__init__(chunk)
        hidden, initial = model.hidden, Initial(0.02)
        self.norm_first = model.norm_order == "megatron"
        # The masked-language-model head reads the embeddings' table; tasks have heads of their own and need no copy on
        # the last stage.
        if chunk.first or (chunk.last and self.ties):
            self.tokens = kit.embedding(model.padded_vocabulary, hidden, initial)
        if chunk.first:
            self.positions = kit.embedding(model.padded(model.positions), hidden, initial)
            self.segments = kit.embedding(model.padded(NUM_SEGMENTS), hidden, initial)
            self.dropout = nn.Dropout(model.dropout)
        if chunk.last if self.norm_first else chunk.first:  # on the last hidden states, or on the embeddings
            self.norm = kit.norm(hidden, model.norm_epsilon, bias=self.last_norm_bias or not self.norm_first)
        bare = None if self.last_norm_bias or self.norm_first else model.layers - 1  # the block that ends in that norm
        # Megatron-LM's first weights of linears whose output is summed up are smaller, for its many unnormed sums.
        last = Initial(0.02 / math.sqrt(2 * model.layers) if self.norm_first else 0.02)
        self.blocks = blocks_of(
            chunk,
            lambda layer: Block(model, kit, layer, last, norm_first=self.norm_first, last_bias=layer != bare),
        )
        if isinstance(model, Bert):  # every chunk knows its labels; those of a fine-tuning are its class's
            self.labels = ("labels", "next_sentence") if model.next_sentence else ("labels",)
        if chunk.last:
            self.make_heads(model, kit)

    def make_heads(self, model: BertTrunk, kit: Kit) -> None:
        """The layers behind the last block and its norm."""
        assert isinstance(model, Bert), model
        hidden, initial = model.hidden, Initial(0.02)
        self.transform = kit.linear("transform", hidden, hidden, initial)
        self.transform_norm = kit.norm(hidden, model.norm_epsilon)
        # The share of labelled tokens is told: where it is small, the head computes these alone.
        shape = HeadShape(hidden, model.vocabulary, model.padded_vocabulary, initial, bias=True, labelled=ASKED_SHARE)
        self.head = kit.head_loss(shape, self.tokens)
        if model.next_sentence:
            self.pooler = kit.linear("transform", hidden, hidden, initial)
            self.pooled_dropout = nn.Identity()  # fine-tunings have a dropout there
            answers = model.padded(NUM_ANSWERS)
            self.next_sentence_head = kit.head_loss(HeadShape(hidden, NUM_ANSWERS, answers, initial, bias=True))

    def embed(self, batch: Batch) -> Hidden:
        # [B, T]; of samples of several texts [B, K, T], whose texts are rows.
        tokens, segments = batch["tokens"].flatten(0, -2), batch["segments"].flatten(0, -2)
        positions = self.context.positions(0, tokens.shape[1], tokens.device)
        h = self.tokens(tokens) + self.positions(positions) + self.segments(segments)
        return (self.dropout(h if self.norm_first else self.norm(h)),)  # [B, T, H]

    def layer(self, block: nn.Module, hidden: Hidden, batch: Batch) -> Hidden:
        # Padding is hidden from every token; what padding itself sees is read by nobody.
        seen = batch["mask"].flatten(0, -2).bool()[:, None, None, :]  # [B, 1, 1, T]
        return (block(*hidden, seen=seen),)

    def final_states(self, hidden: Hidden) -> Tensor:
        (h,) = hidden
        return self.norm(h) if self.norm_first else h

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        # A scale of 0 is a label that is not asked for, as in an evaluation of one label at a time: its head need not
        # run.
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
        """The input of the masked-language-model head: [B, T, H]."""
        return self.transform_norm(F.gelu(self.transform(h)))

    def pooled(self, h: Tensor) -> Tensor:
        """The input of a head of whole texts, made of the first token: [B, 1, H]."""
        # h[:, :1], not h[:, 0]: where a context cuts sequences each rank gives its part's first token, and only the
        # first of these has a label.
        pooled: Tensor = self.pooled_dropout(torch.tanh(self.pooler(h[:, :1])))
        return pooled

    @staticmethod
    def products(config: Config) -> Costs:
        """Without the pooler, which sees one token; the head's classes are for the tokens that are asked for."""
        model, sequence = config.model, config.data.lengths.source
        assert isinstance(model, Bert), model
        layer = sequence * (12 * model.hidden**2 + 2 * sequence * model.hidden)
        # The head computes logits of labelled tokens alone.
        classes = round(ASKED_SHARE * sequence) * model.padded_vocabulary * model.hidden
        return Costs(0, (layer,) * model.layers, sequence * model.hidden**2 + classes)

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        sequence = (config.data.lengths.source,)
        return {"tokens": sequence, "segments": sequence, "mask": sequence, "labels": sequence, "next_sentence": (1,)}
