"""A run's sources and fields must suit the run's model; mistakes name the values that would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright.config import parse_run
from meshwright.ranks.errors import ConfigError

SMALL = {"layers": 2, "hidden": 16, "heads": 2, "feed_forward": 32, "vocabulary": 4096}
TRANSFORMER, T5 = SMALL | {"family": "transformer"}, SMALL | {"family": "t5"}


def mistakes(model: dict[str, Any], data: dict[str, Any], **tree: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_run({"model": model, "data": data, **tree})
    return [str(problem) for problem in caught.value.problems]


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    made = {name: tmp_path / name for name in ("a.txt", "b.txt", "a.tsv", "a.jsonl")}
    for path in made.values():
        path.write_text("")
    return {name: str(path) for name, path in made.items()}


def test_pairs_have_a_form(files: dict[str, str]) -> None:
    text, tsv, jsonl = files["a.txt"], files["a.tsv"], files["a.jsonl"]
    (line,) = mistakes(TRANSFORMER, {"source": text})
    valid = "stdlib, a tsv file, records (jsonl, json, csv, parquet), a prepared folder, or a text with data.target"
    assert line == f"data.source={text} holds no pairs of texts; valid: {valid}"
    (line,) = mistakes(TRANSFORMER, {"source": text, "target": "/no/such"})
    assert line == "data.target=/no/such is no such file; valid: a text file, whose line i goes with line i"
    for source in ("stdlib", tsv, jsonl):
        (line,) = mistakes(TRANSFORMER, {"source": source, "target": text})
        assert line == f"data.target={text} has no effect: data.source={source} holds both texts of a pair; valid: " + (
            "leave it out"
        )
    (line,) = mistakes(TRANSFORMER, {"source": tsv, "languages": ["en", "de"]})
    assert line.startswith("data.languages=[en, de] names keys of records, which data.source has not;")
    (line,) = mistakes(TRANSFORMER, {"source": "digits"})
    assert line.startswith("data.source=digits is not what a transformer reads")
    (line,) = mistakes(TRANSFORMER, {"source": "/no/such.tsv"})
    assert line.startswith("data.source=/no/such.tsv is no such file or folder")
    for data in ({"source": "stdlib"}, {"source": tsv}, {"source": text, "target": files["b.txt"]}):
        parse_run({"model": TRANSFORMER, "data": data})
    parse_run({"model": T5, "data": {"source": jsonl, "languages": ["en", "de"]}})
    parse_run({"model": T5, "data": {"source": text}})


def test_buckets_differ_in_length() -> None:
    (line,) = mistakes(TRANSFORMER, {"sequence": 60, "buckets": 9})
    assert line == "data.buckets=9 is more than the multiples of 8 up to data.sequence=60; valid: 8 or less"
    parse_run({"model": TRANSFORMER, "data": {"sequence": 60, "buckets": 8}})


def test_stages_send_messages_of_one_shape() -> None:
    (line,) = mistakes(TRANSFORMER, {"buckets": 2}, layout={"pipeline": {"size": 2}})
    assert line.startswith("data.buckets=2 makes batches of many lengths, and layout.pipeline.size=2 stages send")
    assert line.endswith("valid: 1, or layout.pipeline.size=1")


def test_buckets_are_cut_evenly() -> None:
    tensor = {"kind": "megatron", "size": 3, "sequence_parallel": True}
    model = TRANSFORMER | {"hidden": 48, "heads": 3, "feed_forward": 48, "positions": 96, "vocabulary_multiple": 3}
    (line,) = mistakes(model, {"buckets": 2, "sequence": 96}, layout={"tensor": tensor})
    rule = "does not divide the lengths of data.buckets=2, as sequence_parallel asks"
    assert line == f"layout.tensor.size=3 {rule}; valid: 1, 2, 4, 8"


@pytest.mark.parametrize(
    "model, kind, added, names",
    [
        (TRANSFORMER, {"kind": "pairs"}, 2, "<pad>, <s>"),
        (TRANSFORMER, {"kind": "spans"}, 102, "<pad>, <s> and 100 sentinels"),
        (T5, {"kind": "pairs"}, 1, "<pad>"),
        (T5, {}, 101, "<pad> and 100 sentinels"),
    ],
)
def test_special_tokens_fit_the_vocabulary(model: dict[str, Any], kind: dict[str, str], added: int, names: str) -> None:
    data, size = {"tokenizer": "bpe:300", **kind}, 300 + added
    (line,) = mistakes(model | {"vocabulary": size - 1}, data)
    rule = f"is smaller than the 300 tokens of data.tokenizer=bpe:300 and {names}"
    assert line == f"model.vocabulary={size - 1} {rule}; valid: {size} or more"
    parse_run({"model": model | {"vocabulary": size}, "data": data})
