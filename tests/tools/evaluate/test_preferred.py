"""`eval` of a run on pairs of answers: loss, accuracy and rewards of the held-out pairs, by the paper's equation."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from meshwright.data.files import silent
from meshwright.data.packing import corpus_for
from meshwright.ranks.environment import cache_folder
from meshwright.ranks.errors import CheckpointError, ConfigError, DataError
from meshwright.tools.evaluate.load import Facts, load_text
from meshwright.tools.evaluate.tasks import Question, measure
from meshwright.training.job import train
from meshwright.training.references import read_tables
from tests.compute.models.preferring import paper_loss
from tests.training.runs import lines_of, preferring_run


def asked(run: Path, **options: object) -> Facts:
    return measure("perplexity", Question(run, "cpu", **options), silent)[1]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferred")
    words = ("validation.every=6", "validation.batches=1000", "batch.global=1", "loss.label_smoothing=0.1")
    train(preferring_run(folder, *words), folder / "run", resume=False)
    return folder / "run"


def test_the_numbers_are_the_papers_and_the_runs_own(run: Path) -> None:
    facts, loaded = asked(run), load_text(run, "cpu")
    data, preference = loaded.config.data, loaded.config.loss
    corpus = corpus_for(data, cache_folder(), silent)
    pairs, _ = data.samples(loaded.config, corpus, "validation")
    table = read_tables(run / "reference.json", data.fingerprint(corpus.folder), "")["validation"]
    batch = pairs.held_out(0, len(pairs))
    with torch.no_grad():
        logits = loaded.head.logits(loaded.model.hidden(batch["tokens"].flatten(0, 1))).unflatten(0, (-1, 2))
        loss = paper_loss(logits, batch["labels"], table, preference.beta, preference.label_smoothing)
        chances = logits.log_softmax(-1).gather(-1, batch["labels"].clamp(min=0)[..., None])[..., 0]
    rewards = preference.beta * ((chances * (batch["labels"] != -100)).sum(-1) - table)
    assert facts["pairs"] == len(pairs) > 4
    assert facts["loss"] == pytest.approx(float(loss), rel=1e-12)
    assert facts["rewards_chosen"] == pytest.approx(float(rewards[:, 0].mean()), rel=1e-11)
    assert facts["rewards_rejected"] == pytest.approx(float(rewards[:, 1].mean()), rel=1e-11)
    assert facts["reward_margin"] == pytest.approx(float((rewards[:, 0] - rewards[:, 1]).mean()), rel=1e-11)
    assert facts["reward_accuracy"] == float((rewards[:, 0] > rewards[:, 1]).double().mean()) > 0.5
    line = lines_of(run)[-1]
    assert facts["loss"] == pytest.approx(line["validation_loss"], rel=1e-12)
    assert facts["reward_accuracy"] == pytest.approx(line["validation_accuracy"], rel=1e-12)


def test_what_cannot_be_measured_is_refused_by_name(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--context=32 is another length than that of the rows.*; valid: 64"):
        asked(run, context=32)
    with pytest.raises(ConfigError, match="--stride=4 has no effect on dialogues"):
        asked(run, stride=4)
    step = tmp_path / "elsewhere" / "checkpoints" / "step-6"
    shutil.copytree(run / "checkpoints" / "step-6", step)
    with pytest.raises(CheckpointError, match=r"reference\.json: is missing; it has the first weights' numbers"):
        asked(step)
    train(preferring_run(tmp_path, "steps=1", "validation.every=0"), tmp_path / "run", resume=False)
    with pytest.raises(CheckpointError, match=r"has not the numbers of the .* held-out pairs; a run with validation"):
        asked(tmp_path / "run")
    all_trained = preferring_run(tmp_path, "steps=1", "validation.every=0", "data.validation=0")
    train(all_trained, tmp_path / "all", resume=False)
    with pytest.raises(DataError, match="held nothing out"):
        asked(tmp_path / "all")


def test_a_text_has_a_perplexity_as_ever(run: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("say apple\n" * 20)
    assert asked(run, data=str(tmp_path / "text.txt"))["perplexity_per_token"] > 1
