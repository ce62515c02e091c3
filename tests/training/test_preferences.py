"""Runs on pairs of answers: the first weights' numbers are kept, and a resumed run reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config, parse_run
from meshwright.ranks.errors import LaunchError, MeshwrightError
from meshwright.training.job import train
from tests.data.dialogues import make_tokenizer
from tests.data.preferences import make_pairs
from tests.training.runs import lines_of

MEASURED = ("loss", "grad_norm", "rewards_chosen", "rewards_rejected", "reward_margin", "reward_accuracy")


def a_run(folder: Path, *words: str) -> Config:
    tokenizer = folder / "tokenizer" / "tokenizer.json"
    if not tokenizer.is_file():
        make_tokenizer(folder / "tokenizer")
        make_pairs(folder, "messages", 40)
    tree = {
        "model": {"family": "llama", "layers": 2, "hidden": 16, "heads": 2, "feed_forward": 16, "vocabulary": 320},
        "data": {"source": str(folder / "pairs.jsonl"), "tokenizer": str(tokenizer), "sequence": 64, "validation": 0.3},
        "loss": {"kind": "dpo", "beta": 0.5},
        "batch": {"global": 4, "micro": 1},
        "layout": {"transport": "torch"},
        "optimizer": {"lr": 1e-2},
        "precision": "float64",
        "steps": 6,
        "checkpoint": {"every": 3},
        "validation": {"every": 3, "batches": 1},
        "metrics": {"sinks": []},
        "device": "cpu",
        "threads": 1,
    }
    return parse_run(tree, list(words))


def numbers_of(out: Path) -> list[dict[str, Any]]:
    return [{key: line[key] for key in (*MEASURED, "validation_loss") if key in line} for line in lines_of(out)]


def test_a_resumed_run_is_the_uninterrupted_one_also_under_another_layout(tmp_path: Path) -> None:
    whole, halves, other = (tmp_path / name for name in ("whole", "halves", "other"))
    train(a_run(tmp_path), whole, resume=False)
    numbers = numbers_of(whole)
    first = numbers[0]
    assert first["loss"] == pytest.approx(0.693147180559945)
    assert first["reward_margin"] == first["rewards_chosen"] == 0
    assert numbers[-1]["loss"] < 0.5
    assert numbers[-1]["reward_margin"] == pytest.approx(
        numbers[-1]["rewards_chosen"] - numbers[-1]["rewards_rejected"], rel=1e-12
    )
    assert numbers[-1]["reward_accuracy"] > 0.5
    assert {"validation_loss"} <= numbers[2].keys()

    train(a_run(tmp_path, "steps=3"), halves, resume=False)
    kept = (halves / "reference.json").read_bytes()
    assert kept == (whole / "reference.json").read_bytes()
    train(a_run(tmp_path), halves, resume=True)
    assert (halves / "reference.json").read_bytes() == kept
    assert numbers_of(halves) == numbers

    train(a_run(tmp_path, "steps=3", "layout.data.size=2"), other, resume=False)
    kept = (other / "reference.json").read_bytes()
    train(a_run(tmp_path, "layout.pipeline.size=2", "layout.pipeline.schedule=1f1b"), other, resume=True)
    assert (other / "reference.json").read_bytes() == kept
    for mine, theirs in zip(numbers_of(other), numbers, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9, abs=1e-9)


def test_numbers_of_other_weights_pairs_or_none_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    train(a_run(tmp_path, "steps=1", "checkpoint.every=1", "validation.every=0"), out, resume=False)
    path = out / "reference.json"
    kept = path.read_text()

    def refused(*words: str) -> str:
        with pytest.raises((MeshwrightError, LaunchError)) as raised:
            train(a_run(tmp_path, "validation.every=0", *words), out, resume=True)
        return str(raised.value)

    path.unlink()
    assert (
        "reference.json: is missing; it has the numbers of the first weights, which step 1 has no longer" in refused()
    )
    path.write_text(kept.replace("[[-", "[[-1", 1))
    assert "reference.json: is damaged" in refused()
    facts = json.loads(kept)
    path.write_text(kept)
    assert "has not the numbers of the" in refused("validation.every=3")
    assert facts["weights"].startswith("2-")
