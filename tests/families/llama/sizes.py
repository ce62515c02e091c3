"""Published sizes of the Llama room's models: one row for each shipped size, with the settings beside it."""

from __future__ import annotations

from typing import Any

COLUMNS = (
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"),
    *("vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "tie_word_embeddings"),
)
SIZES: dict[str, tuple[Any, ...]] = {
    "gemma-2-2b": (26, 2304, 8, 4, 9216, 256000, 8192, 1e-6, 10000.0, True, 2_614_341_888),
    "gemma-2-9b": (42, 3584, 16, 8, 14336, 256000, 8192, 1e-6, 10000.0, True, 9_241_705_984),
    "gemma-2-27b": (46, 4608, 32, 16, 36864, 256000, 8192, 1e-6, 10000.0, True, 27_227_128_320),
    "gemma-3-1b": (26, 1152, 4, 1, 6912, 262144, 32768, 1e-6, 1000000, True, 999_885_952),
    "gpt-oss-120b": (36, 2880, 64, 8, 2880, 201088, 131072, 1e-5, 150000, False, 116_829_156_672),
    "gpt-oss-20b": (24, 2880, 64, 8, 2880, 201088, 131072, 1e-5, 150000, False, 20_914_757_184),
    "llama-2-7b": (32, 4096, 32, 32, 11008, 32000, 4096, 1e-5, 10000.0, False, 6_738_415_616),
    "llama-2-13b": (40, 5120, 40, 40, 13824, 32000, 4096, 1e-5, 10000.0, False, 13_015_864_320),
    "llama-2-70b": (80, 8192, 64, 8, 28672, 32000, 4096, 1e-5, 10000.0, False, 68_976_648_192),
    "llama-3.1-8b": (32, 4096, 32, 8, 14336, 128256, 131072, 1e-5, 500000.0, False, 8_030_261_248),
    "llama-3.1-70b": (80, 8192, 64, 8, 28672, 128256, 131072, 1e-5, 500000.0, False, 70_553_706_496),
    "llama-3.1-405b": (126, 16384, 128, 8, 53248, 128256, 131072, 1e-5, 500000.0, False, 405_853_388_800),
    "llama-3.2-1b": (16, 2048, 32, 8, 8192, 128256, 131072, 1e-5, 500000.0, True, 1_235_814_400),
    "llama-3.2-3b": (28, 3072, 24, 8, 8192, 128256, 131072, 1e-5, 500000.0, True, 3_212_749_824),
    "mistral-7b-0.1": (32, 4096, 32, 8, 14336, 32000, 32768, 1e-5, 10000.0, False, 7_241_732_096),
    "mistral-7b-0.2": (32, 4096, 32, 8, 14336, 32000, 32768, 1e-5, 1000000.0, False, 7_241_732_096),
    "mistral-7b": (32, 4096, 32, 8, 14336, 32768, 32768, 1e-5, 1000000.0, False, 7_248_023_552),
    "mistral-nemo-12b": (40, 5120, 32, 8, 14336, 131072, 131072, 1e-5, 1000000.0, False, 12_247_782_400),
    "mistral-small-24b": (40, 5120, 32, 8, 32768, 131072, 32768, 1e-5, 100000000.0, False, 23_572_403_200),
    "mixtral-8x7b": (32, 4096, 32, 8, 14336, 32000, 32768, 1e-5, 1000000.0, False, 46_702_792_704),
    "mixtral-8x22b": (56, 6144, 48, 8, 16384, 32000, 65536, 1e-5, 1000000.0, False, 140_620_634_112),
    "olmo-2-7b": (32, 4096, 32, 32, 11008, 100352, 4096, 1e-6, 500000, False, 7_298_617_344),
    "olmo-2-13b": (40, 5120, 40, 40, 13824, 100352, 4096, 1e-6, 500000, False, 13_716_198_400),
    "olmo-2-32b": (64, 5120, 40, 8, 27648, 100352, 4096, 1e-6, 500000, False, 32_234_279_936),
    "olmo-3-7b": (32, 4096, 32, 32, 11008, 100278, 65536, 1e-6, 500000, False, 7_298_011_136),
    "olmo-3-32b": (64, 5120, 40, 8, 27648, 100278, 65536, 1e-6, 500000, False, 32_233_522_176),
    "phi-3-mini-4k": (32, 3072, 32, 32, 8192, 32064, 4096, 1e-5, 10000.0, False, 3_821_079_552),
    "phi-4": (40, 5120, 40, 10, 17920, 100352, 16384, 1e-5, 250000, False, 14_659_507_200),
    "qwen2.5-0.5b": (24, 896, 14, 2, 4864, 151936, 32768, 1e-6, 1000000.0, True, 494_032_768),
    "qwen2.5-1.5b": (28, 1536, 12, 2, 8960, 151936, 131072, 1e-6, 1000000.0, True, 1_543_714_304),
    "qwen2.5-3b": (36, 2048, 16, 2, 11008, 151936, 32768, 1e-6, 1000000.0, True, 3_085_938_688),
    "qwen2.5-7b": (28, 3584, 28, 4, 18944, 152064, 131072, 1e-6, 1000000.0, False, 7_615_616_512),
    "qwen2.5-14b": (48, 5120, 40, 8, 13824, 152064, 131072, 1e-5, 1000000.0, False, 14_770_033_664),
    "qwen2.5-32b": (64, 5120, 40, 8, 27648, 152064, 131072, 1e-5, 1000000.0, False, 32_763_876_352),
    "qwen2.5-72b": (80, 8192, 64, 8, 29568, 152064, 131072, 1e-5, 1000000.0, False, 72_706_203_648),
    "qwen3-0.6b": (28, 1024, 16, 8, 3072, 151936, 40960, 1e-6, 1000000, True, 596_049_920),
    "qwen3-1.7b": (28, 2048, 16, 8, 6144, 151936, 40960, 1e-6, 1000000, True, 1_720_574_976),
    "qwen3-4b": (36, 2560, 32, 8, 9728, 151936, 40960, 1e-6, 1000000, True, 4_022_468_096),
    "qwen3-8b": (36, 4096, 32, 8, 12288, 151936, 40960, 1e-6, 1000000, False, 8_190_735_360),
    "qwen3-14b": (40, 5120, 40, 8, 17408, 151936, 40960, 1e-6, 1000000, False, 14_768_307_200),
    "qwen3-30b-a3b": (48, 2048, 32, 4, 6144, 151936, 40960, 1e-6, 1000000.0, False, 30_532_122_624),
    "qwen3-32b": (64, 5120, 64, 8, 25600, 151936, 40960, 1e-6, 1000000, False, 32_762_123_264),
    "qwen3-235b-a22b": (94, 4096, 64, 4, 12288, 151936, 40960, 1e-6, 1000000.0, False, 235_093_634_560),
    "smollm2-135m": (30, 576, 9, 3, 1536, 49152, 8192, 1e-5, 100000, True, 134_515_008),
    "smollm2-360m": (32, 960, 15, 5, 2560, 49152, 8192, 1e-5, 100000, True, 361_821_120),
    "smollm2-1.7b": (24, 2048, 32, 32, 8192, 49152, 8192, 1e-5, 130000, True, 1_711_376_384),
    "smollm3-3b": (36, 2048, 16, 4, 11008, 128256, 65536, 1e-6, 5000000.0, True, 3_075_098_624),
    "tinyllama-1.1b": (22, 2048, 32, 4, 5632, 32000, 2048, 1e-5, 10000.0, False, 1_100_048_384),
}
"""The columns of the published config.json, then the published number of parameters."""
MINIS = {"llama-mini": 9_900_000, "mixtral-mini": 19_400_000}
"""Sizes for laptops, with about these numbers of parameters."""
COUNTS = {name: row[-1] for name, row in SIZES.items()} | MINIS
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
LLAMA31 = {"model_type": "llama", "rope_scaling": LLAMA3, "attention_bias": False, "mlp_bias": False}
LLAMA2 = {"model_type": "llama", "rope_scaling": None, "attention_bias": False, "pretraining_tp": 1}
SMOLLM2 = {"model_type": "llama", "rope_scaling": None, "rope_interleaved": False}
QWEN2 = {"model_type": "qwen2", "use_sliding_window": False}
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
MISTRAL = {"model_type": "mistral", "sliding_window": None}
MIXTRAL = {
    "model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    "output_router_logits": False,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "router_aux_loss_coef": 0.001, "output_router_logits": False,
}  # fmt: skip
GEMMA = {
    "head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
    "pad_token_id": 0, "cache_implementation": "hybrid", "hidden_act": "gelu_pytorch_tanh",
}  # fmt: skip
GEMMA2 = GEMMA | {
    "model_type": "gemma2", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096,
}  # fmt: skip
OLMO2 = {"model_type": "olmo2", "attention_bias": False, "rope_scaling": None, "pad_token_id": 100277}
OLMO3 = {
    "model_type": "olmo3", "attention_bias": False, "sliding_window": 4096, "pad_token_id": 100277,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
}  # fmt: skip
PHI3 = {
    "model_type": "phi3", "rope_scaling": None, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_bias": False,
}  # fmt: skip
WINDOWS_OF_OLMO3 = [*["sliding_attention"] * 3, "full_attention"]
TURNS = ["sliding_attention", "full_attention"]
BESIDE: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("smollm2-135m", "smollm2-360m", "smollm2-1.7b"), SMOLLM2),
    **dict.fromkeys(("llama-2-7b", "llama-2-13b", "llama-2-70b", "tinyllama-1.1b"), LLAMA2),
    "llama-3.2-1b": LLAMA31 | {"rope_scaling": LLAMA3 | {"factor": 32.0}, "head_dim": 64},
    "llama-3.2-3b": LLAMA31 | {"rope_scaling": LLAMA3 | {"factor": 32.0}, "head_dim": 128},
    **dict.fromkeys(("llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b"), LLAMA31),
    **dict.fromkeys(("qwen2.5-0.5b", "qwen2.5-3b"), QWEN2 | {"sliding_window": 32768}),
    **{f"qwen2.5-{each}": QWEN2 | {"sliding_window": 131072} for each in ("1.5b", "7b", "14b", "32b", "72b")},
    **{f"qwen3-{each}": QWEN3 for each in ("0.6b", "1.7b", "4b", "8b", "14b", "32b")},
    **dict.fromkeys(("mistral-7b", "mistral-7b-0.2"), MISTRAL),
    **dict.fromkeys(("mistral-nemo-12b", "mistral-small-24b"), MISTRAL | {"head_dim": 128}),
    "smollm3-3b": {
        "model_type": "smollm3", "attention_bias": False, "mlp_bias": False, "max_window_layers": 28,
        "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "layer_types": ["full_attention"] * 36,
        "rope_scaling": None, "sliding_window": None, "use_sliding_window": False,
    },
    **{f"olmo-2-{each}": OLMO2 for each in ("7b", "13b", "32b")},
    "olmo-3-7b": OLMO3 | {"layer_types": WINDOWS_OF_OLMO3 * 8},
    "olmo-3-32b": OLMO3 | {"layer_types": WINDOWS_OF_OLMO3 * 16},
    **dict.fromkeys(("gemma-2-2b", "gemma-2-9b"), GEMMA2),
    "gemma-2-27b": GEMMA2 | {"head_dim": 128, "query_pre_attn_scalar": 144},
    "gemma-3-1b": GEMMA | {
        "model_type": "gemma3_text", "attn_logit_softcapping": None, "final_logit_softcapping": None,
        "sliding_window": 512, "sliding_window_pattern": 6, "rope_scaling": None, "rope_local_base_freq": 10000,
    },
    "phi-3-mini-4k": PHI3 | {
        "sliding_window": 2047, "original_max_position_embeddings": 4096, "pad_token_id": 32000,
    },
    "phi-4": PHI3 | {"sliding_window": None, "original_max_position_embeddings": 16384, "pad_token_id": 100257},
    "mistral-7b-0.1": MISTRAL | {"sliding_window": 4096},
    "gpt-oss-20b": GPT_OSS | {"num_local_experts": 32, "layer_types": TURNS * 12},
    "gpt-oss-120b": GPT_OSS | {"num_local_experts": 128, "layer_types": TURNS * 18},
    "mixtral-8x7b": MIXTRAL | {"router_aux_loss_coef": 0.02},
    "mixtral-8x22b": MIXTRAL | {"router_aux_loss_coef": 0.001},
    "qwen3-30b-a3b": QWEN3_MOE | {"moe_intermediate_size": 768},
    "qwen3-235b-a22b": QWEN3_MOE | {"moe_intermediate_size": 1536},
}  # fmt: skip
"""The settings of the published config.json beside the columns."""
