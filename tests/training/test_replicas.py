"""Hashes of the replicas' equal tensors: a flipped bit is seen, the odd rank is named, and a restart gives equal
bits."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from meshwright.config import Config
from meshwright.ranks.errors import CorruptionError
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import Mesh
from meshwright.training.checks import (
    copy_hashes,
    differences,
    gathered_hashes,
    require_equal_replicas,
    saved,
)
from tests.ranks.flips import flip
from tests.training.replicas import EXPAND, MODEL, NORM, TABLE, config_of, outcome, run_layout, trainer_of
from tests.training.runs import config_for as run_config
from tests.training.runs import losses_of, make_corpus, run, run_as


def test_the_majority_is_right() -> None:
    grid = Grid((("data", 3), ("pipe", 1), ("tensor", 2)))
    data = (5, 5, 5, 5, 5, 8)  # rank 5 shares with ranks 1 and 3
    hashes = [(value, 7, 7) for value in data]
    (found,) = differences(grid, hashes)
    assert (found.axes, found.group, found.odd) == (("data",), (1, 3, 5), (5,))
    assert found.text == "rank 5 differs from ranks 1 and 3, which agree"


def test_of_two_nobody_knows() -> None:
    (found,) = differences(Grid((("data", 2), ("pipe", 1))), [(1,), (2,)])
    assert found.odd == (0, 1)
    assert found.text.startswith("ranks 0 and 1 should hold the same bits and do not")


def test_stages_hold_different_weights_and_the_ends_the_same_table() -> None:
    grid = Grid((("data", 1), ("pipe", 3)))
    assert differences(grid, [(4,), (0,), (4,)]) == []
    (found,) = differences(grid, [(4,), (0,), (6,)])
    assert found.group == (0, 2)


GROUPED = MODEL | {"family": "llama", "key_value_heads": 2, "feed_forward": 48, "head_norms": False}
HEADS = "blocks.1.attention.query_key_value.weight"


def flipped_weight(mesh: Mesh, config: Config, name: str, victim: int) -> tuple[int, str]:
    """Flip a bit of the victim before the third step. Return the step and the error."""
    trainer = trainer_of(mesh, config)
    assert outcome(trainer, 2) == (2, "")
    if mesh.rank == victim:
        parameter = trainer.parts.model.get_parameter(name)
        with trainer.parts.strategy.whole_weights():  # no values of other ranks are received after this
            flip(parameter, parameter.numel() // 2, 3)
    return outcome(trainer, 4)


DATA = [{"data": {"size": 3, "sync": sync}} for sync in ("allreduce", "ring", "rooted", "zero1", "server-gradient")]
SEVERAL_AXES = {
    "megatron": {"data": {"size": 2}, "tensor": {"kind": "megatron", "size": 2}},
    "pipe": {"data": {"size": 2}, "pipeline": {"size": 2}},
    "subgraph": {"data": {"size": 1}, "tensor": {"kind": "subgraph", "size": 3, "common": "all"}},
    "tesseract": {"data": {"size": 1}, "tensor": {"kind": "tesseract", "q": 2, "d": 2}},
}
NAMED = [
    # A victim, and the ranks that the error names as different. Ranks: (data, pipe, ...), outermost first.
    ("megatron", NORM, 3, "rank 3 differs from ranks 0, 1 and 2, which agree"),
    ("megatron", EXPAND, 1, "ranks 1 and 3 should hold the same bits"),
    ("pipe", TABLE, 1, "rank 1 differs from ranks 0, 2 and 3, which agree"),
    ("pipe", NORM, 3, "ranks 1 and 3 should hold the same bits"),
    ("subgraph", NORM, 2, "rank 2 differs from ranks 0 and 1, which agree"),
    ("tesseract", EXPAND, 6, "ranks 2 and 6 should hold the same bits"),
    ("tesseract", NORM, 5, "rank 5 differs from ranks"),
]


@pytest.mark.parametrize("layout", DATA, ids=lambda layout: layout["data"]["sync"])
def test_a_flipped_bit_of_a_weight_is_noticed_in_its_step(layout: dict[str, Any]) -> None:
    for step, text in run_layout(flipped_weight, config_of(layout), EXPAND, 1):
        assert step == 3
        assert text.startswith(f"step 3: rank 1 differs from ranks 0 and 2, which agree ({EXPAND}): ")


@pytest.mark.few(3)
@pytest.mark.parametrize("kind, name, victim, who", NAMED)
def test_a_flipped_bit_is_found_among_the_ranks_that_share_it(kind: str, name: str, victim: int, who: str) -> None:
    for step, text in run_layout(flipped_weight, config_of(SEVERAL_AXES[kind]), name, victim):
        assert step == 3
        assert text.startswith(f"step 3: {who}")
        assert f"({name})" in text


def test_a_flipped_bit_of_a_head_that_ranks_share() -> None:
    config = config_of({"data": {"size": 1}, "tensor": {"kind": "megatron", "size": 6}}, model=GROUPED)
    for _, text in run_layout(flipped_weight, config, HEADS, 4):
        assert text.startswith(f"step 3: rank 4 differs from ranks 3 and 5, which agree ({HEADS})")


def test_noticed_within_so_many_steps() -> None:
    """A bit differs from the third step on; the fourth step compares."""
    for step, text in run_layout(flipped_weight, config_of(DATA[0], every=4), EXPAND, 1):
        assert step == 4
        assert "rank 1 differs" in text


def test_nobody_looks_where_nobody_shall() -> None:
    assert set(run_layout(flipped_weight, config_of(DATA[0], every=0), EXPAND, 1)) == {(6, "")}


def flipped_gradient(mesh: Mesh, config: Config) -> tuple[int, str]:
    trainer = trainer_of(mesh, config)

    def corrupt() -> None:
        gradient = trainer.parts.strategy.slots[0].parameter.grad
        assert gradient is not None
        if mesh.rank == 2 and trainer.step == 1:
            flip(gradient, 7, 51)

    return outcome(trainer, 5, observe=corrupt)


def test_a_flipped_bit_of_a_reduced_gradient_is_noticed_a_step_later() -> None:
    for step, text in run_layout(flipped_gradient, config_of(DATA[0])):
        assert step == 3
        assert "rank 2 differs from ranks 0 and 1, which agree" in text


def undisturbed(mesh: Mesh, config: Config) -> tuple[int, str]:
    return outcome(trainer_of(mesh, config), 3)


@pytest.mark.few(3)
@pytest.mark.parametrize("kind", SEVERAL_AXES)
def test_replicas_agree_by_themselves(kind: str) -> None:
    assert set(run_layout(undisturbed, config_of(SEVERAL_AXES[kind]))) == {(3, "")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("data"))


def test_a_restart_ends_with_the_bits_of_a_run_that_nothing_happened_to(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    layout = {"data": {"size": 3, "sync": "zero1"}, "transport": "torch"}
    run(run_config(corpus, layout=layout), tmp_path / "undisturbed")
    disturbed = run_config(corpus, layout=layout, restarts=1)
    assert run_as("corrupted", disturbed, tmp_path / "disturbed", victim=1, at=5) == ""
    assert "restart 1 of 1" in capfd.readouterr().out
    assert losses_of(tmp_path / "disturbed") == losses_of(tmp_path / "undisturbed")
    assert digests(tmp_path / "disturbed") == digests(tmp_path / "undisturbed")


def digests(out: Path) -> dict[str, str]:
    """Return SHA-256 of the last checkpoint's tensors."""
    shards = sorted((out / "checkpoints" / "step-8").glob("*.safetensors"))
    assert shards
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}


def spoiled_states(mesh: Mesh, config: Config) -> str:
    """Return the error for a wrong moment of one replica, before any weight differs."""
    trainer = trainer_of(mesh, config)
    outcome(trainer, 2)
    before = copy_hashes(trainer.parts, trainer.parts.strategy.weights)
    if mesh.rank == 1:
        flip(trainer.parts.optimizer.held.tensors(0)["exp_avg_sq"], 3, 0)
    assert copy_hashes(trainer.parts, trainer.parts.strategy.weights) == before
    try:
        require_equal_replicas(trainer.parts, 2, gathered_hashes(trainer.parts, saved(trainer.parts)))
    except CorruptionError as error:
        return str(error)
    return ""


def test_what_a_checkpoint_holds_is_compared_first() -> None:
    for text in run_layout(spoiled_states, config_of(DATA[0])):
        assert text.startswith("step 2: rank 1 differs from ranks 0 and 2, which agree (in what has been overwritten")
