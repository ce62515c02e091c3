"""The sections of BERTs that a task is learned by, as published fine-tunings have them. No torch.

| family      | head                                                     | reads                    | read by it |
|-------------|----------------------------------------------------------|--------------------------|------------|
| bert-pairs  | a class of two texts, from the pooled first token        | sentence-pairs           | MNLI, QQP  |
| bert-spans  | where an answer begins and ends: two scores a token      | squad                    | SQuAD      |
| bert-choice | a score of each answer, from the pooled first token      | race                     | RACE       |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.errors import Problem
from meshwright.models.section import BertTrunk
from meshwright.section import Positive, Rule, rule

if TYPE_CHECKING:
    from meshwright.config import Config


class BertPairs(BertTrunk):
    """A BERT that tells the class of a pair of texts."""

    family: Literal["bert-pairs"]
    chain: ClassVar[str] = "meshwright.models.tasks.model:PairsBERT"
    cuts_context: ClassVar[bool] = True
    reads: ClassVar[str] = "classified pairs"
    data_kind: ClassVar[str] = "sentence-pairs"
    classes: Positive = 3
    """Classes that it tells apart; those of data.source, or more."""


class BertSpans(BertTrunk):
    """A BERT that finds the answer to a question in a passage."""

    family: Literal["bert-spans"]
    chain: ClassVar[str] = "meshwright.models.tasks.model:SpansBERT"
    reads: ClassVar[str] = "answered passages"
    data_kind: ClassVar[str] = "squad"


@rule("layout.tensor.kind", "model.family")
def choices_are_rows_of_one_sample(config: Config) -> Iterator[Problem]:
    tensor = config.layout.tensor
    if "branch" in dict(tensor.axes):
        rule_text = f"deals out rows, and a {config.model.family} has several of a sample"
        yield Problem("layout.tensor.kind", tensor.kind, rule_text, "none, megatron, tesseract")


class BertChoice(BertTrunk):
    """A BERT that chooses among answers to a question about a passage."""

    rules: ClassVar[tuple[Rule, ...]] = (*BertTrunk.rules, choices_are_rows_of_one_sample)

    family: Literal["bert-choice"]
    chain: ClassVar[str] = "meshwright.models.tasks.model:ChoiceBERT"
    reads: ClassVar[str] = "answered choices"
    data_kind: ClassVar[str] = "race"
    choices: Positive = 4
    """Answers of a question."""
