"""Rotary positions of a config.json equal transformers' own reading of the file: frequencies to the bit."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.compute.models.rope import inverse_frequencies
from meshwright.families.llama.section import Llama
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.transfer import family_of

transformers = pytest.importorskip("transformers")

LLAMA31 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "theta": ("llama", {"rope_theta": 100000.0}),
    "no theta": ("llama", {}),
    "mixtral's own theta": ("mixtral", {}),
    "Llama 3.1": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA31}),
    "Llama 3.2": ("llama", {"rope_theta": 500000.0, "rope_scaling": LLAMA31 | {"factor": 32.0}}),
    "inside": ("llama", {"rope_parameters": LLAMA31 | {"rope_theta": 500000.0}}),
    "original positions outside": (
        "llama",
        {"rope_theta": 500000.0, "rope_scaling": LLAMA31, "original_max_position_embeddings": 4096},
    ),
    "no original positions": ("llama", {"rope_scaling": {"type": "yarn", "factor": 8.0}}),
    "linear, as once": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "Qwen's yarn": ("qwen2", {"rope_theta": 1000000.0, "rope_scaling": YARN}),
    "yarn's own": (
        "qwen3",
        {
            "rope_theta": 1000000.0,
            "rope_scaling": YARN | {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2, "truncate": False},
        },
    ),
    "scaling before parameters": (
        "llama",
        {
            "rope_theta": 1000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
            "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        },
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_rotations_are_those_that_transformers_reads(tmp_path: Path, case: str) -> None:
    kind, rope = CASES[case]
    sizes = {
        "model_type": kind, "vocab_size": 300, "hidden_size": 512, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "sliding_window": None, "num_local_experts": 2, "num_experts_per_tok": 1,
    }  # fmt: skip
    counts = ("num_local_experts", "num_experts_per_tok")
    settings = {key: value for key, value in sizes.items() if kind == "mixtral" or key not in counts} | rope
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))

    config = transformers.AutoConfig.from_pretrained(tmp_path)
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    embedding = vars(modeling)[f"{kind.capitalize()}RotaryEmbedding"](config)
    read = Settings(path)
    model = family_of(read).read(read, frozenset())
    assert isinstance(model, Llama)
    frequencies, scale = inverse_frequencies(model.rope, model.width_of_head)
    assert scale == embedding.attention_scaling
    assert torch.equal(frequencies, embedding.inv_freq), (frequencies / embedding.inv_freq - 1).abs().max()
