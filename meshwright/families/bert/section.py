"""The sections of BERTs: pretrained, and fine-tuned for tasks, with the heads of published fine-tunings. No torch.

| family      | head                                                     | reads                    | data       |
|-------------|----------------------------------------------------------|--------------------------|------------|
| bert        | masked tokens, and whether the second text goes on       | masked                   | any text   |
| bert-pairs  | a class of two texts, from the pooled first token        | sentence-pairs           | MNLI, QQP  |
| bert-spans  | beginning and end of an answer: two scores a token       | squad                    | SQuAD      |
| bert-choice | a score of each answer, from the pooled first token      | race                     | RACE       |
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from meshwright.compute.models.section import TextTransformer
from meshwright.config.section import Positive, Rule, rule
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


ASKED_SHARE = 0.15
"""The share of a text's tokens that have labels in masked language modelling (Devlin et al., 2018, section 3.1)."""


class BertTrunk(TextTransformer):
    """The base of BERTs: all but the head, which is a masked language model's or a task's."""

    special_tokens: ClassVar[tuple[str, ...]] = ("[PAD]", "[CLS]", "[SEP]", "[MASK]")
    table_fields: ClassVar[tuple[str, ...]] = ("vocabulary", "positions")
    has_further_tables: ClassVar[bool] = True  # the two segments, and the classes of heads
    positions: Positive = 512
    vocabulary: Positive = 30522
    norm_epsilon: Annotated[float, Field(gt=0)] = 1e-12
    norm_order: Literal["original", "megatron"] = "original"
    """original: a norm after each residual sum; megatron: at the input of each sub-layer, and one at the end."""


class Bert(BertTrunk):
    """BERT: masked language model and, with `next_sentence`, next-sentence prediction."""

    family: Literal["bert"]
    chain: ClassVar[str] = "meshwright.families.bert.model:BERT"
    cuts_context: ClassVar[bool] = True
    reads: ClassVar[str] = "masked"
    data_kind: ClassVar[str] = "masked"
    next_sentence: bool = True
    """Whether the model also learns if the second text follows the first."""


class BertPairs(BertTrunk):
    """A BERT that tells the class of a pair of texts."""

    family: Literal["bert-pairs"]
    chain: ClassVar[str] = "meshwright.families.bert.tuned:PairsBERT"
    cuts_context: ClassVar[bool] = True
    reads: ClassVar[str] = "classified pairs"
    data_kind: ClassVar[str] = "sentence-pairs"
    classes: Positive = 3
    """The number of classes: at least the number of data.source's classes."""


class BertSpans(BertTrunk):
    """A BERT that finds the answer to a question in a passage."""

    family: Literal["bert-spans"]
    chain: ClassVar[str] = "meshwright.families.bert.tuned:SpansBERT"
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
    chain: ClassVar[str] = "meshwright.families.bert.tuned:ChoiceBERT"
    reads: ClassVar[str] = "answered choices"
    data_kind: ClassVar[str] = "race"
    choices: Positive = 4
    """Answers of a question."""
