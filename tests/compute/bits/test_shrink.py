"""A run that loses ranks goes on with the other ranks, and ends with the bits of the run that lost none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.config import dump_config
from meshwright.tools.diff import difference
from meshwright.training import job
from tests.patience import PATIENCE_SECONDS
from tests.training.runs import config_for, lines_of, make_corpus, run

TREE = {"precision": "float32", "bits": "layout-free", "check": {"root_every": 1}, "batch": {"global": 12, "micro": 1}}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def undisturbed(corpus: Path) -> Path:
    return run(config_for(corpus, **TREE, layout={"data": 4, "transport": "threads"}), corpus.parent / "undisturbed")


def test_a_killed_rank_leaves_three_replicas_of_four(
    corpus: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(job, "TRAIN_WORKER", "tests.training.entries:loses_rank_2")
    layout = {"data": {"size": 4, "sync": "zero1"}, "transport": "torch"}
    out = corpus.parent / "shrunk"
    job.train(config_for(corpus, **TREE, layout=layout, restarts={"times": 1, "shrink": True}), out, resume=False)
    said = capfd.readouterr().out
    assert "4 ranks: data 4 (zero1)" in said
    assert "restart 1 of 1" in said
    assert "3 ranks: data 3 (zero1)" in said
    assert "layout.data.size=4: 3 from here on, since a rank was lost" in said
    assert [line["step"] for line in lines_of(out)] == list(range(1, 9))
    assert difference(out, undisturbed).equal
    # The run's own words stay: a resumed run has four replicas again.
    run(config_for(corpus, **TREE, steps=10, layout=layout), out, resume=True)
    assert "4 ranks: data 4 (zero1)" in capfd.readouterr().out


def test_torchrun_may_start_fewer_ranks_than_the_layout_has(corpus: Path, undisturbed: Path) -> None:
    path, out = corpus.parent / "run.yaml", corpus.parent / "joined"
    layout = {"data": 4, "transport": "torch"}
    path.write_text(dump_config(config_for(corpus, **TREE, layout=layout, restarts={"shrink": True})))
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "meshwright"]
    done = subprocess.run(
        [*words, "train", str(path), "--out", str(out)], env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 ranks: data 2" in done.stdout
    assert difference(out, undisturbed).equal
