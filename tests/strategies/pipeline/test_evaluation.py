"""A run with stages is evaluated, verified and queried like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshwright.cli import app
from meshwright.config import Config
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.tools.verify import job
from meshwright.tools.verify.job import verify
from meshwright.training.loop import validate
from tests.harness import build
from tests.oracle.tensor import BLOCKS, ONE_D
from tests.training.runs import config_for, lines_of, make_corpus, run
from tests.workers import run_ranks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def config_of(corpus: Path, stages: int, data: int = 1, tensor: dict[str, Any] | None = None) -> Config:
    """Return a config without dropout, with three steps and a validation after each."""
    model = {"layers": 3, "hidden": 16, "heads": 4, "positions": 16, "vocabulary": 300, "vocabulary_multiple": 8}
    layout = {
        "data": {"size": data},
        "pipeline": {"size": stages},
        "tensor": tensor or {"kind": "none"},
        "transport": "torch",
    }
    changes = {"validation": {"every": 1, "batches": 3}, "steps": 3, "checkpoint": {"every": 0}}
    batch = {"global": 12, "micro": 4 if tensor else 2}
    return config_for(corpus, model=model | {"dropout": 0.0}, layout=layout, batch=batch, **changes)


def measure(mesh: Mesh, config: Config, corpus: Path) -> dict[str, float]:
    held_out = config.data.open(config, corpus).held_out
    assert held_out is not None
    return validate(build(config, mesh), held_out, 3)


LAYOUTS: dict[str, tuple[int, int, dict[str, Any] | None]] = {
    "3 stages": (3, 1, None),
    "5 stages": (5, 1, None),
    "2 stages x 2 replicas": (2, 2, None),
    "2 stages, 1-D": (2, 1, ONE_D[0]),
    "2 stages, 2-D": (2, 1, BLOCKS[1]),
    "sub-graphs": (1, 1, {"kind": "subgraph", "size": 2, "branch": "attention-core"}),
    "2 stages, sub-graphs, common one": (2, 1, {"kind": "subgraph", "size": 2, "common": "one"}),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_validation_is_that_of_one_device(layout: str, corpus: Path) -> None:
    stages, data, tensor = LAYOUTS[layout]
    config, alone = config_of(corpus, stages, data, tensor), config_of(corpus, 1)
    (wanted,) = run_ranks(measure, Grid(alone.layout.axes), alone, corpus)
    for mine in run_ranks(measure, Grid(config.layout.axes), config, corpus, token_axes=config.layout.token_axes):
        assert mine == pytest.approx(wanted, rel=1e-12, abs=0)


@pytest.fixture(scope="module")
def staged(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a whole run with 2 stages."""
    return run(config_of(corpus, 2), tmp_path_factory.mktemp("staged"))


def test_a_run_is_validated_as_it_goes(staged: Path, corpus: Path, tmp_path: Path) -> None:
    mine, wanted = lines_of(staged), lines_of(run(config_of(corpus, 1), tmp_path / "serial"))
    assert len(mine) == len(wanted) == 3
    for ours, theirs in zip(mine, wanted, strict=True):
        for fact in ("loss", "grad_norm", "validation_loss", "validation_accuracy"):
            assert ours[fact] == pytest.approx(theirs[fact], rel=1e-10, abs=0), fact
    assert mine[0]["validation_loss"] != mine[-1]["validation_loss"]


def ask(*words: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, words), "--json"])
    if result.exception is not None:
        raise result.exception
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def test_its_checkpoint_can_be_asked(staged: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the quick brown fox sleeps well under trees")
    facts = ask("eval", staged, "--data", tmp_path / "text.txt", "--device", "cpu")
    assert facts["tokens"] == 43
    assert 2 < facts["loss_per_token"] < 6
    text = ask("generate", staged, "--prompt", "the ", "--tokens", 3)["text"]
    assert len(text) <= 3


COMMON_ONE = {"kind": "subgraph", "size": 2, "common": "one", "branch": "block"}


@pytest.mark.parametrize("tensor", [None, pytest.param(COMMON_ONE, marks=pytest.mark.long)], ids=str)
def test_verify_holds(tensor: dict[str, Any] | None, corpus: Path) -> None:
    verdict = verify(config_of(corpus, 2, tensor=tensor), steps=2)
    verdict.check()
    names = {row.name for row in verdict.rows if row.kind == "gradient"}
    assert {"tokens.weight", "blocks.0.attention.query_key_value.bias", "blocks.2.feed_forward.contract.bias"} <= names


def test_verify_sees_a_dropped_weight_gradient(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last stage leaves out the work of one parameter of one microbatch."""
    monkeypatch.setattr(job, "WORKER", "tests.strategies.pipeline.planted:dropped_work")
    verdict = verify(config_of(corpus, 2), steps=1)
    assert {row.name for row in verdict.failed if row.kind == "gradient"}
    assert all(row.holds for row in verdict.rows if row.kind == "loss")
