"""Folders with experts in MXFP4: the numbers equal the numbers of transformers' own reader, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from meshwright.data.tokenizer import byte_tokenizer
from meshwright.ranks.errors import CheckpointError
from meshwright.tools.evaluate.load import load_text
from meshwright.training.convert import export_folder, import_folder
from meshwright.training.convert.mxfp4 import unpacked
from tests.training.convert.folders import saved

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[5, 9, 200, 31, 7, 12, 80]])
METHOD = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]}
LINEARS = {"gate_up_proj": (128, 64), "down_proj": (64, 64)}
"""Outputs and inputs of an expert's linears."""


def stored(sizes: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    """Return random blocks and scales near one; `sizes` are the sizes without the last dim."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(256, (*sizes, 16), generator=generator).to(torch.uint8)
    return blocks, torch.randint(120, 125, sizes, generator=generator).to(torch.uint8)


def packed_folder(folder: Path) -> None:
    """Write a gpt-oss of two layers, with experts stored in MXFP4 as the authors publish."""
    settings = transformers.GptOssConfig(
        vocab_size=257, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=3, num_local_experts=3,
        num_experts_per_tok=2, pad_token_id=None, eos_token_id=256,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "truncate": False,
        },
    )  # fmt: skip
    saved(transformers.GptOssForCausalLM, settings, folder, torch.bfloat16)
    byte_tokenizer().save(folder / "tokenizer.json")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        for number, (name, (outputs, inputs)) in enumerate(LINEARS.items()):
            whole = f"model.layers.{layer}.mlp.experts.{name}"
            del tensors[whole]
            blocks, scales = stored((3, outputs, inputs // 32), 2 * layer + number)
            tensors |= {f"{whole}_blocks": blocks, f"{whole}_scales": scales}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change(folder, quantization_config=METHOD)


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


@torch.no_grad()
def test_every_byte_and_scale_is_transformers_number() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256).view(1, 1, 16, 16).repeat(1, 255, 1, 1).to(torch.uint8)
    scales = torch.arange(255).view(1, 255, 1).repeat(1, 1, 16).to(torch.uint8)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0]
    ours = unpacked(blocks, scales)[0].t()
    assert torch.equal(ours, theirs)
    assert len(ours.unique()) > 1000
    assert unpacked(blocks[:, :1], scales[:, :1] * 0 + 255).isnan().all(), "a scale of 255 is not a number"


@torch.no_grad()
def test_a_packed_folder_is_imported_and_exported_as_plain_numbers(tmp_path: Path) -> None:
    packed_folder(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "run" / "checkpoints" / "step-0")
    export_folder(tmp_path / "run", tmp_path / "back")
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    plain, facts = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(facts.values()), facts
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "hf", dtype=torch.bfloat16, quantization_config=transformers.Mxfp4Config(dequantize=True)
    )
    wanted = dict(theirs.named_parameters())
    assert plain.dtype == torch.bfloat16
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameter, wanted[name].to(parameter.dtype)), name
    plain.set_experts_implementation("eager")
    loaded = load_text(tmp_path / "run", "cpu", None)
    logits = loaded.head.logits(loaded.model.hidden(TOKENS))
    torch.testing.assert_close(logits, plain.float().eval()(TOKENS).logits, rtol=1e-4, atol=1e-4)


REFUSED: list[tuple[str, Tensor, str]] = [
    ("gate_up_proj_blocks", torch.zeros(3, 128, 1, 16, dtype=torch.uint8), r"makes it \[3, 128, 2, 16\] of uint8"),
    ("gate_up_proj_scales", torch.zeros(3, 128, 2), r"_scales is \[3, 128, 2\] of float32, and config.json makes it"),
    ("down_proj_scales", torch.full((3, 64, 2), 255, dtype=torch.uint8), "numbers that are not finite"),
]


@pytest.mark.parametrize("name, tensor, message", REFUSED, ids=[name for name, _, _ in REFUSED])
def test_damaged_blocks_are_refused(tmp_path: Path, name: str, tensor: Tensor, message: str) -> None:
    packed_folder(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    save_file(load_file(path) | {f"model.layers.1.mlp.experts.{name}": tensor}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        import_folder(tmp_path / "hf", tmp_path / "step-0")
    assert not (tmp_path / "step-0").exists()


def test_scales_without_blocks_are_refused(tmp_path: Path) -> None:
    packed_folder(tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.experts.down_proj_blocks"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"has no tensor model\.layers\.1\.mlp\.experts\.down_proj"):
        import_folder(tmp_path / "hf", tmp_path / "step-0")
