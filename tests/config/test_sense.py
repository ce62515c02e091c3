"""A colleague's look: each absurd run gets one line, with a field that mends the run; intended runs get no line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.config import load_config
from meshwright.config.load import parse_run, read_run
from meshwright.config.sense import Facts, lost_by_braces, remarks
from meshwright.configs import shipped

LLAMA = {"family": "llama", "layers": 2, "hidden": 32, "heads": 4, "feed_forward": 64, "vocabulary": 257}

ABSURD: dict[str, tuple[dict[str, Any], Facts, str, str]] = {
    "vocabulary": (
        {"model": LLAMA | {"vocabulary": 50257}, "data": {"tokenizer": "bpe:2048"}},
        Facts(),
        "model.vocabulary=50257 is 24.5 times the tokenizer's 2048 tokens: 48,209 rows",
        "model.vocabulary=2048",
    ),
    "vocabulary of bytes": (
        {"model": LLAMA | {"vocabulary": 50257}},
        Facts(),
        "195.6 times the tokenizer's 257",
        "model.vocabulary=257",
    ),
    "vocabulary of a corpus that is smaller than its bpe": (
        {"model": LLAMA | {"vocabulary": 50257}, "data": {"tokenizer": "bpe:2048"}},
        Facts(tokens=278),
        "24.5 times the tokenizer's 2048",
        "model.vocabulary=2048",
    ),
    "positions": (
        {
            "model": {"family": "gpt2", "layers": 1, "hidden": 32, "heads": 4, "vocabulary": 257},
            "data": {"sequence": 64},
        },
        Facts(),
        "model.positions=1024 learned rows, of which data.sequence=64 reads the first 64",
        "model.positions=64",
    ),
    "threads": (
        {"model": LLAMA, "device": "cpu", "threads": 8},
        Facts(cores=4, local_ranks=2),
        "2 ranks x threads=8 want 16 cores, and 4 are here",
        "threads=2",
    ),
    "batch": (
        {"model": LLAMA, "batch": {"global": 64}, "steps": 3},
        Facts(samples=20),
        "batch.global=64 is more than the 20 training samples: a step takes each 3.2 times",
        "batch.global=20",
    ),
    "passes": (
        {"model": LLAMA, "batch": {"global": 10}, "steps": 5000},
        Facts(samples=100),
        "steps=5000 x batch.global=10 are 500 passes over 100 samples",
        "steps=100",
    ),
    "patience": (
        {"model": LLAMA, "validation": {"every": 100, "patience": 5}, "steps": 300},
        Facts(),
        "validation.patience=5 validations, one in 100 steps",
        "validation.every=50",
    ),
    "rate": ({"model": LLAMA, "optimizer": {"lr": 0.3}}, Facts(), "optimizer.lr=0.3 of adamw", "optimizer.lr=1e-3"),
    "no rate": ({"model": LLAMA, "optimizer": {"lr": 1e-9}}, Facts(), "moves no weight", "optimizer.lr=1e-3"),
    "decay": (
        {"model": LLAMA, "optimizer": {"lr": 0.01, "weight_decay": 20}},
        Facts(),
        "takes 20% off each matrix",
        "optimizer.weight_decay=0.1",
    ),
    "betas": (
        {"model": LLAMA, "optimizer": {"betas": [0.999, 0.9]}},
        Facts(),
        "optimizer.betas=[0.999, 0.9]",
        "optimizer.betas=[0.9,0.999]",
    ),
    "dropout": ({"model": LLAMA | {"dropout": 0.9}}, Facts(), "model.dropout=0.9 drops half", "model.dropout=0.1"),
    "restarts": (
        {"model": LLAMA, "restarts": 3, "steps": 500},
        Facts(),
        "restarts.times=3 begins again at the first step",
        "checkpoint.every=50",
    ),
    "stages": (
        {"model": LLAMA, "batch": {"global": 8, "micro": 8}, "layout": {"pipeline": 4}},
        Facts(),
        "layout.pipeline.size=4 stages have 1 microbatch a step and wait 75% of it",
        "batch.micro=1",
    ),
}
"""A run, facts, the line's words, and the word that mends the run."""


@pytest.mark.parametrize("name", ABSURD)
def test_an_absurd_run_gets_one_line_and_its_remedy_ends_it(name: str) -> None:
    tree, facts, says, remedy = ABSURD[name]
    (line,) = remarks(parse_run(tree), facts)
    assert says in line
    assert remedy.replace(",", ", ") in line or remedy in line
    assert remarks(parse_run(tree, [remedy]), facts) == []


def test_a_folders_table_is_left_as_it_is() -> None:
    config = parse_run({"model": LLAMA | {"vocabulary": 50257}}).model_copy(update={"weights": "folder"})
    (line,) = remarks(config, Facts(padding=0))
    assert line.startswith("pad_token_id=0 of folder: transformers leaves this row of the embedding without a gradient")
    assert remarks(config, Facts()) == []


@pytest.mark.parametrize(
    "tree",
    [
        {"model": LLAMA},
        {"model": LLAMA | {"vocabulary": 512}},
        {"model": "vit-digits", "data": {"source": "digits"}},
        {"model": LLAMA, "restarts": 3, "checkpoint": 10},
        {"model": LLAMA, "batch": {"global": 8}, "layout": {"pipeline": 2}},
    ],
)
def test_runs_that_are_meant_get_none(tree: dict[str, Any]) -> None:
    assert remarks(parse_run(tree), Facts(samples=10_000, cores=4, local_ranks=2)) == []


KNOWN = {"gpt2": ["model.vocabulary=50257 is 1.5 times"]}
"""GPT-2's published size, on a small tokenizer of the standard library."""


@pytest.mark.parametrize("name", shipped("runs"))
def test_shipped_runs_make_sense(name: str) -> None:
    lines = remarks(load_config(name), Facts(samples=1_000_000, cores=8, local_ranks=2))
    known = KNOWN.get(name, [])
    assert len(lines) == len(known), lines
    assert all(line.startswith(words) for line, words in zip(lines, known, strict=True))


def test_braces_say_what_they_replace() -> None:
    tree = read_run(Path("quickstart")).tree
    (line,) = lost_by_braces(tree, ("steps=3", "model={layers: 2, hidden: 96, heads: 3}"))
    assert line == (
        "model={...} replaces the run file's section, and base=gpt2-mini, vocabulary=2048, positions=128, dropout=0.1 "
        "are lost; model.layers=2 model.hidden=96 model.heads=3 change these alone"
    )
    (line,) = lost_by_braces(tree, ("data={source: x.txt}",))
    assert "tokenizer=bpe:2048, sequence=64 are lost; data.source=x.txt change" in line
    (line,) = lost_by_braces(tree, ("optimizer.schedule={warmup: 3}",))
    assert "stable=0.5, decay=sqrt, floor=0.02 are lost" in line
    for word in (
        "model={base: gpt2-small}",
        "model={family: llama}",
        "layout.tensor={kind: megatron, size: 2}",
        "batch={global: 16}",
        "restarts={times: 2}",
        "model=gpt2-mini",
        "model.layers=2",
    ):
        assert not list(lost_by_braces(tree, (word,)))


def test_explain_says_what_is_absurd_on_stderr() -> None:
    result = CliRunner().invoke(app, ["explain", "quickstart", "model={layers: 2, hidden: 96, heads: 3}"])
    assert result.exit_code == 0
    assert "model.vocabulary=50257 is 24.5 times the tokenizer's 2048 tokens" in result.stderr
    assert "times the tokenizer's" not in result.stdout
