"""The kind of data that a run reads is decided once, and the fields of other kinds have no effect."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config, dump_config, load_config, parse_config, parse_run
from meshwright.config.kinds import data_for
from meshwright.config.registry import entries
from meshwright.families.seq2seq.section import T5
from meshwright.families.vision.section import Vit
from meshwright.ranks.errors import ConfigError

GPT2, BERT, TRANSFORMER = {"family": "gpt2"}, {"family": "bert"}, {"family": "transformer"}
T5_MODEL, VIT = {"family": "t5"}, {"family": "vit"}


def kind_of(model: dict[str, Any], data: dict[str, Any]) -> str:
    return Config.model_validate({"model": model, "data": data}).data.kind


def mistakes(tree: dict[str, Any], *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_run(tree, words)
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    "model, data, kind",
    [
        (GPT2, {}, "text"),
        (BERT, {}, "masked"),
        (TRANSFORMER, {}, "pairs"),
        (TRANSFORMER, {"objective": "spans"}, "spans"),
        (TRANSFORMER, {"kind": "spans"}, "spans"),
        (T5_MODEL, {}, "spans"),
        (T5_MODEL, {"objective": "auto"}, "spans"),
        (T5_MODEL, {"objective": "pairs"}, "pairs"),
        (T5_MODEL, {"source": "a.tsv"}, "pairs"),
        (T5_MODEL, {"source": "a.txt", "target": "b.txt"}, "pairs"),
        (T5_MODEL, {"source": "a.jsonl", "languages": ["en", "de"]}, "pairs"),
        (T5_MODEL, {"source": "a.tsv", "kind": "spans"}, "spans"),
        (VIT, {"source": "digits"}, "images"),
    ],
)
def test_the_kind_follows_the_family_and_the_source(model: dict[str, Any], data: dict[str, Any], kind: str) -> None:
    assert kind_of(model, data) == kind


def test_the_kind_is_decided_once(tmp_path: Path) -> None:
    """A later change of the source does not change the kind of data that the run reads."""
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps({"source": "a", "target": "b"}) + "\n")
    config = Config.model_validate({"model": T5_MODEL, "data": {"source": str(source)}})
    source.write_text(json.dumps({"text": "a"}) + "\n")
    again = Config.model_validate(config.model_dump(by_alias=True))
    assert config.data.kind == again.data.kind == "pairs"
    path = tmp_path / "run.yaml"
    path.write_text(dump_config(config))
    assert load_config(path) == config


FIELDS = [("target", "/no/such", "/no/such"), ("languages", ["en", "de"], "[en, de]"), ("buckets", 2, "2")]


@pytest.mark.parametrize("field, value, shown", FIELDS)
@pytest.mark.parametrize("model, kind", [(GPT2, "text"), (BERT, "masked"), (TRANSFORMER, "spans"), (VIT, "images")])
def test_fields_of_pairs_have_an_effect_on_pairs_alone(
    model: dict[str, Any], kind: str, field: str, value: object, shown: str
) -> None:
    valid = "leave it out, or data.kind=pairs of a model.family=transformer, t5"
    data = {"kind": kind, field: value} | ({"source": "digits"} if kind == "images" else {})
    line = f"data.{field}={shown} has no effect on data.kind={kind}; valid: {valid}"
    assert mistakes({"model": model, "data": data}) == [line]


@pytest.mark.parametrize("field, value", [("tokenizer", "bytes"), ("sequence", 256)])
def test_images_have_no_tokens(field: str, value: object) -> None:
    kinds = ", ".join(kind for kind in entries("data") if kind != "images")
    families = (
        "gpt2, llama, gemma, phi, gpt-oss, deepseek, qwen3-next, qwen3.5, bert, bert-pairs, bert-spans, bert-choice, "
        "transformer, t5"
    )
    valid = f"{kinds} of a model.family={families}"
    line = f"data.{field}={value} has no effect on data.kind=images; valid: leave it out, or data.kind={valid}"
    assert mistakes({"model": VIT, "data": {"source": "digits", field: value}}) == [line]


@pytest.mark.parametrize(
    "model, kind, valid",
    [
        (GPT2, "pairs", "text, messages, preferences"),
        (BERT, "text", "masked"),
        (T5_MODEL, "images", "pairs, spans"),
        (VIT, "text", "images"),
    ],
)
@pytest.mark.parametrize("key", ["kind", "objective"])
def test_a_family_reads_its_kinds_alone(model: dict[str, Any], kind: str, valid: str, key: str) -> None:
    family = model["family"]
    assert f"data.kind={kind} is not what a {family} reads; valid: {valid}" in mistakes(
        {"model": model, "data": {key: kind}}
    )


def test_kinds_and_words_that_do_not_exist() -> None:
    kinds = ", ".join(entries("data"))
    assert mistakes({"data": {"kind": "pear"}}) == [
        f"data.kind=pear is none of the choices (did you mean pairs?); valid: {kinds}"
    ]
    (line,) = mistakes({"model": T5_MODEL, "data": {"tokeniser": "bytes"}})
    assert line.startswith("data.tokeniser=bytes is an unknown key (did you mean tokenizer?); valid: kind, source,")
    (line,) = mistakes({"model": T5_MODEL, "data": {"kind": "spans", "objective": "pairs"}})
    assert line.startswith("data.objective=pairs is an unknown key")


def test_a_word_switches_off_what_the_file_sets_up() -> None:
    file = {"model": TRANSFORMER, "data": {"kind": "pairs", "buckets": 3, "sequence": 64}}
    config = parse_run(file, ["model=gpt2-mini"])
    assert (config.data.kind, config.data.lengths.source) == ("text", 64)
    assert parse_run(file, ["data.objective=spans"]).data.kind == "spans"
    assert parse_run(file, ["data.kind=spans"]).data.kind == "spans"
    assert mistakes(file, "model=gpt2-mini", "data.buckets=2")[0].startswith("data.buckets=2 has no effect on")
    assert mistakes(file, "model=gpt2-mini", "data.kind=pairs") == [
        "data.kind=pairs is not what a gpt2 reads; valid: text, messages, preferences"
    ]
    assert mistakes(file, "data.kind=spans", "data.buckets=2")[0].startswith("data.buckets=2 has no effect on")


def test_a_program_may_leave_fields_of_another_kind() -> None:
    """The config of a checkpoint of version 0.1.0 has every field of every kind, and loads."""
    old = {"source": "stdlib", "tokenizer": "bytes", "sequence": 64, "objective": "auto", "validation": 0.05}
    old |= {"target": None, "languages": None, "buckets": 1}
    assert parse_config({"data": old}).data.model_dump() == {
        "kind": "text",
        "source": "stdlib",
        "mixture": (),
        "validation": 0.05,
        "tokenizer": "bytes",
        "sequence": 64,
        "split": None,
        "column": None,
        "begin": "auto",
        "end": "auto",
        "documents": "joined",
    }
    assert Config.model_validate({"model": VIT, "data": old | {"source": "digits"}}).data.kind == "images"


def test_the_section_of_a_model() -> None:
    assert data_for(T5(family="t5"), sequence=8).lengths.source == 8
    assert data_for(Vit(family="vit")).kind == "images"
