"""BERT's fine-tunings (Devlin et al., 2018, section 4; Megatron-LM, arXiv 1909.08053, section 5.3): the same blocks,
with a task's head in place of the masked-language-model head.

| family      | batch, with tokens, segments, mask [B, T]    | logits                                    |
|-------------|----------------------------------------------|-------------------------------------------|
| bert-pairs  | answer [B, 1]: the class                     | W tanh(P h[0]): [B, classes]              |
| bert-spans  | start, end [B, 1]: places of the answer      | W h: [B, T, 2], softmax over the tokens   |
| bert-choice | answer [B, 1]; the others are [B, K, T]      | w tanh(P h[0]) of each choice: [B, K]     |

In bert-choice a sample's K texts are K rows of all layers: [B K, T, H].
"""

from __future__ import annotations

from abc import abstractmethod
from functools import reduce
from math import prod
from operator import add
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import IGNORED, Batch, Costs, Scales
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.kit import Kit
from meshwright.config import Config
from meshwright.families.bert.model import BERT
from meshwright.families.bert.section import BertChoice, BertPairs, BertTrunk

_INITIAL = Initial(0.02)


class TaskBERT(BERT):
    """The base of fine-tunings: a trunk, a pooler, a head."""

    ties = False
    labels: tuple[str, ...] = ("answer",)

    def make_heads(self, model: BertTrunk, kit: Kit) -> None:
        self.pooler = kit.linear("transform", model.hidden, model.hidden, _INITIAL)
        self.pooled_dropout = nn.Dropout(model.dropout)

    @classmethod
    def products(cls, config: Config) -> Costs:
        """Count multiplications, without heads, since these read one token or have two columns."""
        model, sequence = config.model, config.data.lengths.source
        layer = cls.tokens_per_sample(config) * (12 * model.hidden**2 + 2 * sequence * model.hidden)
        return Costs(0, (layer,) * model.num_blocks, 0)

    @classmethod
    def sample_shapes(cls, config: Config) -> dict[str, tuple[int, ...]]:
        choices = (config.model.choices,) if isinstance(config.model, BertChoice) else ()
        texts = dict.fromkeys(("tokens", "segments", "mask"), (*choices, config.data.lengths.source))
        return texts | dict.fromkeys(cls.labels, (1,))

    @classmethod
    def tokens_per_sample(cls, config: Config) -> int:
        return prod(cls.sample_shapes(config)["tokens"])


class PairsBERT(TaskBERT):
    """A classifier of two texts."""

    def make_heads(self, model: BertTrunk, kit: Kit) -> None:
        assert isinstance(model, BertPairs), model
        super().make_heads(model, kit)
        shape = HeadShape(model.hidden, model.classes, model.padded(model.classes), _INITIAL, bias=True)
        self.head = kit.head_loss(shape)

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        loss: Tensor = self.head(self.pooled(h), batch["answer"], scales["answer"])
        return loss

    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        return [cast(TableHead, self.head).num_correct(self.pooled(h), batch["answer"])]


class ScoredBERT(TaskBERT):
    """The base of tasks with labels that each choose one of several scores."""

    @abstractmethod
    def answers(self, h: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Compute the scores [B, n] for each label; the label is the number of the right score."""

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        """Sum the cross entropies of all labels, in float32 or better.

        Each label has a scale, from the number of its valid elements in the global batch.
        """
        # In half precision the sum of exponentials over a sequence would lose its small terms.
        sums = [
            F.cross_entropy(
                scores.to(torch.promote_types(scores.dtype, torch.float32)), batch[name].flatten(),
                ignore_index=IGNORED, reduction="sum",
            ) * (scales[name] / len(self.labels))
            for name, scores in self.answers(h, batch).items()
        ]  # fmt: skip
        return reduce(add, sums)

    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        answers = self.answers(h, batch).items()
        return [(scores.argmax(-1) == batch[name].flatten()).sum() for name, scores in answers]


class SpansBERT(ScoredBERT):
    """A finder of an answer's beginning and end. The loss is half the sum of both means, as published for SQuAD.

    Neither the last norm nor the linear of `scores` has a bias: the bias would add the same number to the scores of all
    tokens, without effect on a softmax over tokens. The gradient would be only rounding, different in each layout, and
    Adam would step by this rounding.
    """

    labels = ("start", "end")
    last_norm_bias = False

    def make_heads(self, model: BertTrunk, kit: Kit) -> None:
        self.spans = kit.linear("scores", model.hidden, len(self.labels), _INITIAL)

    def answers(self, h: Tensor, batch: Batch) -> dict[str, Tensor]:
        scores = self.spans(h)
        return {name: scores[..., at] for at, name in enumerate(self.labels)}


class ChoiceBERT(ScoredBERT):
    """A chooser of the best of several answers."""

    def make_heads(self, model: BertTrunk, kit: Kit) -> None:
        super().make_heads(model, kit)
        self.score = kit.linear("scores", model.hidden, 1, _INITIAL)

    def answers(self, h: Tensor, batch: Batch) -> dict[str, Tensor]:
        # [B K, 1, 1]: one score of each row, from the pooled first token.
        scores: Tensor = self.score(self.pooled(h))[:, 0, 0]
        return {"answer": scores.view(batch["tokens"].shape[:2])}
