"""Hugging Face's fine-tuned BERTs, and a task begun from a BERT that was only pre-trained.

| family      | class of transformers, and its Megatron twin | its head        |
|-------------|-----------------------------------------------|-----------------|
| bert-pairs  | BertForSequenceClassification                 | classifier      |
| bert-spans  | BertForQuestionAnswering                      | qa_outputs      |
| bert-choice | BertForMultipleChoice                         | classifier      |

From BertForPreTraining or BertForMaskedLM the trunk is taken, with the pooler where there is one; the head is drawn
from the run's seed. Their biases of spans' and choices' scores, and of the norm before spans' scores, change no
softmax: ours have none, and zeros go out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any, ClassVar

import torch

from meshwright.convert.family import Names, TensorPair, TensorShape
from meshwright.convert.folder import Settings
from meshwright.families.bert.convert import OUTSIDE, BertFamily
from meshwright.families.bert.model import NUM_SEGMENTS
from meshwright.families.bert.section import BertChoice, BertPairs, BertSpans, BertTrunk


class BertTaskFamily(BertFamily):
    """The base: BERT's trunk with another head."""

    architecture: ClassVar[str]
    """The end of the class's name in transformers."""
    head: ClassVar[tuple[str, str]]
    """Our layer of the head, and theirs."""
    # The pretraining heads, and a pooler that this task may not have: a fine-tuning drops them, as transformers does.
    passed_over = re.compile(r"cls\..*|bert\.embeddings\.position_ids|bert\.pooler\..*")

    def names(self, model: BertTrunk) -> Names:
        ours, theirs = self.head
        outside = {name: OUTSIDE[name] for name in ("tokens", "positions", "segments", "pooler")}
        return {**self.trunk_names(model), **outside, ours: theirs}

    def rows(self, model: BertTrunk) -> Mapping[str, int]:
        return {"tokens": model.vocabulary, "positions": model.positions, "segments": NUM_SEGMENTS}

    def copies(self, model: BertTrunk) -> dict[str, str]:
        return {}

    def may_draw(self, name: str) -> bool:
        # A BertForMaskedLM has no pooler; the trunk may never be drawn, or a wrong folder would pass as a fresh model.
        return name.partition(".")[0] in ("pooler", self.head[0])

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        fields = super().further(settings, stored)
        return {"norm_order": fields["norm_order"]}

    def architecture_of(self, model: BertTrunk) -> str:
        return self.architecture

    def pair(self, name: str, shape: TensorShape, model: Any, names: Names, rows: Mapping[str, int]) -> TensorPair:
        ours, theirs = self.head
        # `head` has a bias and keeps it; scores have none, so theirs is dropped and zeros go out.
        if name != f"{ours}.weight" or ours == "head":
            return super().pair(name, shape, model, names, rows)
        out = (shape[1], shape[0])
        return TensorPair(
            name, shape, {f"{theirs}.weight": out, f"{theirs}.bias": (shape[1],)},
            lambda weight, bias: weight.t(), lambda weight: [weight.t(), torch.zeros_like(weight[0])],
        )  # fmt: skip


class BertPairsFamily(BertTaskFamily):
    """BertForSequenceClassification."""

    section = BertPairs
    architecture, head = "ForSequenceClassification", ("head", "classifier")

    def rows(self, model: BertTrunk) -> Mapping[str, int]:
        assert isinstance(model, BertPairs), model
        return {**super().rows(model), "head": model.classes}

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        named = settings.values.get("id2label")
        # id2label counts classes where the weights of a classifier are there, and means nothing elsewhere.
        classes = {"classes": len(named)} if isinstance(named, dict) and "classifier.weight" in stored else {}
        return {**super().further(settings, stored), **classes}

    def further_settings(self, model: BertTrunk) -> dict[str, object]:
        assert isinstance(model, BertPairs), model
        numbers = range(model.classes)
        labels = {"id2label": {str(n): f"LABEL_{n}" for n in numbers}, "label2id": {f"LABEL_{n}": n for n in numbers}}
        return super().further_settings(model) | labels


class BertSpansFamily(BertTaskFamily):
    """BertForQuestionAnswering."""

    section = BertSpans
    architecture, head = "ForQuestionAnswering", ("spans", "qa_outputs")

    def pair(self, name: str, shape: TensorShape, model: Any, names: Names, rows: Mapping[str, int]) -> TensorPair:
        # The norm before the scores, which is the last block's own in the original order.
        layer = f"blocks.{model.layers - 1}.feed_forward_norm" if model.norm_order == "original" else "norm"
        if name != f"{layer}.weight":
            return super().pair(name, shape, model, names, rows)
        return TensorPair(
            name, shape, {f"{names[layer]}.{kind}": shape for kind in ("weight", "bias")},
            lambda weight, bias: weight, lambda weight: [weight, torch.zeros_like(weight)],
        )  # fmt: skip


class BertChoiceFamily(BertTaskFamily):
    """BertForMultipleChoice."""

    section = BertChoice
    architecture, head = "ForMultipleChoice", ("score", "classifier")
