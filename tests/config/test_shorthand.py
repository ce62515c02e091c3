"""A single value instead of a section, in a file and as a word, alone and next to words on the section's fields."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.api import load
from meshwright.config import Config, parse_config, parse_run
from meshwright.config.load import load_undecided, read_run
from meshwright.config.section import field_of
from meshwright.config.shorthand import SHORTHANDS
from meshwright.configs import shipped
from meshwright.ranks.errors import ConfigError

MEGATRON = {"layout": {"data": {"size": 2, "sync": "zero1"}, "tensor": {"kind": "megatron", "size": 2}}}


def said(tree: dict[str, Any], *words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_run(tree, words)
    return str(caught.value)


@pytest.mark.parametrize(
    "tree, words, wanted",
    [
        ({}, ["layout.tensor=megatron", "layout.tensor.size=2"], {"layout.tensor.kind": "megatron"}),
        ({}, ["layout.tensor.size=2", "layout.tensor=megatron"], {"layout.tensor.size": 2}),
        ({}, ["layout.data=4"], {"layout.data.size": 4}),
        ({}, ["layout.data=4", "layout.data=zero1"], {"layout.data.size": 4, "layout.data.sync": "zero1"}),
        ({}, ["layout.pipeline=2"], {"layout.pipeline.size": 2}),
        ({}, ["layout.pipeline=2", "layout.pipeline=1f1b"], {"layout.pipeline.schedule": "1f1b"}),
        ({}, ["layout.context=2", "layout.context=ring", "model.dropout=0"], {"layout.context.kind": "ring"}),
        ({}, ["layout={data: 2, pipeline: 2}"], {"layout.data.size": 2, "layout.pipeline.size": 2}),
        ({"layout": {"data": 4, "tensor": "none"}}, [], {"layout.data.size": 4, "layout.tensor.kind": "none"}),
        ({"layout": {"tensor": "megatron"}}, ["layout.tensor.size=2"], {"layout.tensor.size": 2}),
        ({"layout": {"data": 2}}, ["layout.data.sync=zero1"], {"layout.data.size": 2, "layout.data.sync": "zero1"}),
        (MEGATRON, ["layout.data=4"], {"layout.data.size": 4, "layout.data.sync": "zero1"}),
        (MEGATRON, ["layout.data=1"], {"layout.data.size": 1}),  # as layout.data.size=1: the file's sync has no effect
        (MEGATRON, ["layout.tensor=none"], {"layout.tensor.kind": "none", "layout.data.sync": "zero1"}),
        (MEGATRON, ["layout.tensor=4"], {"layout.tensor.kind": "megatron", "layout.tensor.size": 4}),
        (MEGATRON, ["layout.tensor.q=2", "layout.tensor.kind=tesseract"], {"layout.tensor.q": 2}),
        ({}, ["optimizer=sgd"], {"optimizer.name": "sgd"}),
        ({"optimizer": "muon"}, ["optimizer.lr=1"], {"optimizer.name": "muon", "optimizer.lr": 1}),
        ({}, ["optimizer.schedule=cosine"], {"optimizer.schedule.decay": "cosine"}),
        ({}, ["memory.offload=host", "precision=bf16"], {"memory.offload.to": "host"}),
        ({"precision": "bf16"}, ["precision.level=O1"], {"precision.level": "O1", "precision.dtype": "bf16"}),
        ({}, ["data=unicode"], {"data.source": "unicode", "data.kind": "text"}),
        ({"data": "unicode"}, ["data.sequence=64"], {"data.source": "unicode", "data.sequence": 64}),
        ({}, ["checkpoint=10", "validation=5"], {"checkpoint.every": 10, "validation.every": 5}),
        ({}, ["logging=debug"], {"logging.level": "debug"}),
        ({"validation": "none", "check": None}, [], {"validation.every": 0, "check.every": 0}),
        ({"validation": {"every": 5, "batches": 4}}, ["validation=none"], {"validation.every": 0}),
        ({"validation": {"every": 5, "batches": 4}}, ["validation=null"], {"validation.every": 0}),
        ({"validation": 5}, ["validation.batches=2"], {"validation.every": 5, "validation.batches": 2}),
    ],
)
def test_a_value_stands_for_a_section(tree: dict[str, Any], words: list[str], wanted: dict[str, Any]) -> None:
    config = parse_run({"model": {"heads": 12, "hidden": 192}} | tree, words)
    assert {field: field_of(config, field) for field in wanted} == wanted


def test_a_program_may_write_it_too() -> None:
    assert parse_config({"layout": {"data": 2}, "validation": "none"}).layout.data.size == 2


def test_every_shorthand_names_a_section_and_fields_of_it() -> None:
    tree = Config().model_dump(by_alias=True)
    for path, shorthand in SHORTHANDS.items():
        section = field_of(tree, path)
        known = set(section) | ({"size"} if path == "layout.tensor" else set())  # of the kinds that cut
        assert {shorthand.word, shorthand.number, shorthand.off} - {""} <= known, path


@pytest.mark.parametrize(
    "tree, words, text",
    [
        ({}, ["layout.tensor=4"], "layout.tensor.kind is missing; valid: none, megatron, tesseract, subgraph"),
        ({}, ["layout.tensor=megatron"], "layout.tensor.size is missing; valid: a whole number >= 1"),
        ({}, ["layout.data=true"], "layout.data=true is not a section"),
        ({}, ["layout.data=2.5"], "layout.data.size=2.5 is not a whole number"),
        ({}, ["layout.data=alreduce"], r"layout.data.sync=alreduce is none of the choices (did you mean allreduce?)"),
        ({"layout": "none"}, [], "ranks_per_node, or auto"),
        (
            {},
            ["validation=some"],
            "is not a section; valid: a section with the keys every, batches, metric, patience, or none, or its eve",
        ),
        ({}, ["layout.data={}", "layout.data=[1]"], "expert, exchange, bucket, or its size, a number, or its sync"),
        # Words that belong together are not dropped.
        ({}, ["layout.tensor={kind: megatron, size: 2}", "layout.tensor=none"], "layout.tensor.size=2 is an unknown"),
        (MEGATRON, ["layout.tensor.size=2", "layout.tensor=tesseract"], "layout.tensor.size=2 is an unknown key"),
    ],
)
def test_what_stands_for_nothing(tree: dict[str, Any], words: list[str], text: str) -> None:
    assert text in said(tree, *words)


def test_the_layout_may_be_open_by_a_word(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("steps: 7\nlayout: {data: {size: 64}}\nplan: {devices: 4}\n")
    run = read_run(path, ["layout=auto", "plan.cluster=two-cores", "seed=2"])
    assert run.auto
    assert run.tree == {"steps": 7}
    assert run.plan == {"devices": 4, "cluster": "two-cores"}
    assert run.words == ("seed=2",)
    assert load_undecided(path, ["layout=auto"]).layout.data.size == 1


def test_an_open_layout_asks_for_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for ask in (lambda: load("quickstart", ["layout=auto"]), lambda: load({"layout": "auto"})):
        with pytest.raises(ConfigError, match=r"layout: auto asks for plan: \{cluster: ...\}"):
            ask()


def test_plan_without_an_open_layout_is_a_mistake() -> None:
    text = "plan={cluster: summit} has no effect where the layout is written; valid: leave it out, or layout: auto"
    assert said({"plan": {"cluster": "summit"}}) == text
    assert said({}, "plan.cluster=summit").startswith("plan.cluster=summit has no effect where the layout is written")
    assert "restarts, plan" in said({"stepz": 3})


def test_a_run_is_found_by_its_name_and_a_file_of_that_name_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert {"quickstart", "gpt2", "llama"} <= set(shipped("runs"))
    assert load("quickstart").steps == 400
    assert load(Path("quickstart")).steps == 400
    (tmp_path / "quickstart").write_text("steps: 3\n")
    assert load("quickstart").steps == 3
    with pytest.raises(ConfigError) as caught:
        load("quikstart")
    names = ", ".join(shipped("runs"))
    rule = "run=quikstart is no such file (did you mean quickstart?)"
    assert str(caught.value) == f"{rule}; valid: a YAML file, or one of our runs by its name: {names}"
