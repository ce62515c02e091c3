"""The checkpoint of the best validation is kept next to the newest and has a name. A run without improvement ends
early, and a killed and resumed run ends at the same step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.config import Config
from meshwright.ranks.errors import CheckpointError
from meshwright.training.best import best_after
from meshwright.training.checkpoint import Checkpoint, find_checkpoint
from meshwright.training.checkpoint.manifest import Best
from tests.training.runs import config_for, lines_of, make_corpus, run, run_as

LOSSES = {"2": 3.0, "4": 2.0, "6": 2.5, "8": 2.0, "10": 2.2, "12": 1.0}
"""The best is step 4: an equal loss is no improvement."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def configured(corpus: Path, **changes: Any) -> Config:
    sections = {
        "steps": 12,
        "checkpoint": {"every": 3, "keep": 1, "best": True},
        "validation": {"every": 2, "batches": 1, "patience": 3},
    }
    return config_for(corpus, **(sections | changes))


def folders(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_what_is_better() -> None:
    first = best_after(None, 2, "loss", 3.0)
    assert first == Best(2, "loss", 3.0)
    assert best_after(first, 4, "loss", 2.0) == Best(4, "loss", 2.0)
    assert best_after(first, 4, "loss", 3.0) == Best(2, "loss", 3.0, 1)
    assert best_after(Best(2, "loss", 3.0, 1), 6, "loss", math.nan) == Best(2, "loss", 3.0, 2)
    assert best_after(Best(2, "loss", 3.0, 7), 6, "loss", 2.9) == Best(6, "loss", 2.9)
    assert best_after(None, 2, "accuracy", 0.1) == Best(2, "accuracy", 0.1)
    assert best_after(Best(2, "accuracy", 0.1), 4, "accuracy", 0.2) == Best(4, "accuracy", 0.2)
    assert best_after(None, 2, "loss", math.nan) is None


@pytest.mark.parametrize("dies_in", [0, 9], ids=["undisturbed", "killed and resumed"])
def test_the_best_stays_and_the_run_ends_early(
    dies_in: int, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configured(corpus)
    failure = run_as("validating", config, tmp_path, losses=LOSSES, dies_in=dies_in)
    assert ("rank 1 was killed" in failure) == bool(dies_in)
    if dies_in:
        assert folders(tmp_path) == ["step-4", "step-6"]
        assert run_as("validating", config, tmp_path, resume=True, losses=LOSSES, dies_in=dies_in) == ""
    assert [line["step"] for line in lines_of(tmp_path)] == list(range(1, 11))
    assert folders(tmp_path) == ["step-10", "step-4"]
    assert Checkpoint(tmp_path / "checkpoints" / "step-10").manifest.progress.best == Best(4, "loss", 2.0, 3)
    said = capfd.readouterr().out
    assert "ended early, no validation was better for validation.patience=3" in said
    assert f"best: step-4, validation loss 2.0000: {tmp_path / 'best'}" in said
    for name in (tmp_path / "best", tmp_path / "checkpoints" / "best"):
        assert find_checkpoint(name) == tmp_path / "checkpoints" / "step-4"
    # The run is over: resumed, no step is made; with more patience, the run continues.
    assert run_as("validating", config, tmp_path, resume=True, losses=LOSSES) == ""
    assert folders(tmp_path) == ["step-10", "step-4"]
    patient = configured(corpus, validation={"every": 2, "batches": 1, "patience": 4})
    assert run_as("validating", patient, tmp_path, resume=True, losses=LOSSES) == ""
    assert folders(tmp_path) == ["step-12"]
    assert find_checkpoint(tmp_path / "best").name == "step-12"


def test_a_run_by_accuracy_and_its_export(corpus: Path, tmp_path: Path) -> None:
    """The validation is real, and the export command reads the name `best`."""
    validation = {"every": 2, "batches": 1, "metric": "accuracy"}
    run(configured(corpus, steps=4, validation=validation), tmp_path / "out")
    best = Checkpoint(tmp_path / "out" / "checkpoints" / folders(tmp_path / "out")[-1]).manifest.progress.best
    lines = {line["step"]: line["validation_accuracy"] for line in lines_of(tmp_path / "out") if line["step"] % 2 == 0}
    assert best is not None
    assert (best.metric, best.value) == ("accuracy", max(lines.values()))
    words = ["convert", "export", str(tmp_path / "out" / "best"), "--out", str(tmp_path / "hf")]
    answer = CliRunner().invoke(app, words)
    assert answer.exit_code == 0, answer.output
    assert f"step-{best.step}" in answer.output


def test_a_name_that_leads_nowhere(corpus: Path, tmp_path: Path) -> None:
    run(config_for(corpus, steps=1), tmp_path)
    with pytest.raises(CheckpointError, match=r"step-1 tells of no best validation: checkpoint.best=true keeps one"):
        find_checkpoint(tmp_path / "best")
    with pytest.raises(CheckpointError, match=r"nothing holds no checkpoint"):
        find_checkpoint(tmp_path / "nothing" / "best")
