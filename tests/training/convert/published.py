"""Small published folders: the settings of each family of docs/models.md, as published by the authors, with a model of
a few thousand parameters and a tokenizer of the 256 bytes and the family's special tokens.

A setting of an id has the token's spelling here; the tokenizer supplies the number.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers
from tokenizers import processors

from meshwright.data.tokenizer import byte_tokenizer
from tests.training.convert.folders import saved

TINY: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3_CHAT = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)

GPT_OSS = ("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>")
GPT_OSS_CHAT = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '<|message|>' + message['content'] }}"
    "{{ '<|return|>' if message['role'] == 'assistant' and loop.last else '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}"
)
"""The template of gpt-oss without channels."""


@dataclass(frozen=True)
class Published:
    """A family's folder.

    Attributes:
        special: The special tokens in the order of their ids.
        begin: The begin token that is read from the folder.
        end: The end token that is read from the folder.
        stops: The stop tokens that are read from the folder.
    """

    special: tuple[str, ...]
    config: dict[str, Any]
    generation: dict[str, Any]
    tokenizer: dict[str, Any]
    map: dict[str, Any]
    begin: str | None
    end: str
    stops: tuple[str, ...]
    template: str | None = None
    """chat_template.jinja, if the template is no setting of tokenizer_config.json."""
    closes: str | None = None
    """The token that ends an answer, if it is not `end`."""
    opens: bool = field(default=False)
    """Whether tokenizer.json's post-processor puts `begin` in front."""


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": QWEN[0], "hidden_act": "silu",
    "initializer_range": 0.02, "max_window_layers": 21, "model_type": "qwen2", "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1", "use_cache": True, "use_sliding_window": False,
}  # fmt: skip
QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": QWEN[0],
    "head_dim": 8, "hidden_act": "silu", "initializer_range": 0.02, "max_window_layers": 28, "model_type": "qwen3",
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
    "use_sliding_window": False,
}  # fmt: skip
DELTA = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": QWEN[0], "eos_token_id": "<|im_end|>",
    "head_dim": 8, "hidden_act": "silu", "initializer_range": 0.02, "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_value_head_dim": 6,
    "num_hidden_layers": 4, "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
QWEN3_NEXT = DELTA | {
    "architectures": ["Qwen3NextForCausalLM"], "decoder_sparse_step": 1, "full_attention_interval": 4,
    "mlp_only_layers": [], "model_type": "qwen3_next", "moe_intermediate_size": 12, "norm_topk_prob": True,
    "num_experts": 4, "num_experts_per_tok": 2, "output_router_logits": False, "partial_rotary_factor": 0.25,
    "rope_scaling": None, "rope_theta": 10000000, "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 20, "tie_word_embeddings": False, "transformers_version": "4.57.0.dev0",
    "use_sliding_window": False,
}  # fmt: skip
QWEN35 = DELTA | {
    "architectures": ["Qwen3_5ForCausalLM"], "attn_output_gate": True, "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2, "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5, "rope_theta": 10000000,
        "rope_type": "default",
    },
    "tie_word_embeddings": True, "transformers_version": "4.57.0.dev0",
}  # fmt: skip
QWEN_TOKENIZER = {
    "add_bos_token": False, "add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None, "chat_template": CHATML, "clean_up_tokenization_spaces": False, "errors": "replace",
    "model_max_length": 131072, "pad_token": QWEN[0], "split_special_tokens": False,
    "tokenizer_class": "Qwen2Tokenizer", "unk_token": None,
}  # fmt: skip
QWEN_SAMPLED = {
    "bos_token_id": QWEN[0], "pad_token_id": QWEN[0], "do_sample": True, "eos_token_id": ["<|im_end|>", QWEN[0]],
    "temperature": 0.7, "top_p": 0.8, "top_k": 20, "transformers_version": "4.37.0",
}  # fmt: skip
LLAMA3 = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>",
)  # fmt: skip
LLAMA31 = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bos_token_id": LLAMA3[0], "hidden_act": "silu", "initializer_range": 0.02, "mlp_bias": False,
    "model_type": "llama", "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0", "use_cache": True,
}  # fmt: skip
LLAMA_TOKENIZER = {
    "bos_token": LLAMA3[0], "clean_up_tokenization_spaces": True,
    "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 131072,
    "tokenizer_class": "PreTrainedTokenizerFast",
}  # fmt: skip
SMOL = {
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.041666666666666664, "is_llama_config": True, "mlp_bias": False, "model_type": "llama",
    "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None, "rope_theta": 100000,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.42.3", "use_cache": True,
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
}  # fmt: skip
MISTRAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]")
MISTRAL_CONFIG = {
    "architectures": ["MistralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": "<s>", "eos_token_id": "</s>",
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "mistral", "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0", "use_cache": True,
}  # fmt: skip
MISTRAL_TOKENIZER = {
    "add_bos_token": True, "add_eos_token": False, "bos_token": "<s>", "chat_template": MISTRAL_CHAT,
    "clean_up_tokenization_spaces": False, "eos_token": "</s>", "legacy": True,
    "model_max_length": 1000000000000000019884624838656, "pad_token": None, "sp_model_kwargs": {},
    "spaces_between_special_tokens": False, "tokenizer_class": "LlamaTokenizer", "unk_token": "<unk>",
    "use_default_system_prompt": False,
}  # fmt: skip
FROM_MODEL = {"_from_model_config": True, "bos_token_id": "<s>", "eos_token_id": "</s>", "transformers_version": "4.42"}
SENTENCEPIECE_MAP = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
SMOL3 = ("<|begin_of_text|>", "<|end_of_text|>", "<|finetune_right_pad_id|>", "<|im_start|>", "<|im_end|>")
OLMO = ("<|endoftext|>", "<|pad|>")
OLMO_TOKENIZER = {
    "add_prefix_space": False, "bos_token": None, "clean_up_tokenization_spaces": False, "eos_token": OLMO[0],
    "model_max_length": 4096, "pad_token": OLMO[1], "tokenizer_class": "GPT2Tokenizer", "unk_token": OLMO[0],
}  # fmt: skip
PHI = ("<unk>", "<s>", "</s>", "<|endoftext|>", "<|assistant|>", "<|end|>", "<|user|>")
PHI_CHAT = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
GEMMA = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
GEMMA_CONFIG = {
    "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": "<bos>", "cache_implementation": "hybrid",
    "head_dim": 6, "hidden_activation": "gelu_pytorch_tanh", "initializer_range": 0.02, "pad_token_id": "<pad>",
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "torch_dtype": "bfloat16", "use_cache": True,
}  # fmt: skip
GEMMA_CHAT = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
    "{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# GemmaTokenizer would build a model of sentence pieces; the 256 bytes are none.
GEMMA_TOKENIZER = {
    "add_bos_token": True, "add_eos_token": False, "bos_token": "<bos>", "chat_template": GEMMA_CHAT,
    "clean_up_tokenization_spaces": False, "eos_token": "<eos>", "model_max_length": 1000000000000000019884624838656,
    "pad_token": "<pad>", "sp_model_kwargs": {}, "spaces_between_special_tokens": False,
    "tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "use_default_system_prompt": False,
}  # fmt: skip
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜begin▁of▁sentence｜>")
DEEPSEEK_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    f"{{{{ '{DEEPSEEK[1]}' + message['content'] }}}}{{% else %}}"
    f"{{{{ '{DEEPSEEK[2]}' + message['content'] + '{DEEPSEEK[0]}' }}}}{{% endif %}}{{% endfor %}}"
    f"{{% if add_generation_prompt %}}{{{{ '{DEEPSEEK[2]}' }}}}{{% endif %}}"
)


def added(text: str) -> dict[str, Any]:
    """Return a token with properties, as written by DeepSeek and in older files."""
    return {"__type": "AddedToken", "content": text, "lstrip": False, "normalized": True, "single_word": False}


FAMILIES = {
    "qwen2.5": Published(
        QWEN, QWEN2 | {"eos_token_id": QWEN[0]},
        {"bos_token_id": QWEN[0], "do_sample": False, "eos_token_id": QWEN[0], "max_new_tokens": 2048},
        QWEN_TOKENIZER | {"eos_token": QWEN[0]}, {}, None, QWEN[0], (QWEN[0],),
    ),
    "qwen2.5-instruct": Published(
        QWEN, QWEN2 | {"eos_token_id": "<|im_end|>"}, QWEN_SAMPLED | {"repetition_penalty": 1.05},
        QWEN_TOKENIZER | {"eos_token": "<|im_end|>"}, {}, None, "<|im_end|>", ("<|im_end|>", QWEN[0]),
    ),
    "qwen3-base": Published(
        QWEN, QWEN3 | {"eos_token_id": QWEN[0]},
        {"bos_token_id": QWEN[0], "do_sample": False, "eos_token_id": QWEN[0], "max_new_tokens": 2048},
        QWEN_TOKENIZER | {"eos_token": QWEN[0]}, {}, None, QWEN[0], (QWEN[0],),
    ),
    "qwen3": Published(
        QWEN, QWEN3 | {"eos_token_id": "<|im_end|>"}, QWEN_SAMPLED | {"temperature": 0.6, "top_p": 0.95},
        QWEN_TOKENIZER | {"eos_token": "<|im_end|>"}, {}, None, "<|im_end|>", ("<|im_end|>", QWEN[0]),
    ),
    **{
        name: Published(
            QWEN, config, QWEN_SAMPLED, QWEN_TOKENIZER | {"eos_token": "<|im_end|>"}, {}, None, "<|im_end|>",
            ("<|im_end|>", QWEN[0]),
        )
        for name, config in (("qwen3-next", QWEN3_NEXT), ("qwen3.5", QWEN35))
    },
    "llama-3.1": Published(
        LLAMA3, LLAMA31 | {"eos_token_id": LLAMA3[1]},
        {"_from_model_config": True, "bos_token_id": LLAMA3[0], "do_sample": True, "eos_token_id": LLAMA3[1],
         "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.43.0.dev0"},
        LLAMA_TOKENIZER | {"eos_token": LLAMA3[1]}, {"bos_token": LLAMA3[0], "eos_token": LLAMA3[1]},
        LLAMA3[0], LLAMA3[1], (LLAMA3[1],), opens=True,
    ),
    "llama-3.1-instruct": Published(
        LLAMA3, LLAMA31 | {"eos_token_id": [LLAMA3[1], "<|eom_id|>", "<|eot_id|>"]},
        {"bos_token_id": LLAMA3[0], "do_sample": True, "eos_token_id": [LLAMA3[1], "<|eom_id|>", "<|eot_id|>"],
         "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3"},
        LLAMA_TOKENIZER | {"eos_token": "<|eot_id|>", "chat_template": LLAMA3_CHAT},
        {"bos_token": added(LLAMA3[0]), "eos_token": added("<|eot_id|>")},
        LLAMA3[0], "<|eot_id|>", (LLAMA3[1], "<|eom_id|>", "<|eot_id|>"), opens=True,
    ),
    "smollm2-instruct": Published(
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        SMOL | {"bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>", "pad_token_id": "<|im_end|>"},
        {"_from_model_config": True, "bos_token_id": "<|im_start|>", "eos_token_id": "<|im_end|>",
         "pad_token_id": "<|im_end|>", "transformers_version": "4.42.3"},
        {"add_prefix_space": False, "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
         "bos_token": "<|im_start|>", "chat_template": CHATML, "clean_up_tokenization_spaces": False,
         "eos_token": "<|im_end|>", "model_max_length": 8192, "pad_token": "<|im_end|>",
         "tokenizer_class": "GPT2Tokenizer", "unk_token": "<|endoftext|>", "vocab_size": 49152},
        {"additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "bos_token": added("<|im_start|>"),
         "eos_token": added("<|im_end|>"), "pad_token": added("<|im_end|>"), "unk_token": added("<|endoftext|>")},
        None, "<|im_end|>", ("<|im_end|>",),
    ),
    "mistral-instruct": Published(
        MISTRAL, MISTRAL_CONFIG, FROM_MODEL, MISTRAL_TOKENIZER, SENTENCEPIECE_MAP, "<s>", "</s>", ("</s>",), opens=True,
    ),
    "smollm3": Published(
        SMOL3,
        {"architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "bos_token_id": SMOL3[0], "eos_token_id": SMOL3[4], "hidden_act": "silu", "initializer_range": 0.02,
         "layer_types": ["full_attention"] * 4, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
         "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0], "num_hidden_layers": 4,
         "pad_token_id": SMOL3[2], "pretraining_tp": 2, "rms_norm_eps": 1e-06, "rope_scaling": None,
         "rope_theta": 5000000.0, "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
         "transformers_version": "4.54.0.dev0", "use_cache": False, "use_sliding_window": False},
        {"bos_token_id": SMOL3[0], "do_sample": True, "eos_token_id": SMOL3[4], "temperature": 0.6, "top_p": 0.95,
         "transformers_version": "4.54.0.dev0"},
        LLAMA_TOKENIZER | {"bos_token": None, "eos_token": SMOL3[4], "pad_token": SMOL3[2]},
        {"eos_token": added(SMOL3[4])}, None, SMOL3[4], (SMOL3[4],), template=CHATML,
    ),
    "olmo-2": Published(
        OLMO,
        {"architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "eos_token_id": OLMO[0], "hidden_act": "silu", "initializer_range": 0.02, "model_type": "olmo2",
         "num_key_value_heads": 4, "pad_token_id": OLMO[1], "rms_norm_eps": 1e-06, "rope_scaling": None,
         "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
         "transformers_version": "4.47.0.dev0", "use_cache": True},
        {"_from_model_config": True, "eos_token_id": OLMO[0], "pad_token_id": OLMO[1],
         "transformers_version": "4.47.0.dev0"},
        OLMO_TOKENIZER, {}, None, OLMO[0], (OLMO[0],),
    ),
    "olmo-3": Published(
        OLMO,
        {"architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "eos_token_id": OLMO[0], "hidden_act": "silu", "initializer_range": 0.02,
         "layer_types": [*["sliding_attention"] * 3, "full_attention"], "model_type": "olmo3", "num_hidden_layers": 4,
         "num_key_value_heads": 4, "pad_token_id": OLMO[1], "rms_norm_eps": 1e-06,
         "rope_scaling": {
             "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
             "original_max_position_embeddings": 16, "rope_type": "yarn",
         },
         "rope_theta": 500000, "sliding_window": 3, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
         "transformers_version": "4.57.0", "use_cache": False},
        {"_from_model_config": True, "eos_token_id": OLMO[0], "pad_token_id": OLMO[1],
         "transformers_version": "4.57.0"},
        OLMO_TOKENIZER, {}, None, OLMO[0], (OLMO[0],),
    ),
    "gemma-2-instruct": Published(
        GEMMA,
        GEMMA_CONFIG | {
            "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0,
            "eos_token_id": ["<eos>", "<end_of_turn>"],
            "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "model_type": "gemma2",
            "rope_theta": 10000.0, "sliding_window": 3, "transformers_version": "4.42.4",
        },
        {"_from_model_config": True, "bos_token_id": "<bos>", "cache_implementation": "hybrid",
         "eos_token_id": ["<eos>", "<end_of_turn>"], "pad_token_id": "<pad>", "transformers_version": "4.42.4"},
        GEMMA_TOKENIZER, {"bos_token": added("<bos>"), "eos_token": added("<eos>")},
        "<bos>", "<eos>", ("<eos>", "<end_of_turn>"), opens=True, closes="<end_of_turn>",
    ),
    "gemma-3-instruct": Published(
        GEMMA,
        GEMMA_CONFIG | {
            "architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": None,
            "eos_token_id": ["<eos>", "<end_of_turn>"], "final_logit_softcapping": None, "model_type": "gemma3_text",
            "num_hidden_layers": 6, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": 3, "sliding_window_pattern": 6, "transformers_version": "4.50.0.dev0",
        },
        {"bos_token_id": "<bos>", "cache_implementation": "hybrid", "do_sample": True,
         "eos_token_id": ["<eos>", "<end_of_turn>"], "pad_token_id": "<pad>", "top_k": 64, "top_p": 0.95,
         "transformers_version": "4.50.0.dev0"},
        GEMMA_TOKENIZER, {"bos_token": added("<bos>"), "eos_token": added("<eos>")},
        "<bos>", "<eos>", ("<eos>", "<end_of_turn>"), opens=True, closes="<end_of_turn>",
    ),
    "phi-3-mini": Published(
        PHI,
        {"architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
         "auto_map": {
             "AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
         },
         "bos_token_id": "<s>", "embd_pdrop": 0.0, "eos_token_id": PHI[3], "hidden_act": "silu",
         "initializer_range": 0.02, "model_type": "phi3", "num_key_value_heads": 4,
         "original_max_position_embeddings": 64, "pad_token_id": PHI[3], "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
         "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 5, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16", "transformers_version": "4.40.2", "use_cache": True},
        {"_from_model_config": True, "bos_token_id": "<s>", "eos_token_id": [PHI[3], PHI[4], PHI[5]],
         "pad_token_id": PHI[3], "transformers_version": "4.39.3"},
        MISTRAL_TOKENIZER | {
            "add_bos_token": False, "chat_template": PHI_CHAT, "eos_token": PHI[3], "pad_token": PHI[3],
            "model_max_length": 4096,
        },
        {"bos_token": added("<s>"), "eos_token": added(PHI[3])}, None, PHI[3], (PHI[3], PHI[4], PHI[5]),
    ),
    "gpt-oss": Published(
        GPT_OSS,
        {"architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
         "eos_token_id": "<|return|>", "experts_per_token": 2, "head_dim": 8, "hidden_act": "silu",
         "initial_context_length": 16, "initializer_range": 0.02,
         "layer_types": ["sliding_attention", "full_attention"], "model_type": "gpt_oss", "num_experts_per_tok": 2,
         "num_local_experts": 4, "output_router_logits": False, "pad_token_id": "<|endoftext|>", "rms_norm_eps": 1e-05,
         "rope_scaling": {
             "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 16,
             "rope_type": "yarn", "truncate": False,
         },
         "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 3, "swiglu_limit": 7.0,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.55.0.dev0",
         "use_cache": True},
        {"bos_token_id": "<|startoftext|>", "do_sample": True,
         "eos_token_id": ["<|return|>", "<|endoftext|>", "<|call|>"], "pad_token_id": "<|endoftext|>",
         "transformers_version": "4.55.0.dev0"},
        {"bos_token": "<|startoftext|>", "clean_up_tokenization_spaces": False, "eos_token": "<|return|>",
         "model_input_names": ["input_ids", "attention_mask"], "model_max_length": 1000000000000000019884624838656,
         "pad_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"},
        {"bos_token": added("<|startoftext|>"), "eos_token": added("<|return|>")}, None, "<|return|>",
        ("<|return|>", "<|endoftext|>", "<|call|>"), template=GPT_OSS_CHAT,
    ),
    "mistral-7b-0.1": Published(
        MISTRAL[:3], MISTRAL_CONFIG | {"rope_theta": 10000.0, "sliding_window": 3}, FROM_MODEL,
        {key: value for key, value in MISTRAL_TOKENIZER.items() if key != "chat_template"}, SENTENCEPIECE_MAP,
        "<s>", "</s>", ("</s>",), opens=True,
    ),
    "qwen2.5-windows": Published(
        QWEN,
        QWEN2 | {"eos_token_id": QWEN[0], "max_window_layers": 1, "sliding_window": 3, "use_sliding_window": True},
        {"bos_token_id": QWEN[0], "do_sample": False, "eos_token_id": QWEN[0], "max_new_tokens": 2048},
        QWEN_TOKENIZER | {"eos_token": QWEN[0]}, {}, None, QWEN[0], (QWEN[0],),
    ),
    "mixtral": Published(
        MISTRAL[:3],
        MISTRAL_CONFIG | {
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_experts_per_tok": 2,
            "num_local_experts": 4, "output_router_logits": False, "router_aux_loss_coef": 0.02,
        },
        FROM_MODEL, {key: value for key, value in MISTRAL_TOKENIZER.items() if key != "chat_template"},
        SENTENCEPIECE_MAP, "<s>", "</s>", ("</s>",), opens=True,
    ),
    "deepseek-v3": Published(
        (DEEPSEEK[3], DEEPSEEK[0], *DEEPSEEK[1:3]),
        {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {
                "AutoConfig": "configuration_deepseek.DeepseekV3Config",
                "AutoModel": "modeling_deepseek.DeepseekV3Model",
                "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
            },
            "bos_token_id": DEEPSEEK[3], "eos_token_id": DEEPSEEK[0], "ep_size": 1, "first_k_dense_replace": 1,
            "hidden_act": "silu", "initializer_range": 0.02, "kv_lora_rank": 12, "model_type": "deepseek_v3",
            "moe_intermediate_size": 12, "moe_layer_freq": 1, "n_group": 4, "n_routed_experts": 8,
            "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 3, "num_key_value_heads": 4,
            "num_nextn_predict_layers": 1, "q_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {
                "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16, "type": "yarn",
            },
            "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "tie_word_embeddings": False,
            "topk_group": 2, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "transformers_version": "4.33.1",
            "use_cache": True, "v_head_dim": 5,
        },
        {"_from_model_config": True, "bos_token_id": DEEPSEEK[3], "eos_token_id": DEEPSEEK[0],
         "transformers_version": "4.39.3"},
        {"add_bos_token": True, "add_eos_token": False, "bos_token": added(DEEPSEEK[3]),
         "clean_up_tokenization_spaces": False, "eos_token": added(DEEPSEEK[0]), "legacy": True,
         "model_max_length": 131072, "pad_token": added(DEEPSEEK[0]), "sp_model_kwargs": {}, "unk_token": None,
         "tokenizer_class": "LlamaTokenizerFast", "chat_template": DEEPSEEK_CHAT},
        {}, DEEPSEEK[3], DEEPSEEK[0], (DEEPSEEK[0],), opens=True,
    ),
    "deepseek-r1-distill-qwen": Published(
        DEEPSEEK, QWEN2 | {"bos_token_id": DEEPSEEK[0], "eos_token_id": DEEPSEEK[0], "tie_word_embeddings": False},
        {"_from_model_config": True, "bos_token_id": DEEPSEEK[3], "do_sample": True, "eos_token_id": DEEPSEEK[0],
         "temperature": 0.6, "top_p": 0.95, "transformers_version": "4.39.3"},
        {"add_bos_token": True, "add_eos_token": False, "bos_token": added(DEEPSEEK[3]),
         "clean_up_tokenization_spaces": False, "eos_token": added(DEEPSEEK[0]), "legacy": True,
         "model_max_length": 16384, "pad_token": added(DEEPSEEK[0]), "sp_model_kwargs": {}, "unk_token": None,
         "tokenizer_class": "LlamaTokenizerFast"},
        {}, DEEPSEEK[3], DEEPSEEK[0], (DEEPSEEK[0],), template=DEEPSEEK_CHAT, opens=True,
    ),
}  # fmt: skip


def tokenizer_of(family: Published) -> tokenizers.Tokenizer:
    """Return a tokenizer of the 256 bytes and then the family's special tokens."""
    tree = json.loads(byte_tokenizer().to_json())
    tree["added_tokens"] = []
    library = tokenizers.Tokenizer.from_str(json.dumps(tree))
    library.add_special_tokens(list(family.special))
    if family.opens:
        begin = family.begin or ""
        template = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A {begin} $B", special_tokens=[(begin, library.token_to_id(begin))]
        )
        library.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return library


def numbered(settings: dict[str, Any], library: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return settings with the tokenizer's ids."""

    def ids(value: Any) -> Any:
        return [ids(one) for one in value] if isinstance(value, list) else library.token_to_id(value)

    return {key: ids(value) if key.endswith("_token_id") else value for key, value in settings.items()}


def publish(name: str, folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Write a family's folder with random weights, and return the model of transformers."""
    family = FAMILIES[name]
    library = tokenizer_of(family)
    config = TINY | {"vocab_size": 256 + len(family.special)} | numbered(family.config, library)
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    settings = transformers.AutoConfig.from_pretrained(folder)
    classes = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    model = saved(classes[type(settings)], settings, folder, dtype)
    files = {"config.json": config, "generation_config.json": numbered(family.generation, library)}
    files["tokenizer_config.json"] = family.tokenizer
    if family.map:
        files["special_tokens_map.json"] = family.map
    for file, tree in files.items():
        (folder / file).write_text(json.dumps(tree, indent=2, ensure_ascii=False))
    if family.template is not None:
        (folder / "chat_template.jinja").write_text(family.template)
    (folder / "tokenizer.json").write_text(library.to_str())
    return model
