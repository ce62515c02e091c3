"""A number that is not finite ends a run at once, names the first bad parameter and rank, and is never saved."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from torch import Tensor

from meshwright.config import Config
from meshwright.ranks.errors import LaunchError
from meshwright.ranks.mesh import Mesh
from meshwright.training import step as step_module
from tests.training.replicas import EXPAND, NORM, config_of, ended, run_layout, spoil, trainer_of
from tests.training.runs import config_for, lines_of, make_corpus, run, run_as


def spoiled(mesh: Mesh, config: Config, name: str, victim: int, bad: float) -> tuple[int, str, str, bool]:
    return spoil(trainer_of(mesh, config), name, victim, bad)


SPOILED: dict[str, tuple[dict[str, Any], str, int]] = {
    "megatron": ({"data": {"size": 1}, "tensor": {"kind": "megatron", "size": 2}}, EXPAND, 1),
    "tesseract": ({"data": {"size": 1}, "tensor": {"kind": "tesseract", "q": 2, "d": 1}}, EXPAND, 2),
    "subgraph": ({"data": {"size": 1}, "tensor": {"kind": "subgraph", "size": 2, "common": "one"}}, NORM, 0),
    "first stage": ({"data": {"size": 1}, "pipeline": {"size": 2}}, "positions.weight", 0),
    "last stage": ({"data": {"size": 1}, "pipeline": {"size": 2}}, NORM, 1),
}


@pytest.mark.parametrize("case", SPOILED)
def test_a_weight_that_is_no_number_is_named(case: str) -> None:
    layout, name, victim = SPOILED[case]
    for step, kind, text, untouched in run_layout(spoiled, config_of(layout), name, victim, math.nan):
        assert (step, kind) == (3, "DivergedError")
        assert text.startswith("step 3: the gradient norm is nan: the run has diverged; the gradient of ")
        assert f"the weights of {name} on rank {victim} are not finite" in text
        assert untouched


@pytest.mark.few(2)
@pytest.mark.parametrize("sync", ["allreduce", "zero1", "server-loss"])
@pytest.mark.parametrize("every", [1, 8])
def test_a_replica_whose_weight_is_no_number_is_corrupt(sync: str, every: int) -> None:
    """Two of three replicas are right: the rank has a fault, and a restart may help."""
    config = config_of({"data": {"size": 3, "sync": sync}}, every)
    for step, kind, text, untouched in run_layout(spoiled, config, EXPAND, 2, math.inf):
        assert (step, kind) == (3, "CorruptionError")
        assert text.startswith(f"step 3: rank 2 differs from ranks 0 and 1, which agree ({EXPAND})")
        assert untouched


def test_without_a_comparison_the_rank_is_named_all_the_same() -> None:
    for step, kind, text, _ in run_layout(spoiled, config_of({"data": {"size": 2}}, every=0), EXPAND, 1, math.nan):
        assert (step, kind) == (3, "DivergedError")
        assert f"the weights of {EXPAND} on rank 1 are not finite; the loss is not finite on rank 1;" in text


def nan_loss(mesh: Mesh, config: Config) -> tuple[int, str, str]:
    trainer = trainer_of(mesh, config)
    backward = step_module.replica_backward

    def spoiling(*arguments: Any) -> Tensor:
        loss = backward(*arguments)
        return loss * math.nan if mesh.rank == 1 and trainer.step == 2 else loss

    with patch.object(step_module, "replica_backward", spoiling):
        return ended(trainer, 4)


def test_a_loss_that_is_no_number_ends_the_run_though_its_gradient_is_finite() -> None:
    for step, kind, text in run_layout(nan_loss, config_of({"data": {"size": 2}})):
        assert (step, kind) == (3, "DivergedError")
        assert text.startswith("step 3: the loss is not finite on rank 1, although the gradient is finite")


def skips(mesh: Mesh, config: Config) -> tuple[int, str, str]:
    return ended(trainer_of(mesh, config), 9)


def test_a_run_that_skips_every_step_ends_after_so_many() -> None:
    precision = {"level": "O2", "dtype": "fp16", "loss_scale": {"initial": 1e36, "max_skips": 4}}
    tree = config_of({"data": {"size": 2}}).model_dump(by_alias=True)
    config = Config.model_validate(tree | {"precision": precision})
    for step, kind, text in run_layout(skips, config):
        assert (step, kind) == (4, "DivergedError")
        assert (
            "4 steps in a row were skipped, down to a loss scale of 1.25e+35 (precision.loss_scale.max_skips=4)" in text
        )
        assert "the gradient of tokens.weight on rank 0 (the first of " in text
        assert "all weights are finite" in text


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").iterdir())


def test_a_checkpoint_that_is_due_at_a_skipped_step_waits_for_the_next(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same weights under a later step's name would be no progress, and could push a good checkpoint out."""
    precision = {"level": "O2", "dtype": "fp16", "loss_scale": {"initial": 2.0**40, "max_skips": 40}}
    run(config_for(corpus, precision=precision, steps=40, checkpoint={"every": 1}), tmp_path)
    applied = [line["step"] for line in lines_of(tmp_path) if line["applied"]]
    assert 1 < applied[0] < 40
    assert checkpoints(tmp_path) == sorted(f"step-{step}" for step in applied[-3:])
    assert f"{40 - len(applied)} of 40 steps overflowed and were skipped" in capfd.readouterr().out


@pytest.mark.parametrize("every", [1, pytest.param(0, marks=pytest.mark.long)])
def test_weights_that_are_thrown_out_of_range_are_not_saved(every: int, corpus: Path, tmp_path: Path) -> None:
    optimizer = {"name": "sgd", "lr": 100.0, "weight_decay": 1e20}
    config = config_for(corpus, optimizer=optimizer, precision={"dtype": "float32"}, checkpoint={"every": every})
    with pytest.raises(LaunchError) as caught:
        run(config, tmp_path)
    wanted = (
        "step 1: the weights of tokens.weight on rank 0 (the first of" if every else "step 2: the gradient norm is nan"
    )
    assert wanted in str(caught.value)
    assert checkpoints(tmp_path) == []


def test_a_streamed_step_that_was_applied_already_is_not_saved(corpus: Path, tmp_path: Path) -> None:
    """An offloaded optimizer without clipping steps slots before the norm is known."""
    config = config_for(
        corpus, precision={"level": "O2", "dtype": "bf16"}, memory={"offload": {"to": "host"}},
        optimizer={"clip": None}, checkpoint={"every": 1, "keep": 9}, check={"every": 0},
    )  # fmt: skip
    failure = run_as("spoiled", config, tmp_path, victim=1, at=4)
    assert "step 4: the gradient norm is nan" in failure
    assert "the weights have taken the step already, and are not saved; the loss is not finite on rank 1" in failure
    assert checkpoints(tmp_path) == ["step-1", "step-2", "step-3"]
