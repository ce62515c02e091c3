"""Hugging Face's Qwen3-Next and Qwen3.5 imported and exported: both programs' logits and texts are equal.

A round trip keeps all bits. The published size is read. Settings of other models are refused by name.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.config import parse_config
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.families.qwen_next.section import QwenNext
from meshwright.ranks.errors import CheckpointError
from meshwright.tools.evaluate.load import load_text
from meshwright.tools.generate import Sampling, generate_text
from meshwright.training.convert import export_folder, import_folder
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.transfer import family_of
from tests.families.llama.logits import TOKENS, our_logits
from tests.families.qwen_next.models import InFloat64
from tests.training.convert.folders import check_refused, saved

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 4, "linear_value_head_dim": 6, "rms_norm_eps": 1e-4,
    "bos_token_id": 0, "eos_token_id": 256, "pad_token_id": None,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 16,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("qwen3_next", EXPERTS | {"rope_parameters": YARN, "norm_topk_prob": False}),
    "qwen3-next, dense": (
        "qwen3_next",
        {
            "num_experts": 0, "tie_word_embeddings": True, "num_hidden_layers": 3, "linear_conv_kernel_dim": 3,
            "layer_types": ["full_attention", "linear_attention", "full_attention"],
        },
    ),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5, experts": ("qwen3_5_moe_text", EXPERTS | {"rope_parameters": YARN}),
}  # fmt: skip


def hugging_face(folder: Path, case: str, dtype: torch.dtype = torch.float64) -> Any:
    kind, changes = CASES[case]
    settings = transformers.AutoConfig.for_model(kind, **SIZES | changes)
    classes = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    model = saved(classes[type(settings)], settings, folder, dtype, max_shard_size="8KB")
    model.set_experts_implementation("eager")
    byte_tokenizer().save(folder / "tokenizer.json")
    return model


@torch.no_grad()
def their_logits(model: Any) -> torch.Tensor:
    for module in model.modules():
        if hasattr(module, "inv_freq"):  # angles are float32 in every dtype
            module.inv_freq = module.inv_freq.float()
    with InFloat64():
        logits: torch.Tensor = model(TOKENS).logits
    return logits


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_here_and_there_and_back(tmp_path: Path, case: str) -> None:
    model = hugging_face(tmp_path / "hf", case)
    imported = import_folder(tmp_path / "hf", tmp_path / "run" / "checkpoints" / "step-0", shard_bytes=5000)
    assert imported.has_tokenizer
    # A run's weights are float32 or narrower: a folder in float64 is read in this dtype.
    torch.testing.assert_close(our_logits(tmp_path / "run").double(), their_logits(model), rtol=1e-4, atol=1e-5)
    export_folder(tmp_path / "run", tmp_path / "back", shard_bytes=5000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again, facts = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert type(again) is type(model)
    assert not any(facts.values()), facts
    before = model.state_dict()
    for name, tensor in again.state_dict().items():
        # transformers may load a parameter in float32 in any folder.
        assert torch.equal(tensor, before[name].to(tensor.dtype)), name
    again.eval().set_experts_implementation("eager")
    torch.testing.assert_close(their_logits(again.double()), their_logits(model), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("case", CASES)
def test_an_import_generates_what_transformers_does(tmp_path: Path, case: str) -> None:
    model = hugging_face(tmp_path / "hf", case, torch.float32)
    import_folder(tmp_path / "hf", tmp_path / "step-0")
    loaded = load_text(tmp_path / "step-0")
    for prompt in ("abc", "z", "a longer one"):
        ids = torch.tensor([list(prompt.encode())])
        theirs = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=256)[0, ids.shape[1] :].tolist()
        ours = "".join(generate_text(loaded, prompt, 12, Sampling()))
        ended = theirs[: theirs.index(256)] if 256 in theirs else theirs
        assert ours == loaded.tokenizer.decode(ended)


def test_the_text_model_of_a_folder_with_vision_is_saved_alone_first(tmp_path: Path) -> None:
    """transformers saves the text model and keeps the folder's names, as docs/delta_nets.md says."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "mrope_interleaved": True}
    settings = transformers.Qwen3_5Config(
        text_config=SIZES | {"rope_parameters": rope},
        vision_config={"depth": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "out_hidden_size": 16},
    )
    both = saved(transformers.Qwen3_5ForConditionalGeneration, settings, tmp_path / "both", torch.float32)
    byte_tokenizer().save(tmp_path / "both" / "tokenizer.json")
    with pytest.raises(CheckpointError, match="model_type=qwen3_5 has vision"):
        import_folder(tmp_path / "both", tmp_path / "step-0")
    text = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    text.save_pretrained(tmp_path / "text")
    assert any("language_model" in name for name in load_file(tmp_path / "text" / "model.safetensors"))
    byte_tokenizer().save(tmp_path / "text" / "tokenizer.json")
    import_folder(tmp_path / "text", tmp_path / "run" / "checkpoints" / "step-0")
    with torch.no_grad():
        torch.testing.assert_close(our_logits(tmp_path / "run"), both(TOKENS).logits, rtol=1e-4, atol=1e-5)


def test_tensors_of_later_tokens_are_not_read(tmp_path: Path) -> None:
    hugging_face(tmp_path / "hf", "qwen3.5")
    folder, extra = tmp_path / "hf", "mtp.layers.0.mlp.down_proj.weight"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    file = next(iter(index["weight_map"].values()))
    save_file(load_file(folder / file) | {extra: torch.ones(2, 2)}, folder / file, metadata={"format": "pt"})
    index["weight_map"][extra] = file
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    import_folder(folder, tmp_path / "run" / "checkpoints" / "step-0")
    export_folder(tmp_path / "run", tmp_path / "back")
    assert extra not in load_file(tmp_path / "back" / "model.safetensors")


QWEN35: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "eos_token_id": 248044,
    "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "initializer_range": 0.02,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144, "mlp_only_layers": [], "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25,
        "rope_theta": 10000000, "rope_type": "default",
    },
    "tie_word_embeddings": False, "use_cache": True, "vocab_size": 248320,
}  # fmt: skip
"""The `text_config` of a published folder, which has vision as well."""
QWEN35_EXPERTS = QWEN35 | {
    "model_type": "qwen3_5_moe_text", "output_router_logits": False, "router_aux_loss_coef": 0.001,
    "num_key_value_heads": 2,
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": QWEN35 | {
        "model_type": "qwen3_5_text", "hidden_size": 1024, "intermediate_size": 3584, "linear_num_value_heads": 16,
        "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "tie_word_embeddings": True,
    },
    "qwen3.5-27b": QWEN35 | {
        "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "linear_num_value_heads": 48,
        "num_attention_heads": 24, "num_hidden_layers": 64, "num_key_value_heads": 4,
    },
    "qwen3.5-35b-a3b": QWEN35_EXPERTS | {
        "hidden_size": 2048, "linear_num_value_heads": 32, "num_attention_heads": 16, "num_hidden_layers": 40,
        "num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    "qwen3.5-397b-a17b": QWEN35_EXPERTS | {
        "hidden_size": 4096, "linear_num_value_heads": 64, "num_attention_heads": 32, "num_hidden_layers": 60,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 1024,
        "shared_expert_intermediate_size": 1024,
    },
    "qwen3-next-80b-a3b": {
        "architectures": ["Qwen3NextForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4,
        "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
        "intermediate_size": 5120, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_value_head_dim": 128,
        "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
        "moe_intermediate_size": 512, "norm_topk_prob": True, "num_attention_heads": 16, "num_experts": 512,
        "num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": False,
        "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000000,
        "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
}  # fmt: skip
"""config.json of each size, as published by the authors."""
COUNTS = {
    "qwen3.5-0.8b": 752_393_024, "qwen3.5-27b": 26_895_998_464, "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-397b-a17b": 396_346_350_336, "qwen3-next-80b-a3b": 79_674_391_296,
}  # fmt: skip
"""Parameters of each size, without vision and layers of later tokens."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_size_is_the_published_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    read = Settings(tmp_path / "config.json")
    family = family_of(read)
    published = family.read(read, frozenset())
    shipped = parse_config({"model": name, "data": {"sequence": 1}}).model
    assert isinstance(published, QwenNext)
    assert isinstance(shipped, QwenNext)
    if published.experts is not None:
        assert published.experts.balance == 0, "output_router_logits=false leaves it out"
        balance = {"balance": PUBLISHED[name]["router_aux_loss_coef"]}
        published = published.model_copy(update={"experts": published.experts.model_copy(update=balance)})
    assert published == shipped
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    count = sum(parameter.numel() for parameter in theirs.parameters())
    ours = sum(len(pair.theirs) and sum(map(torch.Size.numel, map(torch.Size, pair.theirs.values())))
               for pair in family.pairs(shipped))  # fmt: skip
    assert ours == count == COUNTS[name]


REFUSED: list[tuple[str, dict[str, object], str]] = [
    ("qwen3-next", {"mlp_only_layers": [0]}, r"mlp_only_layers=\[0\] is not supported; valid: \[\]"),
    ("qwen3-next", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported; valid: 1"),
    ("qwen3-next", {"attention_bias": True}, "attention_bias=true is not supported; valid: false"),
    ("qwen3-next", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported; valid: silu"),
    ("qwen3-next", {"attn_output_gate": False}, "attn_output_gate=false is not supported; valid: true"),
    ("qwen3-next", {"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported; valid: null"),
    ("qwen3-next", {"layer_types": ["linear_attention"] * 4}, "layer_types=.* is not supported; valid: a list of 4 of"),
    ("qwen3-next", {"layer_types": ["full_attention"]}, "layer_types=.* is not supported; valid: a list of 4 of"),
    ("qwen3-next", {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval=0 is no number of"),
    ("qwen3-next", {"num_experts_per_tok": None}, "has experts, and lacks num_experts_per_tok"),
    ("qwen3-next", {"linear_num_key_heads": None}, "linear_num_key_heads"),
    ("qwen3-next", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 does not divide linear_num_value_heads=4"),
    ("qwen3-next", {"num_key_value_heads": 3}, "num_key_value_heads=3 does not divide num_attention_heads=4"),
    ("qwen3-next", {"rope_parameters": YARN | {"partial_rotary_factor": 2.0}}, "partial_rotary_factor=2.0 is no share"),
    ("qwen3-next", {"rope_parameters": YARN | {"partial_rotary_factor": 0.4}}, "partial_rotary_factor turns 3 numbers"),
    ("qwen3.5", {"model_type": "qwen3_5"}, "model_type=qwen3_5 has vision, which is not .*; valid: qwen3_5_text"),
    ("qwen3.5", {"vision_config": {"depth": 2}}, "vision_config=.* is not supported; valid: null"),
    ("qwen3.5", {"num_experts": 4}, "num_experts=4 is not supported; valid: null, 0"),
    ("qwen3.5, experts", {"norm_topk_prob": False}, "norm_topk_prob=false is not supported; valid: true"),
]  # fmt: skip


@pytest.mark.parametrize("case, change, message", REFUSED, ids=lambda each: str(each)[:40])
def test_settings_of_other_models_are_refused(
    tmp_path: Path, case: str, change: dict[str, object], message: str
) -> None:
    hugging_face(tmp_path / "hf", case)
    check_refused(tmp_path, change, message)


@pytest.mark.parametrize(
    "fields, told",
    [
        ({"experts": {"shared": 0, "shared_gate": False}}, "shared=0"),
        ({"experts": {"shared_gate": False}}, "shared_gate=false"),
        ({"experts": {"scores": "sigmoid"}}, "scores=sigmoid"),
        ({"experts": {"bias_rate": 0.1}}, "bias_rate=0.1"),
        ({"family": "qwen3.5", "experts": {"renormalise": False}}, "renormalise=false"),
    ],
)
def test_experts_that_transformers_has_not_are_refused(
    tmp_path: Path, fields: dict[str, Any], told: str
) -> None:  # fmt: skip
    from tests.tools.evaluate.tiny import tiny_checkpoint

    experts = {"count": 4, "per_token": 2, "width": 8, "shared": 8, "shared_gate": True, **fields["experts"]}
    shape = {
        "family": "qwen3-next", "layers": 2, "hidden": 16, "heads": 2, "feed_forward": 24, "vocabulary": 257,
        "head_width": 8, "rotary_width": 4, "attention_layers": [False, True], "linear_key_heads": 2,
        "linear_value_heads": 2, "linear_key_width": 4, "linear_value_width": 4, "positions": 16, **fields,
        "experts": experts,
    }  # fmt: skip
    tiny_checkpoint(tmp_path, parse_config({"model": shape, "data": {"sequence": 8, "tokenizer": "bytes"}}))
    with pytest.raises(CheckpointError, match=f"no class of transformers has .* with model.experts.{told}"):
        export_folder(tmp_path, tmp_path / "hf")
