"""Shipped sizes equal the config.json that the authors publish, read like any folder's. transformers' model of this
config.json has the same number of parameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.config import parse_config
from meshwright.families.llama.section import Llama
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.transfer import family_of
from tests.families.llama.models import COUNTS

transformers = pytest.importorskip("transformers")

COLUMNS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
)
SIZES: dict[str, tuple[Any, ...]] = {
    "smollm2-135m": (30, 576, 9, 3, 1536, 49152, 8192, 1e-5, 100000, True),
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256, 131072, 1e-5, 500000.0, True),
    "llama-3.1-8b": (32, 4096, 32, 8, 14336, 128256, 131072, 1e-5, 500000.0, False),
    "llama-3.1-70b": (80, 8192, 64, 8, 28672, 128256, 131072, 1e-5, 500000.0, False),
    "llama-3.1-405b": (126, 16384, 128, 8, 53248, 128256, 131072, 1e-5, 500000.0, False),
    "qwen2.5-0.5b": (24, 896, 14, 2, 4864, 151936, 32768, 1e-6, 1000000.0, True),
    "qwen3-0.6b": (28, 1024, 16, 8, 3072, 151936, 40960, 1e-6, 1000000, True),
    "qwen3-8b": (36, 4096, 32, 8, 12288, 151936, 40960, 1e-6, 1000000, False),
    "mistral-7b": (32, 4096, 32, 8, 14336, 32768, 32768, 1e-5, 1000000.0, False),
    "mistral-7b-0.1": (32, 4096, 32, 8, 14336, 32000, 32768, 1e-5, 10000.0, False),
    "smollm3-3b": (36, 2048, 16, 4, 11008, 128256, 65536, 1e-6, 5000000.0, True),
    "olmo-2-7b": (32, 4096, 32, 32, 11008, 100352, 4096, 1e-6, 500000, False),
    "olmo-3-7b": (32, 4096, 32, 32, 11008, 100278, 65536, 1e-6, 500000, False),
    "gemma-2-2b": (26, 2304, 8, 4, 9216, 256000, 8192, 1e-6, 10000.0, True),
    "gemma-3-1b": (26, 1152, 4, 1, 6912, 262144, 32768, 1e-6, 1000000, True),
    "phi-3-mini-4k": (32, 3072, 32, 32, 8192, 32064, 4096, 1e-5, 10000.0, False),
    "gpt-oss-20b": (24, 2880, 64, 8, 2880, 201088, 131072, 1e-5, 150000, False),
    "gpt-oss-120b": (36, 2880, 64, 8, 2880, 201088, 131072, 1e-5, 150000, False),
    "mixtral-8x7b": (32, 4096, 32, 8, 14336, 32000, 32768, 1e-5, 1000000.0, False),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 6144, 151936, 40960, 1e-6, 1000000.0, False),
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA31 = {"model_type": "llama", "rope_scaling": LLAMA3, "attention_bias": False, "mlp_bias": False}
QWEN3 = {"model_type": "qwen3", "head_dim": 128, "attention_bias": False, "sliding_window": None}
GPT_OSS = {
    "model_type": "gpt_oss", "attention_bias": True, "attention_dropout": 0.0, "experts_per_token": 4, "head_dim": 64,
    "initial_context_length": 4096, "num_experts_per_tok": 4, "output_router_logits": False, "pad_token_id": 199999,
    "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
        "rope_type": "yarn", "truncate": False,
    },
}  # fmt: skip
TURNS = ["sliding_attention", "full_attention"]
BESIDE: dict[str, dict[str, Any]] = {
    "smollm2-135m": {"model_type": "llama", "rope_scaling": None, "rope_interleaved": False},
    "llama-3.2-1b": LLAMA31 | {"rope_scaling": LLAMA3 | {"factor": 32.0}, "head_dim": 64},
    **dict.fromkeys(("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"), LLAMA31),
    "qwen2.5-0.5b": {"model_type": "qwen2", "sliding_window": 32768, "use_sliding_window": False},
    **dict.fromkeys(("qwen3-0.6b", "qwen3-8b"), QWEN3),
    "mistral-7b": {"model_type": "mistral", "sliding_window": None},
    "smollm3-3b": {
        "model_type": "smollm3", "attention_bias": False, "mlp_bias": False, "max_window_layers": 28,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36,
        "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
    },
    "olmo-2-7b": {"model_type": "olmo2", "attention_bias": False, "rope_scaling": None, "pad_token_id": 100277},
    "olmo-3-7b": {
        "model_type": "olmo3", "attention_bias": False, "sliding_window": 4096, "pad_token_id": 100277,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
            "original_max_position_embeddings": 8192, "rope_type": "yarn",
        },
    },
    "gemma-2-2b": {
        "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_act": "gelu_pytorch_tanh", "attention_bias": False, "pad_token_id": 0, "cache_implementation": "hybrid",
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 256,
        "query_pre_attn_scalar": 256, "sliding_window": 512, "sliding_window_pattern": 6, "rope_scaling": None,
        "rope_local_base_freq": 10000, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
        "pad_token_id": 0, "cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh",
    },
    "phi-3-mini-4k": {
        "model_type": "phi3", "sliding_window": 2047, "rope_scaling": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "original_max_position_embeddings": 4096, "attention_bias": False, "pad_token_id": 32000,
    },
    "mistral-7b-0.1": {"model_type": "mistral", "sliding_window": 4096},
    "gpt-oss-20b": GPT_OSS | {"num_local_experts": 32, "layer_types": TURNS * 12},
    "gpt-oss-120b": GPT_OSS | {"num_local_experts": 128, "layer_types": TURNS * 18},
    "mixtral-8x7b": {
        "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.02,
        "sliding_window": None, "output_router_logits": False,
    },
    "qwen3-30b-a3b": QWEN3 | {
        "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001,
        "output_router_logits": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", SIZES)
def test_a_shipped_size_is_the_published_one(tmp_path: Path, name: str) -> None:
    settings = dict(zip(COLUMNS, SIZES[name], strict=True)) | {"hidden_act": "silu"} | BESIDE[name]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    read = Settings(tmp_path / "config.json")
    published = family_of(read).read(read, frozenset())
    shipped = parse_config({"model": name, "data": {"sequence": 1}}).model
    assert isinstance(published, Llama)
    assert isinstance(shipped, Llama)
    assert published.width_of_head == shipped.width_of_head
    assert published.num_key_value_heads == shipped.num_key_value_heads
    spelled = ("head_width", "key_value_heads")  # null, or the number that null means
    if published.experts is not None:  # a run without weights to begin from has the balance of the authors' training
        assert published.experts.balance == 0, "output_router_logits=false leaves it out"
        balanced = published.experts.model_copy(update={"balance": settings["router_aux_loss_coef"]})
        published = published.model_copy(update={"experts": balanced})
    assert published.model_dump(exclude=set(spelled)) == shipped.model_dump(exclude=set(spelled))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert sum(parameter.numel() for parameter in theirs.parameters()) == COUNTS[name]


def test_every_published_size_is_here() -> None:
    assert SIZES.keys() == {name for name in COUNTS if not name.endswith("-mini")} == BESIDE.keys()
