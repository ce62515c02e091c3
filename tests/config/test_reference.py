"""`meshwright config` and docs/config.md: every field and strategy has a line, and the page equals the code's text."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.config import Config, load_config
from meshwright.config.meanings import field_meanings, first_sentence, strategy_meaning
from meshwright.config.messages import inlined, paths_in
from meshwright.config.reference import all_sections, topic_of
from meshwright.config.reference_page import page, topic_text
from meshwright.config.registry import NAMED_BY, entries
from meshwright.config.section import Section
from meshwright.ranks.errors import ConfigError

PATHS = paths_in(inlined(schema := Config.model_json_schema(), schema["$defs"]))


def said(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        topic_of(name)
    return str(caught.value)


@pytest.mark.parametrize("path", PATHS)
def test_every_field_has_a_line(path: str) -> None:
    """The string below a field has one sentence or two, short enough for a line."""
    topic = topic_of(path)
    assert topic.name == path
    for facts in topic.fields:
        assert facts.meaning, facts
        assert facts.meaning.endswith("."), facts
        assert len(facts.meaning) <= 120, facts
        assert facts.valid
    assert all(section.about for section in topic.sections)
    assert topic_text(topic, 80).startswith(f"{path}: ")


@pytest.mark.parametrize("group", NAMED_BY)
def test_every_strategy_has_a_line(group: str) -> None:
    for name in entries(group):
        assert strategy_meaning(group, name), name
    (facts,) = topic_of(NAMED_BY[group]).fields
    assert dict(facts.strategies) == {name: strategy_meaning(group, name) for name in entries(group)}


def test_a_field_takes_its_line_from_the_section_that_it_is_of() -> None:
    class Above(Section):
        """A section."""

        size: int = 1
        """Of the base."""
        other: int = 2
        """Replaced."""

    assert field_meanings(Above) == {}  # no source is found for a class in a function: no line, and no error
    assert field_meanings(type(load_config("llama").model))["hidden"] == field_meanings(type(Config().model))["hidden"]


def test_a_first_sentence_ends_where_the_next_begins() -> None:
    assert first_sentence("A decoder (Vaswani et al., 2017).\n\n    With more.") == "A decoder (Vaswani et al., 2017)."
    assert (
        first_sentence("2-D (d = 1: Optimus), 2.5-D and 3-D: blocks.") == "2-D (d = 1: Optimus), 2.5-D and 3-D: blocks."
    )


@pytest.mark.parametrize(
    "name, texts",
    [
        ("", ["optimizer       How weights are stepped.", "plan            Beside `layout: auto` alone"]),
        ("layout.data", ["size = 1", "sync = allreduce", "bucket = auto", "a word is its sync, a number is its size"]),
        ("layout.data.sync", ["default allreduce", "zero1           Optimizer states are slices"]),
        ("layout.data.sync.zero1", ["layout.data.sync=zero1: Optimizer states are slices"]),
        ("layout.tensor", ["megatron        1-D: heads", "sequence_parallel = false", "common = all"]),
        ("layout.tensor.kind", ["default none", "tesseract       2-D"]),
        ("layout.tensor.megatron.size", ["layout.tensor.size: Ranks that a layer is cut over.", "a whole number >= 1"]),
        ("model.llama", ["llama: A decoder with rotary positions", "key_value_heads = null"]),
        ("model", ["a name: axonn-100b", "meshwright config model.resnext has the fields of that kind"]),
        ("model.hidden", ["transformer, t5: H: the width", "default 512", "resnext: Channels behind the stem."]),
        ("precision", ["bf16, fp16, float32, float64: a level and its dtype"]),
        ("layout", ["auto: the planner decides when the run begins"]),
        ("plan", ["a section of cluster (a name, or a file of calibrate)"]),
        ("validation", ["a number is its every, none makes 0 of its every"]),
    ],
)
def test_what_is_said_of_a_name(name: str, texts: list[str]) -> None:
    answer = topic_text(topic_of(name), 100)
    assert not [text for text in texts if text not in answer], answer
    assert max(map(len, answer.splitlines())) <= 100


@pytest.mark.parametrize(
    "name, text",
    [
        (
            "layout.data.sze",
            "is no field (did you mean layout.data.size?); valid: size, sync, shard, expert, exchange, bucket",
        ),
        ("lr", "FIELD=lr is no field (did you mean optimizer.lr?)"),
        ("sequence", "(did you mean data.sequence or bits.sequence?)"),
        ("optimiser", "(did you mean optimizer?); valid: seed, model,"),
        ("tp", "FIELD=tp is another tool's word; valid: layout.tensor=megatron layout.tensor.size=N"),
        ("steps.x", "FIELD=steps.x is no field"),
        ("model.lama", "(did you mean llama?)"),
    ],
)
def test_a_name_that_is_none(name: str, text: str) -> None:
    assert text in said(name)


def test_the_page_is_up_to_date() -> None:
    """If not: python -m meshwright config --page > docs/config.md"""
    assert (Path(__file__).resolve().parents[2] / "docs/config.md").read_text() == page()


def test_the_page_has_every_section() -> None:
    headings = {line.removeprefix("## ") for line in page().splitlines() if line.startswith("## ")}
    assert headings == {topic.name or "The run" for topic in all_sections()}
    assert {"layout.data", "layout.tensor", "model.rope", "model.experts", "optimizer.schedule"} <= headings
