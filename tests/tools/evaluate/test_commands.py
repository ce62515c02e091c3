"""The commands eval, generate and convert, as a user or a script calls each."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.ranks.errors import CheckpointError, ConfigError
from tests.tools.evaluate.commands import run, run_json
from tests.tools.evaluate.tiny import rigged_checkpoint, tiny_checkpoint

FOLLOWS = {ord("b"): ord(" "), ord(" "): ord("c"), ord("c"): ord("a"), ord("a"): ord("t"), ord("t"): 256}


def test_perplexity(tmp_path: Path) -> None:
    step = tiny_checkpoint(tmp_path)
    (tmp_path / "text.txt").write_text("the cat sat on the mat")
    facts = run_json("eval", tmp_path, "--data", tmp_path / "text.txt", "--stride", 2, "--device", "cpu")
    assert facts["checkpoint"] == str(step)
    assert facts["data"] == str(tmp_path / "text.txt")
    assert (facts["tokens"], facts["words"], facts["stride"], facts["context"]) == (22, 6, 2, 8)
    shorter = run_json("eval", step, "--data", tmp_path / "text.txt", "--context", 4, "--device", "cpu")
    assert (shorter["stride"], shorter["context"]) == (2, 4)
    assert shorter["loss_per_token"] != facts["loss_per_token"]
    table = run("eval", step, "--data", tmp_path / "text.txt")
    assert "perplexity per word" in table
    assert "stride" in table


def test_lambada(tmp_path: Path) -> None:
    rigged_checkpoint(tmp_path, FOLLOWS)
    (tmp_path / "passages.jsonl").write_text('{"text": "see b cat"}\n{"text": "see b dog"}\n')
    facts = run_json("eval", tmp_path, "--task", "lambada", "--data", tmp_path / "passages.jsonl")
    assert (facts["passages"], facts["correct"], facts["accuracy"]) == (2, 1, 0.5)


def test_generate(tmp_path: Path) -> None:
    rigged_checkpoint(tmp_path, FOLLOWS)
    assert run("generate", tmp_path, "--prompt", "b") == "b cat\n"
    facts = run_json("generate", tmp_path, "--prompt", "b", "--tokens", 2, "--temperature", 0.01, "--seed", 3)
    assert facts["text"] == " c"


def test_convert_both_ways(tmp_path: Path) -> None:
    step = tiny_checkpoint(tmp_path / "run")
    assert str(step) in run("convert", "export", tmp_path / "run", "--out", tmp_path / "hf")
    text = run("convert", "import", tmp_path / "hf", "--out", tmp_path / "tuned" / "checkpoints" / "step-0")
    assert "vocabulary: 257" in text
    assert "to train from it" in text
    (tmp_path / "text.txt").write_text("the cat sat on the mat")
    before, after = (run_json("eval", tmp_path / name, "--data", tmp_path / "text.txt") for name in ("run", "tuned"))
    assert before["loss_per_token"] == after["loss_per_token"]


@pytest.mark.parametrize(
    "words,message",
    [
        (
            ("--task", "bleus"),
            "--task=bleus is no task; valid: perplexity, wikitext, bleu, lambada, masked-lm, images, "
            "pairs, squad, race, lm-eval:NAME",
        ),
        (("--task", "lambada"), "--task=lambada needs --data"),
        (("--task", "lambada", "--data", "x", "--stride", "2"), "--stride=2 has no effect on --task lambada"),
    ],
)
def test_mistakes_before_anything_is_read(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run("eval", tmp_path, *words)


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        run("generate", tmp_path, "--prompt", "a")
