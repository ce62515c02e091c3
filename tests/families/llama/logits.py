"""Small Llama folders of transformers, and the logits of both programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.data.tokenizer import byte_tokenizer
from meshwright.tools.evaluate.load import load_text
from tests.training.convert.folders import saved

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[5, 9, 200, 256, 31, 7, 12, 80], [1, 1, 2, 255, 0, 90, 3, 4]])

SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "rms_norm_eps": 1e-4, "bos_token_id": 0,
    "eos_token_id": 256, "pad_token_id": None,
}  # fmt: skip

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip

YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 16}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}),
    "llama-biased": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 6}),
    "mistral, window": ("mistral", {"sliding_window": 3}),
    "smollm3": ("smollm3", {"num_hidden_layers": 4, "no_rope_layers": None}),
    "smollm3, windows": (
        "smollm3",
        {"num_hidden_layers": 3, "no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 3},
    ),
    "olmo2": ("olmo2", {"rope_parameters": YARN}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 3, "rope_parameters": {"full_attention": YARN}}),
    "gemma2": (
        "gemma2",
        {"head_dim": 6, "sliding_window": 3, "attn_logit_softcapping": 1.0, "tie_word_embeddings": True},
    ),
    "gemma3": (
        "gemma3_text",
        {
            "head_dim": 6,
            "sliding_window": 3,
            "num_hidden_layers": 7,
            "final_logit_softcapping": 2.0,
            "tie_word_embeddings": True,
        },
    ),
    "phi3": ("phi3", {"sliding_window": 3}),
    "mixtral, window": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 4}),
    "qwen2, windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1, "layer_types": None},
    ),
    "qwen3, windows": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 2,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": ("mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "qwen2-moe": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
        },
    ),
    "qwen2-moe, windows": (
        "qwen2_moe",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "shared_expert_intermediate_size": 20,
            "use_sliding_window": True,
            "sliding_window": 3,
            "max_window_layers": 2,
            "num_hidden_layers": 4,
        },
    ),
    "qwen3-moe, window": (
        "qwen3_moe",
        {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 12,
            "use_sliding_window": True,
            "sliding_window": 5,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "sliding_window": 3,
            "head_dim": 6,
            "num_hidden_layers": 3,
            "swiglu_limit": 0.02,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "gpt-oss, plain": (
        "gpt_oss",
        {
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 2,
            "rope_parameters": None,
        },
    ),
    "qwen3-moe": (
        "qwen3_moe",
        {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 3, "moe_intermediate_size": 12},
    ),
}


CLAMPS_BY_CONFIG = hasattr(transformers.GptOssConfig, "swiglu_limit")
"""Whether transformers' gpt-oss reads the clamp from the config; releases before 5.24 have a constant."""


def hugging_face(folder: Path, case: str, *, dtype: torch.dtype = torch.float64, shard: str = "1GB") -> Any:
    kind, changes = CASES[case]
    if kind == "gpt_oss" and not CLAMPS_BY_CONFIG and "swiglu_limit" in changes:
        pytest.skip(f"transformers {transformers.__version__} reads no swiglu_limit")
    settings = transformers.AutoConfig.for_model(kind, **SIZES | changes)
    classes = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    model = saved(classes[type(settings)], settings, folder, dtype, max_shard_size=shard)
    byte_tokenizer().save(folder / "tokenizer.json")
    return model


@torch.no_grad()
def our_logits(folder: Path) -> torch.Tensor:
    loaded = load_text(folder, "cpu")
    return loaded.head.logits(loaded.model.hidden(TOKENS))


@torch.no_grad()
def their_logits(model: Any) -> torch.Tensor:
    model.set_experts_implementation("eager")  # a grouped product has no float64
    if getattr(model.config, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa leaves the soft cap out in transformers 5.17
    logits: torch.Tensor = model(TOKENS).logits
    return logits
