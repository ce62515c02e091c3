"""Masked accuracy equals a plain count with any batches, and is measured on the run's held-out split; mistakes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.compute.model import IGNORED, counts_of
from meshwright.config import Config
from meshwright.config.schema import OptimizerSection, Precision
from meshwright.config.schema import Validation as Validating
from meshwright.data.packing import prepare
from meshwright.families.bert.data_section import MaskedData
from meshwright.families.bert.evaluate_masked import masked_accuracy
from meshwright.families.bert.masked import MaskedSamples
from meshwright.families.bert.section import Bert
from meshwright.families.bert.specials import specials_of
from meshwright.ranks.errors import CheckpointError, ConfigError, DataError
from meshwright.ranks.mesh import solo_mesh
from meshwright.tools.evaluate.load import LoadedText, load_text
from meshwright.tools.evaluate.tasks import finite
from meshwright.tools.evaluate.texts import stream_for
from tests.harness import build
from tests.tools.evaluate.commands import run, run_json
from tests.tools.evaluate.tiny import lively, save, tiny_checkpoint

TEXT = "".join(f"line {number} of {number * number} in all\n" for number in range(40))


def bert_config(*, next_sentence: bool = True, vocabulary: int = 261, data: MaskedData | None = None) -> Config:
    model = Bert(
        family="bert", layers=2, hidden=16, heads=2, positions=32, vocabulary=vocabulary, dropout=0.1,
        next_sentence=next_sentence,
    )  # fmt: skip
    return Config(
        model=model,
        data=data or MaskedData(kind="masked", sequence=16),
        precision=Precision(level="O0", dtype="float64"),
        optimizer=OptimizerSection(name="sgd"),
        seed=3,
    )


def bert_checkpoint(folder: Path, config: Config | None = None, *, step: int = 1) -> Path:
    return save(lively(build(config or bert_config(), solo_mesh(torch.device("cpu")))), folder, step=step)


@pytest.fixture
def text(tmp_path: Path) -> str:
    (tmp_path / "text.txt").write_text(TEXT)
    return str(tmp_path / "text.txt")


@torch.no_grad()
def plainly(loaded: LoadedText, tokens: np.ndarray, *, next_sentence: bool) -> dict[str, float]:
    """Count sample by sample, from whole logits."""
    specials = specials_of(loaded.tokenizer)
    samples = MaskedSamples(
        tokens, specials, loaded.context, loaded.config.seed, next_sentence=next_sentence, name="text"
    )
    model: Any = loaded.model
    facts = dict.fromkeys(("asked", "right", "loss", "next_asked", "next_right", "next_loss"), 0.0)
    for number in range(len(samples)):
        batch = samples.held_out(number, 1)
        h = model.hidden_states(batch)[0]
        asked = batch["labels"] != IGNORED
        logits, labels = model.head.logits(model.transformed(h))[asked], batch["labels"][asked]
        facts["asked"] += len(labels)
        facts["right"] += int((logits.argmax(-1) == labels).sum())
        facts["loss"] += float(F.cross_entropy(logits, labels, reduction="sum"))
        if next_sentence:
            answer = model.next_sentence_head.logits(model.pooled(h))[0]
            facts["next_asked"] += 1
            facts["next_right"] += int(answer.argmax() == batch["next_sentence"])
            facts["next_loss"] += float(F.cross_entropy(answer, batch["next_sentence"][0]))
    return facts


@pytest.mark.parametrize("next_sentence", [True, False])
def test_equals_a_plain_count(tmp_path: Path, text: str, next_sentence: bool) -> None:
    loaded = load_text(bert_checkpoint(tmp_path, bert_config(next_sentence=next_sentence)), "cpu", reads="masked")
    stream = stream_for(loaded, text)
    wanted = plainly(loaded, stream.tokens, next_sentence=next_sentence)
    for batch_tokens in (8192, 100):
        found = masked_accuracy(loaded, stream, batch_tokens=batch_tokens)
        assert (found["asked"], found["right"]) == (wanted["asked"], wanted["right"])
        assert found["loss"] * found["asked"] == pytest.approx(wanted["loss"], rel=1e-10)
        assert ("next_sentence_asked" in found) == next_sentence
        if next_sentence:
            asked, right = found["next_sentence_asked"], found["next_sentence_right"]
            assert (asked, right) == (wanted["next_asked"], wanted["next_right"])
            assert found["next_sentence_loss"] * asked == pytest.approx(wanted["next_loss"], rel=1e-10)
    facts = finite(found)
    assert facts["accuracy"] == wanted["right"] / wanted["asked"]
    assert ("next_sentence_accuracy" in facts) == next_sentence


def test_without_data_the_samples_of_the_runs_validation(tmp_path: Path, text: str) -> None:
    prepare(text, "bytes", tmp_path / "ready", 0.2)
    data = MaskedData(kind="masked", source=str(tmp_path / "ready"), sequence=16, validation=0.2)
    config = bert_config(data=data).model_copy(update={"validation": Validating(every=1)})
    folder = bert_checkpoint(tmp_path / "run", config)
    loaded = load_text(folder, "cpu", reads="masked")
    found = masked_accuracy(loaded, stream_for(loaded, None))
    small = config.model_copy(update={"batch": config.batch.model_copy(update={"global_": 1})})
    held_out = config.data.open(small, tmp_path / "ready").held_out
    assert held_out is not None
    batch = held_out.held_out(0, len(held_out))
    assert (found["samples"], found["asked"]) == (len(held_out), counts_of(batch, ("labels",))[0])
    with torch.no_grad():
        assert found["right"] == loaded.model.num_correct(loaded.model.hidden_states(batch)[0], batch)[0]


def test_the_command(tmp_path: Path, text: str) -> None:
    step = bert_checkpoint(tmp_path)
    facts = run_json("eval", tmp_path, "--task", "masked-lm", "--data", text, "--device", "cpu")
    assert (facts["checkpoint"], facts["task"], facts["context"]) == (str(step), "masked-lm", 16)
    assert 0 <= facts["accuracy"] <= 1
    assert facts["asked"] > 100
    again = run_json("eval", tmp_path, "--task", "masked-lm", "--data", text, "--device", "cpu")
    assert again == facts
    longer = run_json("eval", tmp_path, "--task", "masked-lm", "--data", text, "--device", "cpu", "--context", 32)
    assert longer["samples"] < facts["samples"]
    assert "next sentence accuracy" in run("eval", tmp_path, "--task", "masked-lm", "--data", text)
    with pytest.raises(ConfigError, match="--stride=2 has no effect on --task masked-lm; valid: --task perplexity"):
        run("eval", tmp_path, "--task", "masked-lm", "--data", text, "--stride", 2)


def test_mistakes(tmp_path: Path, text: str) -> None:
    with pytest.raises(CheckpointError, match="is a gpt2: this needs a bert"):
        load_text(tiny_checkpoint(tmp_path / "gpt"), "cpu", reads="masked")
    with pytest.raises(CheckpointError, match="is a bert: this needs a gpt2"):
        run("eval", bert_checkpoint(tmp_path / "bert"), "--data", text)
    loaded = load_text(bert_checkpoint(tmp_path / "small", bert_config(vocabulary=260)), "cpu", reads="masked")
    with pytest.raises(CheckpointError, match="has 261 tokens with BERT's special ones, and the model knows 260"):
        masked_accuracy(loaded, stream_for(loaded, text))
    loaded = load_text(bert_checkpoint(tmp_path / "imported", step=0), "cpu", reads="masked")
    with pytest.raises(DataError, match="give --data"):
        stream_for(loaded, None)
