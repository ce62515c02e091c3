"""The data sections of masked texts, and of fine-tuning tasks from official files. No torch here.

| kind           | source                                                          | read by     |
|----------------|-----------------------------------------------------------------|-------------|
| sentence-pairs | a tsv file of MNLI's or QQP's columns (GLUE)                    | bert-pairs  |
| squad          | SQuAD's json, version 1.1 or 2.0                                | bert-spans  |
| race           | RACE's folder of txt files, each a passage with questions       | bert-choice |
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from meshwright.config.section import Positive, Rule, rule
from meshwright.data.section import TokenSection
from meshwright.data.text_section import MixedSection
from meshwright.ranks.errors import Problem

if TYPE_CHECKING:
    from meshwright.config import Config


@rule("data.held_out", "data.kind")
def held_out_exists(config: Config) -> Iterator[Problem]:
    data = config.data
    assert isinstance(data, TaskSection), data
    if data.held_out is not None and not Path(data.held_out).expanduser().exists():
        yield Problem("data.held_out", data.held_out, "is no such file or folder", data.source_forms)


class MaskedData(MixedSection):
    """Two texts with some masked tokens."""

    kind: Literal["masked"]
    gives: ClassVar[str] = "masked"
    samples_by: ClassVar[str] = "meshwright.families.bert.masked:masked_samples"


class TaskSection(TokenSection):
    """The base of the tasks' sections."""

    header: ClassVar[str] = "task.json"
    prepared_by: ClassVar[str] = "meshwright.families.bert.tasks:prepare_task"
    packed_by: ClassVar[str] = "meshwright.families.bert.tasks:pack_task"
    opened_by: ClassVar[str] = "meshwright.families.bert.tasks:open_task"
    source_names: ClassVar[tuple[str, ...]] = ()
    rules: ClassVar[tuple[Rule, ...]] = (*TokenSection.rules, held_out_exists)

    held_out: str | None = None
    """The official held-out file or folder; null: the share `validation` of the source, in whole passages."""


class SentencePairData(TaskSection):
    """Two texts and the class of the pair: MNLI's train.tsv, dev_matched.tsv; QQP's train.tsv, dev.tsv."""

    kind: Literal["sentence-pairs"]
    gives: ClassVar[str] = "classified pairs"
    source_forms: ClassVar[str] = "a tsv file with MNLI's or QQP's columns, a prepared folder"


class SquadData(TaskSection):
    """A question, a passage, and the place of the answer in the passage: train-v1.1.json, dev-v2.0.json."""

    kind: Literal["squad"]
    gives: ClassVar[str] = "answered passages"
    source_forms: ClassVar[str] = "a json file of SQuAD, version 1.1 or 2.0, a prepared folder"
    stride: Positive = 128
    """Tokens between the windows over a passage that is too long for one."""


class RaceData(TaskSection):
    """A passage, a question, and several answers with one right answer: RACE/train, RACE/dev/high."""

    kind: Literal["race"]
    gives: ClassVar[str] = "answered choices"
    source_forms: ClassVar[str] = "a folder of RACE's txt files, a prepared folder"
    reads_folders_alone: ClassVar[bool] = True
