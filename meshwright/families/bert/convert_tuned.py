"""Hugging Face's fine-tuned BERTs. A pretrained BERT can also be imported for a task.

| family      | class of transformers, also MegatronBert...   | head            |
|-------------|-----------------------------------------------|-----------------|
| bert-pairs  | BertForSequenceClassification                 | classifier      |
| bert-spans  | BertForQuestionAnswering                      | qa_outputs      |
| bert-choice | BertForMultipleChoice                         | classifier      |

An import of BertForPreTraining or BertForMaskedLM takes the trunk, and the pooler if stored; the head is initialised
from the run's seed. Our scores of spans and choices, and the norm before the spans' scores, have no bias, since a bias
would not change the softmax: an import drops Hugging Face's bias, and an export writes zeros.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from typing import Any, ClassVar

import torch

from meshwright.families.bert.convert import BertFamily
from meshwright.families.bert.section import BertChoice, BertPairs, BertSpans, BertTrunk
from meshwright.training.convert.family import Names, TensorPair, TensorShape
from meshwright.training.convert.folder import Settings


class BertTaskFamily(BertFamily):
    """The base of the tasks' families: BERT's trunk with another head."""

    # Pretraining heads, and a pooler that the task may lack, are dropped, as in transformers.
    passed_over = re.compile(r"cls\..*|bert\.embeddings\.position_ids|bert\.pooler\..*")

    copied: ClassVar = {}
    # In addition to the head, `may_lack` names only the pooler, which BertForMaskedLM does not have: if the trunk could
    # be missing, a wrong folder would pass as a new model.

    def pair(self, name: str, shape: TensorShape, model: Any, names: Names, rows: Mapping[str, int]) -> TensorPair:
        ((ours, theirs),) = self.heads.items()
        # The classifier of pairs (`head`) keeps its bias; our scores have none.
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
    architecture = "ForSequenceClassification"
    heads: ClassVar = {"head": "classifier"}
    rows: ClassVar = {**BertFamily.rows, "head": "classes"}
    may_lack = ("pooler", "head")

    def further(self, settings: Settings, stored: Set[str]) -> dict[str, object]:
        named = settings.values.get("id2label")
        # Without a stored classifier, id2label is a default and not the number of classes.
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
    architecture = "ForQuestionAnswering"
    heads: ClassVar = {"spans": "qa_outputs"}
    may_lack = ("pooler", "spans")

    def pair(self, name: str, shape: TensorShape, model: Any, names: Names, rows: Mapping[str, int]) -> TensorPair:
        # The norm before the scores; in the original order, the last block's norm.
        layer = f"blocks.{model.layers - 1}.feed_forward_norm" if model.norm_order == "original" else "norm"
        if name != f"{layer}.weight":
            return super().pair(name, shape, model, names, rows)
        return TensorPair(
            name, shape, {f"{names[layer]}.{leaf}": shape for leaf in ("weight", "bias")},
            lambda weight, bias: weight, lambda weight: [weight, torch.zeros_like(weight)],
        )  # fmt: skip


class BertChoiceFamily(BertTaskFamily):
    """BertForMultipleChoice."""

    section = BertChoice
    architecture = "ForMultipleChoice"
    heads: ClassVar = {"score": "classifier"}
    may_lack = ("pooler", "score")
