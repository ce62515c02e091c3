"""A classifier's accuracy on images: the measured images, and scores equal to the logits' scores."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright.config import Config, parse_config
from meshwright.families.vision.evaluate import image_accuracy
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.ranks.mesh import solo_mesh
from meshwright.tools.evaluate.load import load_model
from tests.harness import build
from tests.tools.evaluate.commands import run_json
from tests.tools.evaluate.tiny import lively, save, tiny_checkpoint

if find_spec("sklearn") is None:  # imported by the first test of digits, in three seconds
    pytest.skip("pip install 'meshwright[images]'", allow_module_level=True)
image = pytest.importorskip("PIL.Image", reason="pip install 'meshwright[images]'")


MODELS: dict[str, dict[str, Any]] = {
    "vit": {"base": "vit-digits", "layers": 1, "hidden": 16, "heads": 2},
    "resnext": {"base": "resnext-tiny", "hidden": 4, "path_width": 1},
}


def config_of(source: str = "digits", family: str = "vit", **model: Any) -> Config:
    fields = MODELS[family]
    data = {"source": source, "validation": 0.2}
    return parse_config({"model": fields | model, "data": data, "precision": {"dtype": "float64"}})


def checkpoint(folder: Path, config: Config) -> Path:
    return save(lively(build(config, solo_mesh(torch.device("cpu")))), folder)


@pytest.mark.parametrize("family", MODELS)
def test_the_held_out_digits(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    config = config_of(family=family)
    config = config.model_copy(update={"validation": config.validation.model_copy(update={"every": 1})})
    step = checkpoint(tmp_path, config)
    facts = run_json("eval", tmp_path, "--task", "images", "--device", "cpu")
    held_out = config.data.open(config, config.data.prepare(config, lambda text, done: None)).held_out
    assert held_out is not None
    batch = held_out.held_out(0, len(held_out))
    model: Any = load_model(step, "cpu", "images").model
    with torch.no_grad():
        logits = model.head.logits(model.hidden_states(batch)[0][:, 0])
    right = int((logits.argmax(1) == batch["labels"][:, 0]).sum())
    assert (facts["images"], facts["classes"], facts["correct"]) == (359, 10, right)
    assert facts["accuracy"] == right / 359
    assert facts["loss"] == pytest.approx(float(F.cross_entropy(logits, batch["labels"][:, 0])), rel=1e-12)
    assert (facts["checkpoint"], facts["data"]) == (str(step), "digits")


def paint(folder: Path, names: str = "abc", each: int = 2) -> Path:
    draw = np.random.default_rng(1)
    for name in names:
        (folder / name).mkdir(parents=True)
        for number in range(each):
            pixels = draw.integers(0, 256, (8, 8), dtype=np.uint8)
            image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def test_what_is_measured(tmp_path: Path) -> None:
    own = paint(tmp_path / "own", each=5)
    loaded = load_model(checkpoint(tmp_path / "run", config_of(str(own))), "cpu", "images")
    other, split = paint(tmp_path / "other"), tmp_path / "split"
    paint(split / "train"), paint(split / "validation", "b")
    measured = {source: image_accuracy(loaded, source)["images"] for source in (None, *map(str, (own, other, split)))}
    assert measured == {None: 3, str(own): 3, str(other): 6, str(split): 2}


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is a gpt2: this needs a vit or resnext"):
        load_model(tiny_checkpoint(tmp_path / "text"), "cpu", "images")
    step = checkpoint(tmp_path / "images", config_of(str(paint(tmp_path / "own")), classes=3))
    with pytest.raises(ConfigError, match=r"model\.classes=3 is fewer than the 4 classes of "):
        image_accuracy(load_model(step, "cpu", "images"), str(paint(tmp_path / "more", "abcd")))
    for option in ("--stride", "--context"):
        with pytest.raises(ConfigError, match=f"{option}=2 has no effect on --task images"):
            run_json("eval", step, "--task", "images", option, 2)
