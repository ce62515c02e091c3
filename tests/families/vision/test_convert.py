"""Hugging Face's ViT imported and exported: both programs' logits are equal, and a round trip keeps all bits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright.config import Config, parse_config
from meshwright.families.vision.evaluate import image_accuracy
from meshwright.ranks.errors import CheckpointError, ConfigError
from meshwright.ranks.mesh import solo_mesh
from meshwright.tools.evaluate.load import load_model
from meshwright.training.checkpoint import Checkpoint
from meshwright.training.convert import export_folder, import_folder
from tests.harness import build
from tests.tools.evaluate.tiny import lively, save
from tests.training.convert.folders import check_refused, saved

transformers = pytest.importorskip("transformers")

IMAGES = torch.randint(256, (4, 1, 8, 8), generator=torch.Generator().manual_seed(2), dtype=torch.uint8)
SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64, "image_size": 8,
    "patch_size": 2, "num_channels": 1, "num_labels": 3,
}  # fmt: skip


def hugging_face(folder: Path, **changes: Any) -> Any:
    """Save a random ViT with transformers; return the model."""
    settings = transformers.ViTConfig(**{**SIZES, **changes}, attn_implementation="sdpa")
    return saved(transformers.ViTForImageClassification, settings, folder)


def our_checkpoint(folder: Path) -> Path:
    model = {"base": "vit-digits", "layers": 2, "hidden": 16, "heads": 2, "dropout": 0.1}
    tree = {"model": model, "data": {"source": "digits"}, "precision": {"dtype": "float64"}}
    config: Config = parse_config(tree)
    return save(lively(build(config, solo_mesh(torch.device("cpu")))), folder)


@torch.no_grad()
def our_logits(folder: Path) -> torch.Tensor:
    model: Any = load_model(folder, "cpu", "images").model
    logits: torch.Tensor = model.head.logits(model.hidden_states({"images": IMAGES})[0][:, 0])
    return logits


@torch.no_grad()
def their_logits(model: Any) -> torch.Tensor:
    logits: torch.Tensor = model(pixel_values=IMAGES.double() / 127.5 - 1).logits
    return logits


def test_import_gives_the_same_logits(tmp_path: Path) -> None:
    model = hugging_face(tmp_path / "hf", layer_norm_eps=1e-3)
    made = import_folder(tmp_path / "hf", tmp_path / "step-0")
    assert (made.model.classes, made.model.norm_epsilon, made.has_tokenizer) == (3, 1e-3, False)  # type: ignore[union-attr]
    torch.testing.assert_close(our_logits(tmp_path / "step-0"), their_logits(model), rtol=1e-11, atol=1e-11)
    with pytest.raises(ConfigError, match=r"leaves .* without images; valid: digits, a folder"):
        image_accuracy(load_model(tmp_path / "step-0", "cpu", "images"), None)


def test_export_loads_in_transformers_with_the_same_logits(tmp_path: Path) -> None:
    step = our_checkpoint(tmp_path)
    assert export_folder(tmp_path, tmp_path / "hf") == step
    load = transformers.ViTForImageClassification.from_pretrained
    model, facts = load(tmp_path / "hf", output_loading_info=True, attn_implementation="sdpa")
    assert not any(facts.values()), facts
    assert (model.config.num_labels, model.config.hidden_dropout_prob) == (10, 0.1)
    torch.testing.assert_close(their_logits(model.eval()), our_logits(step), rtol=1e-11, atol=1e-11)


def test_their_image_processor_scales_as_our_model_does(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    our_checkpoint(tmp_path)
    export_folder(tmp_path, tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "preprocessor_config.json").read_text())
    scaled = IMAGES.double() * settings["rescale_factor"]
    scaled = (scaled - settings["image_mean"][0]) / settings["image_std"][0]
    torch.testing.assert_close(scaled, IMAGES.double() / 127.5 - 1, rtol=1e-12, atol=1e-12)


def test_a_round_trip_gives_the_same_bits(tmp_path: Path) -> None:
    step = our_checkpoint(tmp_path)
    export_folder(step, tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    torch.testing.assert_close(our_logits(tmp_path / "step-0"), our_logits(step), rtol=0, atol=0)
    before, after = Checkpoint(step), Checkpoint(tmp_path / "step-0")
    model = before.config.model
    assert after.config.model == model.model_copy(update={"vocabulary_multiple": 64})
    export_folder(tmp_path / "step-0", tmp_path / "again")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("hf", "again"))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first["vit.embeddings.position_embeddings"][0, 0].count_nonzero() == 0


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("hidden_act", "relu", "hidden_act=relu is not supported; valid: gelu"),
        ("qkv_bias", False, "qkv_bias=false is not supported; valid: true"),
        ("intermediate_size", 32, "intermediate_size=32 is not supported: ours is 4 x hidden_size = 64"),
        ("patch_size", 3, "patch_size=3 does not divide image_size=8"),
        ("image_size", [8, 8], r"image_size=\[8, 8\] is not a whole number"),
        ("id2label", 3, "id2label=3 names no classes"),
        ("id2label", {"0": "a"}, r"classifier.weight is \[3, 16\], and config.json makes it \[1, 16\]"),
    ],
)
def test_settings_that_ours_has_not(tmp_path: Path, key: str, value: object, message: str) -> None:
    hugging_face(tmp_path / "hf")
    check_refused(tmp_path, {key: value}, message)


def test_pixels_of_another_scale_are_refused(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf")
    (tmp_path / "hf" / "preprocessor_config.json").write_text('{"image_mean": [0.485], "image_std": [0.229]}')
    with pytest.raises(CheckpointError, match=r"preprocessor_config.json: image_mean=\[0.485\] is not supported"):
        import_folder(tmp_path / "hf", tmp_path / "out")
