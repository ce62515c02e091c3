"""Hugging Face's DeepSeek-V3 imported and exported: both programs' logits are equal, and a round trip keeps all bits.

Shipped sizes are the published sizes. Settings that Meshwright does not compute are refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from meshwright.config import parse_config
from meshwright.data.tokenizer import byte_tokenizer
from meshwright.families.deepseek.section import DeepSeek
from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert import export_folder, import_folder
from meshwright.training.convert.folder import Settings
from meshwright.training.convert.transfer import family_of
from tests.families.llama.logits import our_logits, their_logits
from tests.training.convert.folders import check_refused, saved

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 257, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 32, "q_lora_rank": 10, "kv_lora_rank": 12,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "moe_intermediate_size": 12, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    "bos_token_id": 0, "eos_token_id": 256,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 500.0, "factor": 2.0, "original_max_position_embeddings": 16, "mscale": 1.0,
    "mscale_all_dim": 0.8,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "groups": {"rope_parameters": YARN, "tie_word_embeddings": True},
    "no query latent": {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    "dense": {"first_k_dense_replace": 3},
}


def hugging_face(folder: Path, case: str, dtype: torch.dtype = torch.float64) -> Any:
    """Save a folder with random weights, and with biases that change the choice of experts."""
    settings = transformers.AutoConfig.for_model("deepseek_v3", **SIZES | CASES[case])
    model = saved(transformers.DeepseekV3ForCausalLM, settings, folder, dtype, max_shard_size="8KB")
    byte_tokenizer().save(folder / "tokenizer.json")
    return model


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors in the files of an exported folder."""
    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


@pytest.mark.parametrize("case", CASES)
def test_the_same_logits_here_and_there_and_back(tmp_path: Path, case: str) -> None:
    """transformers' norms and routers compute in float32 for every dtype, so the tolerance is float32's."""
    model = hugging_face(tmp_path / "hf", case)
    imported = import_folder(tmp_path / "hf", tmp_path / "run" / "checkpoints" / "step-0", shard_bytes=5000)
    assert imported.has_tokenizer
    torch.testing.assert_close(our_logits(tmp_path / "run"), their_logits(model), rtol=1e-4, atol=1e-5)
    export_folder(tmp_path / "run", tmp_path / "back", shard_bytes=5000)
    again, facts = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", output_loading_info=True)
    assert not any(facts.values()), facts
    before, stored = model.state_dict(), stored_tensors(tmp_path / "back")
    for name, tensor in again.state_dict().items():
        # From 5.24 on transformers loads routers in float32 in any folder, so the stored tensors are compared as well.
        assert torch.equal(tensor, before[name].to(tensor.dtype)), name
        assert name not in stored or torch.equal(stored[name], before[name]), name
    torch.testing.assert_close(their_logits(again.eval()), their_logits(model), rtol=0, atol=0)


def test_later_tokens_come_and_go_under_the_names_of_published_folders(tmp_path: Path) -> None:
    """A layer after the last is stored with copies of the table and the head, and transformers ignores this layer."""
    from tests.tools.evaluate.tiny import tiny_checkpoint

    experts = {"count": 4, "width": 8, "shared": 8, "scores": "sigmoid", "bias_rate": 0.001, "dense_layers": 1}
    shape = {
        "family": "deepseek", "layers": 2, "hidden": 16, "heads": 2, "feed_forward": 24, "vocabulary": 257,
        "query_rank": 8, "key_value_rank": 8, "head_width": 4, "rotary_width": 4, "value_width": 4, "positions": 16,
        "later_tokens": 1, "experts": experts,
    }  # fmt: skip
    tiny_checkpoint(tmp_path / "run", parse_config({"model": shape, "data": {"sequence": 8, "tokenizer": "bytes"}}))
    export_folder(tmp_path / "run", tmp_path / "hf")
    settings = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert settings["num_nextn_predict_layers"] == 1
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    place = "model.layers.2"
    assert tensors[f"{place}.eh_proj.weight"].shape == (16, 32)
    assert tensors[f"{place}.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    tensors[f"{place}.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{place}.shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    import_folder(tmp_path / "hf", tmp_path / "again" / "checkpoints" / "step-0")
    export_folder(tmp_path / "again", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == tensors.keys() - {f"{place}.embed_tokens.weight", f"{place}.shared_head.head.weight"}
    for name, tensor in back.items():
        assert torch.equal(tensor, tensors[name]), name
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back", dtype=torch.float32)
    torch.testing.assert_close(our_logits(tmp_path / "again"), their_logits(theirs), rtol=1e-4, atol=1e-5)
    tensors[f"{place}.embed_tokens.weight"] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.2\.embed_tokens\.weight is not model\.embed_tok"):
        import_folder(tmp_path / "hf", tmp_path / "other")


def test_a_run_from_a_folder_says_how_its_experts_are_trained(tmp_path: Path) -> None:
    """Rates and losses are no settings of the folder; the presence of biases is one."""
    hugging_face(tmp_path / "hf", "groups")
    source = {"from": str(tmp_path / "hf")}

    def model(**experts: Any) -> Any:
        return parse_config({"model": source | {"experts": experts}, "data": {"sequence": 8}}).model

    wanted = model(bias_rate=0.001, balance=0.01, balance_over="batch", router_z=0.001)
    assert wanted.experts.count == 8
    import_folder(tmp_path / "hf", tmp_path / "step-0", wanted=wanted)
    for change in ({"bias_rate": None}, {"scale": 3.0}):
        with pytest.raises(CheckpointError, match=r"weights are of model\.experts="):
            import_folder(tmp_path / "hf", tmp_path / "other", wanted=model(**change))


CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
COMMON: dict[str, Any] = {
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": CODE, "aux_loss_alpha": 0.001, "ep_size": 1,
    "hidden_act": "silu", "kv_lora_rank": 512, "moe_layer_freq": 1, "norm_topk_prob": True, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "scoring_func": "sigmoid", "seq_aux": True, "tie_word_embeddings": False,
    "topk_method": "noaux_tc", "v_head_dim": 128, "use_cache": True, "architectures": ["DeepseekV3ForCausalLM"],
}  # fmt: skip
ROPE = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096, "type": "yarn",
}  # fmt: skip
PUBLISHED: dict[str, dict[str, Any]] = {
    "deepseek-v3": COMMON | {
        "model_type": "deepseek_v3", "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
        "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536, "rms_norm_eps": 1e-06,
        "rope_scaling": ROPE, "rope_theta": 10000, "routed_scaling_factor": 2.5, "topk_group": 4, "vocab_size": 129280,
    },
    "moonlight-16b-a3b": COMMON | {
        "model_type": "deepseek_v3", "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264,
        "max_position_embeddings": 8192, "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64,
        "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27,
        "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None, "rms_norm_eps": 1e-05,
        "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
    },
    "kimi-k2": COMMON | {
        "model_type": "kimi_k2", "first_k_dense_replace": 1, "hidden_size": 7168, "intermediate_size": 18432,
        "max_position_embeddings": 131072, "moe_intermediate_size": 2048, "n_group": 1, "n_routed_experts": 384,
        "n_shared_experts": 1, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
        "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "rms_norm_eps": 1e-06,
        "rope_scaling": ROPE | {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0}, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
    },
}  # fmt: skip
"""config.json of each size as published by the authors, without FP8 scales, which a bf16 folder has not."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_size_is_the_published_one(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[name]))
    read = Settings(tmp_path / "config.json")
    layers = PUBLISHED[name]["num_hidden_layers"]
    later = frozenset({f"model.layers.{layers}.eh_proj.weight"} if name == "deepseek-v3" else ())
    published = family_of(read).read(read, later)
    shipped = parse_config({"model": name, "data": {"sequence": 2}}).model
    assert isinstance(published, DeepSeek)
    assert isinstance(shipped, DeepSeek)
    assert published.experts is not None
    assert shipped.experts is not None
    # A config.json does not say how a run with drawn weights keeps experts busy.
    trained = {"bias_rate": shipped.experts.bias_rate, "balance": shipped.experts.balance}
    published = published.model_copy(update={"experts": published.experts.model_copy(update=trained)})
    assert published == shipped


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"scoring_func": "softmax"}, "scoring_func=softmax is not supported; valid: sigmoid"),
    ({"topk_method": "greedy"}, "topk_method=greedy is not supported; valid: noaux_tc"),
    ({"moe_layer_freq": 2}, "moe_layer_freq=2 is not supported; valid: 1"),
    ({"attention_bias": True}, "attention_bias=true is not supported; valid: false"),
    ({"rope_interleave": False}, "rope_interleave=false is not supported; valid: true"),
    ({"num_key_value_heads": 2}, "num_key_value_heads=2 is not num_attention_heads=4"),
    ({"quantization_config": {"quant_method": "fp8"}}, r"quantization_config=.*fp8.* is not supported"),
    ({"auto_map": {"AutoModel": "evil.Model"}}, r"auto_map has evil.Model, which is not supported; valid: conf"),
    ({"n_shared_experts": None}, "has n_routed_experts=8, and lacks n_shared_experts"),
    ({"n_group": 3}, "n_group=3 does not divide n_routed_experts=8"),
]


@pytest.mark.parametrize("change, message", REFUSED, ids=[next(iter(change)) for change, _ in REFUSED])
def test_what_we_do_not_compute_is_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    hugging_face(tmp_path / "hf", "groups")
    check_refused(tmp_path, change, message)


@pytest.mark.parametrize(
    "experts, told", [({"scores": "softmax"}, "scores=softmax"), ({"bias_rate": None}, "bias_rate=null"),
                      ({"shared": 10}, "shared=10")],
)  # fmt: skip
def test_what_transformers_has_not_is_refused(tmp_path: Path, experts: dict[str, Any], told: str) -> None:
    from tests.tools.evaluate.tiny import tiny_checkpoint

    shape = {
        "family": "deepseek", "layers": 1, "hidden": 16, "heads": 2, "feed_forward": 24, "vocabulary": 257,
        "key_value_rank": 8, "head_width": 4, "rotary_width": 4, "value_width": 4, "positions": 16,
        "experts": {
            "count": 4, "per_token": 2, "width": 8, "shared": 8, "scores": "sigmoid", "bias_rate": 0.0, **experts,
        },
    }  # fmt: skip
    tiny_checkpoint(tmp_path, parse_config({"model": shape, "data": {"sequence": 8, "tokenizer": "bytes"}}))
    with pytest.raises(CheckpointError, match=f"no class of transformers has experts with model.experts.{told}"):
        export_folder(tmp_path, tmp_path / "hf")
