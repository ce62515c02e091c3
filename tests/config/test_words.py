"""Words of other tools are answered with our words, and the answer quotes the typed word."""

from __future__ import annotations

import re
from typing import Any

import pytest

from meshwright.config import parse_run
from meshwright.config.words import KEYS, NOTES, VALUES, ours_for_key, ours_for_value
from meshwright.ranks.errors import ConfigError
from tests.config.fields import FIELDS

THEIRS = [(word, ours) for ours, words in KEYS.items() for word in words]
EXAMPLES = {"model={{from: {}}}": "gpt2", "layout.data.sync={}": "zero1", "metrics.sinks=[{}]": "wandb"}


def said(tree: dict[str, Any], *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run(tree, words)
    return str(caught.value)


@pytest.mark.parametrize("word, ours", THEIRS, ids=[word for word, _ in THEIRS])
def test_every_answer_is_made_of_our_fields(word: str, ours: str) -> None:
    assert "." not in word
    answer = ours_for_key(word, EXAMPLES.get(ours, 2))
    if ours.startswith("--"):
        return  # an option of train: tests/test_help.py
    for part in re.sub(r" \(.*", "", answer).split(" ") if "{" not in answer and "[" not in answer else [answer]:
        field, equals, _ = part.partition("=")
        assert equals, answer
        assert field in FIELDS, answer


def test_no_word_of_theirs_is_answered_twice_or_is_ours() -> None:
    words = [word for word, _ in THEIRS]
    assert len(set(words)) == len(words)
    assert not {word for word in words if word in FIELDS}
    assert set(NOTES) <= set(KEYS)


@pytest.mark.parametrize("field", VALUES)
def test_every_choice_is_one_of_the_field(field: str) -> None:
    for theirs, ours in VALUES[field].items():
        for word in theirs.split():
            assert ours_for_value(field, word.upper()) == ours
            assert f"(did you mean {ours}?)" in said({}, f"{field}={word}"), word


@pytest.mark.parametrize(
    "word, answer",
    [
        ("tp=2", "tp=2 is an unknown key, another tool's word; valid: layout.tensor=megatron layout.tensor.size=2"),
        ("layout.pp=4", "layout.pp=4 is an unknown key, another tool's word; valid: layout.pipeline.size=4"),
        ("cp=2", "layout.context.size=2"),
        ("ep=2", "layout.data.expert=2"),
        ("dp_shard=8", "layout.data.size=8 layout.data.sync=zero3"),
        ("per_device_train_batch_size=4", "batch.micro=4"),
        ("gradient_accumulation_steps=4", "microbatches a step are batch.global / layout.data.size / batch.micro"),
        ("optimizer.learning_rate=1e-3", "valid: optimizer.lr=0.001"),
        ("zero_stage=3", "layout.data.sync=zero3"),
        ("bf16=true", "valid: precision=bf16"),
        ("bf16=false", "valid: leave it out; precision=bf16 is what bf16 would be"),
        ("gradient_checkpointing=true", "valid: memory.recompute=auto"),
        ("data.block-size=64", "valid: data.sequence=64"),
        ("n_embd=64", "valid: model.hidden=64"),
        ("lr=1e-3", "lr=0.001 is an unknown key (did you mean optimizer.lr?)"),
        ("optimiser.lr=1", "optimiser.lr=1 is of an unknown section, optimiser (did you mean optimizer?)"),
        ("optimiser={lr: 1}", "optimiser={lr: 1} is an unknown key (did you mean optimizer?)"),
        ("layout.dta.size=2", "layout.dta.size=2 is of an unknown section, layout.dta (did you mean data?)"),
    ],
)
def test_what_is_said(word: str, answer: str) -> None:
    assert answer in said({}, word)


def test_a_file_is_told_as_it_is_written() -> None:
    assert said({"optimiser": {"lr": 1}}).startswith("optimiser={lr: 1} is an unknown key (did you mean optimizer?)")
    assert said({"tp": 2}).startswith("tp=2 is an unknown key, another tool's word; valid: layout.tensor=megatron ")
