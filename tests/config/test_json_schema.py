"""The schema of run files accepts all files that load, and refuses mistakes of a single field."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from meshwright.config import Config, load_config, model_names, parse_config, parse_run, run_text
from meshwright.config.json_schema import run_schema
from meshwright.config.yaml_text import plain_values
from meshwright.configs import SCHEMA, shipped
from meshwright.ranks.errors import ConfigError
from tests.fuzz.axes import read_cases, tree_of

RUNS = list(shipped("runs").values())
FUZZ = Path(__file__).resolve().parent.parent / "fuzz"


@cache
def validator() -> jsonschema.Draft202012Validator:
    """Return the shipped schema's validator."""
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def complaints(tree: object) -> list[str]:
    return [error.message for error in validator().iter_errors(tree)]


def test_the_shipped_schema_is_up_to_date() -> None:
    """If not: python -m meshwright config --schema > meshwright/configs/run.schema.json"""
    assert json.loads(SCHEMA.read_text()) == json.loads(json.dumps(run_schema()))
    assert SCHEMA.read_text() == json.dumps(run_schema(), indent=1) + "\n"


def test_it_is_in_the_wheel() -> None:
    project = (SCHEMA.parents[2] / "pyproject.toml").read_text()
    assert f'"{SCHEMA.name}"' in project


@pytest.mark.parametrize("run", RUNS, ids=lambda path: path.stem)
def test_shipped_runs(run: Path) -> None:
    assert complaints(plain_values(run.read_text())) == []
    text = run_text(load_config(run), "# found by a plan\n")
    first, second, *_ = text.splitlines()
    assert first == f"# yaml-language-server: $schema={SCHEMA.as_uri()}"
    assert second == "# found by a plan"
    assert complaints(plain_values(text)) == []
    assert parse_config(plain_values(text)) == load_config(run)


def test_every_model_by_its_name() -> None:
    for name in model_names():
        for model in (
            name,
            {"base": name, "dropout": 0.0},
            plain_values(shipped("models")[name].read_text()),
        ):
            assert complaints({"model": model}) == [], model


def test_every_layout_of_the_fuzz() -> None:
    """The schema accepts each pair of values of all axes, and a sixth of the cases also as a run file's text."""
    trees = [tree_of(case) for case in read_cases(FUZZ / "covering.jsonl")]
    for tree in trees:
        assert complaints(tree) == [], tree
    for tree in trees[::6]:
        written = plain_values(run_text(parse_config(tree)))
        assert complaints(written) == [], written


ACCEPTED = """
{}
{precision: bf16}
{precision: {level: O1, dtype: bf16}}
{layout: {data: 4, pipeline: 2, context: 2, tensor: none}}
{layout: {data: zero1}}
{layout: {pipeline: 1f1b, context: ring}}
{layout: {tensor: {kind: megatron, size: 2}}}
{layout: {order: [row:2, col:2, row, col], tensor: {kind: tesseract, q: 4}}, model: {heads: 4, vocabulary: 257}}
{optimizer: sgd}
{optimizer: {schedule: cosine, betas: [0.9, 0.99], clip: null}}
{precision: bf16, memory: {offload: host, recompute: {every: 2}}}
{memory: {recompute: 2}}
{memory: {recompute: selective, offload: {bucket: 16M}}}
{memory: {logits: 64M}, layout: {data: {size: 2, bucket: 16M}}}
{memory: {logits: auto}, layout: {data: {size: 2, bucket: auto}}}
{checkpoint: 10, validation: 5, check: 2, logging: debug}
{validation: none, check: null}
{validation: false}
{data: unicode}
{data: {source: stdlib, tokenizer: "bpe:4096"}}
{data: {mixture: {stdlib: 3, unicode: 1}}}
{data: {mixture: [[stdlib, 3]]}}
{data: {kind: text, target: null, documents: separate}}
{model: t5-tiny, data: {objective: spans}}
{model: t5-tiny, data: {kind: spans, sequence: 64}}
{model: t5-tiny, data: {objective: auto, buckets: 2}}
{model: gpt2-small}
{model: {base: gpt2-small, layers: 2}}
{model: {hidden: 64, heads: 4}}
{model: {family: llama, rope: {theta: 5e5}, experts: {count: 4}}}
{model: {family: llama, rope: {kind: yarn, factor: 4, original: 32}}}
{model: {base: llama-mini, biases: [query-key-value], key_value_heads: null}}
{model: {base: bert-tiny, family: bert-pairs, classes: 3}, data: {source: ., validation: 0.1}}
{metrics: {sinks: [], peak_flops: 1e12}}
{metrics: {tensorboard: false}}
{batch: {global: 16, micro: auto}, steps: 10, seed: 0, weights: null}
{layout: {ranks_per_node: auto, transport: torch}, threads: auto, device: cpu}
""".strip().splitlines()

REFUSED = """
{stepz: 3}
{steps: 0}
{steps: 2.5}
{steps: true}
{steps: many}
{tp: 2}
{seed: -1}
{precision: bf61}
{precision: {level: O3}}
{layout: none}
{layout: {data: alreduce}}
{layout: {data: 0}}
{layout: {data: 2.5}}
{layout: {data: true}}
{layout: {data: null}}
{layout: {data: {sze: 2}}}
{layout: {data: {size: 2, bucket: 16X}}}
{layout: {tensor: {}}}
{layout: {tensor: megatron}}
{layout: {tensor: 2}}
{layout: {tensor: {kind: megatron}}}
{layout: {tensor: {kind: megatron, size: 2, q: 2}}}
{layout: {tensor: {kind: nothing}}}
{optimizer: adam}
{optimizer: {lr: 0}}
{optimizer: {betas: [0.9]}}
{optimizer: {betas: [0.9, 2]}}
{optimizer: {schedule: cosign}}
{memory: {recompute: {every: 0}}}
{memory: {recompute: sometimes}}
{memory: {offload: nowhere}}
{validation: some}
{validation: true}
{data: 5}
{data: {source: 5}}
{data: {mixture: {stdlib: 0}}}
{data: {kind: text, target: a.txt}}
{data: {kind: words}}
{model: gpt2-smal}
{model: 3}
{model: {base: gpt2-smal}}
{model: {base: gpt2-small, rope: {theta: 5}}}
{model: {base: gpt2-small, layrs: 2}}
{model: {family: llama, next_sentence: true}}
{model: {family: llama, rope: {kind: linear}}}
{model: {family: nothing}}
{model: {base: gpt2-small, from: x}}
{metrics: {sinks: [nothing]}}
{plan: {cluster: summit}}
{plan: {cluster: summit}, layout: {data: 2}}
""".strip().splitlines()


@pytest.mark.parametrize("text", ACCEPTED)
def test_what_is_loaded_is_accepted(text: str) -> None:
    tree: dict[str, Any] = plain_values(text)
    parse_config(tree)
    assert complaints(tree) == []


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_a_mistake_is_refused(text: str) -> None:
    tree: dict[str, Any] = plain_values(text)
    with pytest.raises(ConfigError):
        parse_run(tree)
    assert complaints(tree) != []


def test_an_open_layout_and_its_plan() -> None:
    assert complaints({"layout": "auto"}) == []
    assert complaints({"layout": "auto", "plan": {"cluster": "summit", "devices": 4}}) == []
    assert complaints({"layout": "auto", "plan": {"clutser": "summit"}}) != []
    assert complaints({"model": {"from": "HuggingFaceTB/SmolLM2-135M", "dropout": 0.1}}) == []  # of a folder elsewhere


def test_every_field_has_a_line_and_a_default_that_it_accepts() -> None:
    def check(schema: dict[str, Any], where: str) -> None:
        for name, field in schema["properties"].items():
            if "enum" not in field and name != "objective":
                assert field.get("description"), f"{where}.{name}"

    schema = run_schema()
    check(schema, "")
    for name, section in schema["$defs"].items():
        check(section, name)
    assert complaints(Config().model_dump(mode="json", by_alias=True)) == []
