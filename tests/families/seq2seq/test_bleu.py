"""BLEU, perplexity and answers, by a user's commands, of a Transformer that has learned a rule."""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path

import pytest

from meshwright.config import Config
from meshwright.data.files import silent
from meshwright.families.seq2seq.load import load_sequence
from meshwright.families.seq2seq.pair_texts import pairs_for
from meshwright.ranks.errors import ConfigError, DataError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.loop import Trainer
from tests.harness import build
from tests.tools.evaluate.commands import run, run_json
from tests.tools.evaluate.tiny import save, sequence_config, tiny_checkpoint
from tests.workers import run_ranks

sacrebleu = pytest.importorskip("sacrebleu")

COLOURS = ("red", "green", "blue", "white", "black")
PAIRS_OF_COLOURS = [(f"{a} {b}", f"the {b} and then the {a} one") for a, b in product(COLOURS, COLOURS)]


def learn(mesh: Mesh, config: Config, folder: str) -> float:
    """Train until the rule is learned; return the last step's loss."""
    parts = build(config, mesh)
    opened = config.data.open(config, config.data.prepare(config, silent))
    trainer = Trainer(parts, opened.train)
    loss = 9.0
    while loss > 0.002 and trainer.step < 600:
        loss = float(str(trainer.turn(None)[0][0]["loss"]))
    save(parts, Path(folder), step=trainer.step)
    return loss


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run, its data and caches; seen.tsv has the pairs that the run did not hold out."""
    folder = tmp_path_factory.mktemp("colours")
    source = folder / "pairs.tsv"
    source.write_text("".join(f"{read}\t{written}\n" for read, written in PAIRS_OF_COLOURS))
    small = {"layers": 1, "hidden": 32, "dropout": 0.0, "label_smoothing": 0.0}
    config = sequence_config("transformer", source, dtype="float32", **small)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MESHWRIGHT_CACHE", str(folder / "cache"))
        (loss,) = run_ranks(learn, Grid((("data", 1),)), config, str(folder / "run"))
        held_out = pairs_for(load_sequence(folder / "run"), None).pairs
    seen = [pair for pair in PAIRS_OF_COLOURS if pair not in held_out]
    (folder / "seen.tsv").write_text("".join(f"{read}\t{written}\n" for read, written in seen))
    assert loss < 0.02
    return folder


def test_bleu_is_sacrebleus_of_the_generated_answers(learned: Path) -> None:
    facts = run_json("eval", learned / "run", "--task", "bleu", "--data", learned / "seen.tsv", "--samples", 9)
    assert (facts["pairs"], facts["cut"], facts["beams"], facts["length_penalty"]) == (9, 0, 4, 0.6)
    seen = [line.split("\t") for line in (learned / "seen.tsv").read_text().splitlines()[:9]]
    texts = [run_json("generate", learned / "run", "--prompt", read)["text"] for read, _ in seen]
    assert sum(text == written for text, (_, written) in zip(texts, seen, strict=True)) > 6
    assert facts["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, [[written for _, written in seen]]).score)
    assert "tok:13a" in facts["signature"]
    assert "version:" in facts["signature"]
    (learned / "wrong.jsonl").write_text(
        "".join(
            json.dumps({"source": read, "target": written.replace("one", "two")}) + "\n"
            for read, written in PAIRS_OF_COLOURS
        )
    )
    words = ("eval", learned / "run", "--task", "bleu", "--data", learned / "wrong.jsonl", "--beams", 1)
    assert 30 < run_json(*words)["bleu"] < 90
    assert "signature" in run(*words, "--samples", 2)


def test_held_out_pairs_are_the_runs_own(learned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(learned / "cache"))
    facts = run_json("eval", learned / "run", "--task", "bleu")
    assert 0 < facts["pairs"] < len(PAIRS_OF_COLOURS) / 2
    assert "the run's held-out split" in facts["data"]
    held_out = run_json("eval", learned / "run")
    assert held_out["samples"] == facts["pairs"]
    seen = run_json("eval", learned / "run", "--data", learned / "seen.tsv")
    assert seen["samples"] == len(PAIRS_OF_COLOURS) - facts["pairs"]
    assert seen["loss_per_token"] < held_out["loss_per_token"]


def test_generate_answers(learned: Path) -> None:
    whole = run("generate", learned / "run", "--prompt", "red blue", "--beams", 1)
    assert whole.startswith("the ")
    assert whole.endswith("\n")
    facts = run_json("generate", learned / "run", "--prompt", "red blue", "--beams", 1, "--tokens", 8)
    assert facts["text"] == whole[:8]


def test_a_source_beyond_the_context_is_cut(learned: Path) -> None:
    (learned / "long.tsv").write_text("red blue" + " " * 40 + "x\tthe blue and then the red one\n")
    facts = run_json("eval", learned / "run", "--task", "bleu", "--data", learned / "long.tsv")
    assert (facts["pairs"], facts["cut"]) == (1, 1)


@pytest.mark.parametrize(
    "words,message",
    [
        (("eval", "--task", "bleu", "--stride", 2), "--stride=2 has no effect on --task bleu"),
        (("eval", "--task", "bleu", "--samples", 0), "--samples=0 asks for nothing"),
        (("eval", "--task", "bleu", "--beams", 0), "--beams=0 keeps no hypothesis"),
        (("eval", "--stride", 2), "--stride=2 has no effect on an encoder-decoder"),
        (("eval", "--beams", 2), "--beams=2 has no effect on --task perplexity; valid: --task bleu"),
        (("generate", "--prompt", "a", "--temperature", 0.5), "--temperature=0.5 has no effect on a transformer"),
        (("generate", "--prompt", "a", "--temperature", 0.5, "--top-k", 3), "has no effect on a transformer"),
    ],
)
def test_mistakes(learned: Path, words: tuple[object, ...], message: str) -> None:
    command, *options = words
    data = ("--data", learned / "pairs.tsv") if command == "eval" else ()
    with pytest.raises(ConfigError, match=message):
        run(command, learned / "run", *options, *data)


def test_options_of_another_family(tmp_path: Path) -> None:
    step = tiny_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="--beams=2 has no effect on a gpt2"):
        run("generate", step, "--prompt", "a", "--beams", 2)
    with pytest.raises(ConfigError, match="--target=b has no effect on a gpt2"):
        run("eval", step, "--data", "a", "--target", "b")


def test_without_sacrebleu(learned: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics", None)
    with pytest.raises(DataError, match=r"BLEU needs sacrebleu.*pip install 'meshwright\[translation\]'"):
        run("eval", learned / "run", "--task", "bleu", "--data", learned / "pairs.tsv")
