"""Exports read by torchtitan, if the package is installed: the names of torchtitan's models, and the tensors of
torchtitan's adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from meshwright.training.convert import export_folder, import_folder

transformers = pytest.importorskip("transformers")
pytest.importorskip("torchtitan.models.llama3", exc_type=ImportError)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def config_of(name: str) -> tuple[Any, Any, Any]:
    """Return torchtitan's config, torchtitan's adapter, and the same model of transformers."""
    if name == "llama3":
        from torchtitan.models.llama3 import Llama3StateDictAdapter as Adapter
        from torchtitan.models.llama3 import llama3_configs as configs

        kind, settings, size = transformers.LlamaForCausalLM, transformers.LlamaConfig, "debugmodel"
    else:
        from torchtitan.models.qwen3 import Qwen3StateDictAdapter as Adapter
        from torchtitan.models.qwen3 import qwen3_configs as configs

        kind, settings, size = transformers.Qwen3ForCausalLM, transformers.Qwen3Config, name
        if name.endswith("moe"):
            kind, settings = transformers.Qwen3MoeForCausalLM, transformers.Qwen3MoeConfig
    config = configs[size]("flex")
    config.layers[:] = config.layers[:2]
    attention, tied = config.layers[0].attention, bool(getattr(config, "enable_weight_tying", False))
    moe = getattr(config.layers[0], "moe", None)
    experts = {} if moe is None else {
        "num_experts": moe.num_experts, "num_experts_per_tok": moe.router.top_k,
        "norm_topk_prob": moe.router.route_norm, "moe_intermediate_size": moe.routed_experts.inner_experts.hidden_dim,
    }  # fmt: skip
    inner = experts["moe_intermediate_size"] if moe else config.layers[0].feed_forward.w1.out_features
    fields = experts | {
        "vocab_size": config.vocab_size, "hidden_size": config.dim, "num_hidden_layers": len(config.layers),
        "intermediate_size": inner, "num_attention_heads": attention.n_heads,
        "num_key_value_heads": attention.n_kv_heads or attention.n_heads, "tie_word_embeddings": tied,
        "head_dim": attention.head_dim or config.dim // attention.n_heads,
    }  # fmt: skip
    torch.manual_seed(0)
    return config, Adapter(config, None), kind(settings(**fields))


@pytest.mark.parametrize("name", ["llama3", "debugmodel", "0.6B", "debugmodel_moe"])
def test_torchtitan_reads_an_export(name: str, tmp_path: Path) -> None:
    config, adapter, model = config_of(name)
    model.save_pretrained(tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "step")
    export_folder(tmp_path / "step", tmp_path / "out", form="torchtitan")
    with torch.device("meta"):
        shapes = {key: value.shape for key, value in config.build().state_dict().items()}
    state = {key: torch.zeros(shape) for key, shape in shapes.items()}
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    theirs = load_file(tmp_path / "hf" / "model.safetensors")
    read = adapter.to_hf(state)
    assert read.keys() == theirs.keys()
    assert all(torch.equal(read[key], theirs[key]) for key in theirs)
