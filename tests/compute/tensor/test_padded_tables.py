"""Tables with rows that do not divide evenly are padded: 1-D and 2-D on 3 and 6 ranks compute one device's numbers
without padding, in float64, and checkpoints move between layouts with other padding."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.config import Config
from meshwright.ranks.errors import CheckpointError
from meshwright.ranks.mesh import solo_mesh
from meshwright.training.checkpoint import Checkpoint, restore
from meshwright.training.checkpoint.manifest import read_manifest
from meshwright.training.convert import export_folder
from tests.harness import build
from tests.oracle.run import assembled, run
from tests.oracle.tensor import SHORT, config_for
from tests.training.checkpoint.round_trip import taken_up, written
from tests.training.checkpoint.states import Leg, States, run_leg
from tests.workers import run_ranks

FIRST, LAST = 2, 4
TEXT = {"positions": 14, "vocabulary": 290}  # 14 x 24 and 290 x 24 are multiples of 16: normal_() draws equal rows
LAYOUTS: dict[str, dict[str, Any]] = {
    "serial": {"kind": "none"},
    "3": {"kind": "megatron", "size": 3},
    "6": {"kind": "megatron", "size": 6},
    "6 cut": {"kind": "megatron", "size": 6, "sequence_parallel": True},
    "3 x 3": {"kind": "tesseract", "q": 3, "d": 1},
}


def padded_config(model: str, layout: str, multiple: int, **changes: Any) -> Config:
    config = config_for(model, LAYOUTS[layout], steps=SHORT, **changes)
    shape = {"vocabulary_multiple": multiple} | ({} if model == "vit" else TEXT)
    sequence = {} if model == "vit" else {"data": config.data.model_copy(update={"sequence": 12})}
    return config.model_copy(update={"model": config.model.model_copy(update=shape), **sequence})


@cache
def serial(model: str) -> Any:
    """Return one device's losses and gradients, without padded tables."""
    return run(padded_config(model, "serial", 1))[0]


def check(results: list[Any], model: str) -> None:
    losses, expected_gradients = serial(model)
    for mine, _ in results:
        torch.testing.assert_close(mine, losses, rtol=1e-10, atol=0)
    padded = 0
    for name, held in expected_gradients.items():
        (expected,) = held.values()
        parts = [gradients[name] for _, gradients in results]
        rows = max(offsets[0] + part.shape[0] for rank in parts for offsets, part in rank.items())
        actual = assembled(parts, (rows, *expected.shape[1:]))
        there, behind = actual[: expected.shape[0]], actual[expected.shape[0] :]
        assert (there - expected).norm() <= 1e-12 * expected.norm(), name
        assert not behind.any(), f"{name}: padding has a gradient"
        padded += len(behind)
    assert padded


@pytest.mark.few
@pytest.mark.parametrize("layout, multiple", [("3", 3), ("6", 12), ("6 cut", 6), ("3 x 3", 9)])
@pytest.mark.parametrize("model", ["gpt2", "bert", "vit"])
def test_equals_one_device_without_padding(model: str, layout: str, multiple: int) -> None:
    if model == "vit" and layout == "6 cut":
        layout = "6"  # ViT's 10 tokens do not divide into 6 parts
    check(run(padded_config(model, layout, multiple)), model)


def legs(
    layout: str, multiple: int, source: Path | None, target: Path | None, first: int, last: int, model: str = "bert"
) -> list[Leg]:
    config = padded_config(model, layout, multiple)
    data = config.layout.data.model_copy(update={"sync": "zero1"})
    config = config.model_copy(update={"layout": config.layout.model_copy(update={"data": data})})
    grid = config.grid
    return run_ranks(run_leg, grid, config, source, target, first, last, token_axes=config.layout.token_axes)


def assert_same_rows(after: States, before: States) -> None:
    """Assert equal values in the rows that tables of both paddings have, and zeros in all further rows."""
    assert after.keys() == before.keys()
    for name, there in before.items():
        if after[name].shape == there.shape:
            assert torch.equal(after[name], there), name
        else:
            rows = min(len(there), len(after[name]))
            assert torch.equal(after[name][:rows], there[:rows]), name
            assert not after[name][rows:].any(), name


MOVES = [(("serial", 1), ("3", 6)), (("3", 6), ("6", 12)), (("6", 12), ("serial", 1)), (("6", 12), ("3", 3))]


@pytest.mark.parametrize("source, target", MOVES)
def test_checkpoints_move_between_paddings(source: tuple[str, int], target: tuple[str, int], tmp_path: Path) -> None:
    before = legs(*source, None, tmp_path, 0, FIRST)
    after = legs(*target, tmp_path / f"step-{FIRST}", None, FIRST, LAST)
    assert_same_rows(taken_up(after), written(before))
    whole = legs("serial", 1, None, None, 0, LAST)[0][0]
    for losses, _, _ in after:
        torch.testing.assert_close(losses, whole[FIRST:], rtol=1e-10, atol=0)


def test_another_vocabulary_is_no_padding(tmp_path: Path) -> None:
    legs("serial", 1, None, tmp_path, 0, 1)
    config = padded_config("bert", "serial", 12)
    other = config.model_copy(update={"model": config.model.model_copy(update={"vocabulary": 291})})
    checkpoint = Checkpoint(tmp_path / "step-1")
    with pytest.raises(CheckpointError, match=r"another model: tokens\.weight should be \[300, 24\], and it has \[290"):
        restore(build(other, solo_mesh(torch.device("cpu"))), checkpoint)
    restore(build(config, solo_mesh(torch.device("cpu"))), checkpoint)


def test_an_older_checkpoint_has_positions_without_padding(tmp_path: Path) -> None:
    """Checkpoints of versions that padded the tokens' table and not the positions' are restored and exported."""
    before = written(legs("serial", 1, None, tmp_path, 0, 1, "gpt2"))
    step = tmp_path / "step-1"
    manifest = read_manifest(step)
    model = manifest.origin.config["model"] | {"vocabulary_multiple": 10}  # of 290 tokens and 14 positions
    replace(manifest, origin=replace(manifest.origin, config=manifest.origin.config | {"model": model})).write(step)
    assert Checkpoint(step).shapes["positions.weight"] == (14, 24)
    for layout, multiple in (("serial", 10), ("3", 6)):
        assert_same_rows(taken_up(legs(layout, multiple, step, None, 1, 2, "gpt2")), before)
    export_folder(step, tmp_path / "hf")
    stored = load_file(tmp_path / "hf" / "model.safetensors")
    assert torch.equal(stored["transformer.wpe.weight"], before["weight", "positions.weight"])


def test_transformers_gets_no_padding(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    before = written(legs("6", 12, None, tmp_path, 0, 1, "gpt2"))
    export_folder(tmp_path / "step-1", tmp_path / "hf")
    model, facts = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(facts.values()), facts
    for name, theirs, rows in (("positions", "wpe", 14), ("tokens", "wte", 290)):
        weight = model.transformer.get_submodule(theirs).weight
        assert torch.equal(weight, before["weight", f"{name}.weight"][:rows]), name
