"""Checks of the parallel plans that transformers' configurations carry: one for each model type and kind of plan.

A model is the type's own class, with random weights and small sizes. Both models are read from a saved folder, the
parallel one with the plan. Without the plan the second folder must give the reference's weights again: else saving and
reading change the model, and nothing is said of the plan.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

import meshwright.parity as parity
from meshwright.ranks.dtensor import from_all_ranks
from meshwright.ranks.errors import ParityError

VOCABULARY, LENGTH, ROWS = 64, 12, 4
SIZES: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2, "use_cache": False,
    "hidden_size": 32, "num_hidden_layers": 2, "hidden_size_per_layer_input": 8, "d_model": 32, "num_layers": 2,
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_ctx": 64, "rotary_dim": 4, "n_inner": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_global_key_value_heads": 2, "head_dim": 8,
    "global_head_dim": 8, "query_pre_attn_scalar": 8, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "index_n_heads": 4, "index_head_dim": 8, "index_topk": 64,
    "intermediate_size": 64, "intermediate_size_mlp": 64, "ffn_hidden_size": 64, "dense_intermediate_size": 64,
    "shared_intermediate_size": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "expert_ffn_hidden_size": 32, "num_experts": 4, "n_routed_experts": 4, "num_local_experts": 4,
    "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "num_kv_shared_layers": 0,
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "mamba_d_state": 8,
    "ssm_state_size": 8, "mamba_n_groups": 1, "n_groups": 1, "mamba_dt_rank": 8,
    "attention_dropout": 0.0, "hidden_dropout": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "residual_dropout": 0.0,
    "attn_pdrop": 0.0, "dropout": 0.0, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0,
}  # fmt: skip
"""Small sizes by their names in configurations. A name that a configuration lacks, or refuses, is left out."""

logging.set_verbosity_error()
logging.disable_progress_bar()


@dataclass(frozen=True)
class Plan:
    """A kind of plan. `attribute`: where a configuration has it; `axes`: sizes, outermost first; `sizes`: the
    arguments of DistributedConfig."""

    attribute: str
    axes: Mapping[str, int]
    sizes: Mapping[str, Any]


PLANS = {
    "tensor": Plan("base_model_tp_plan", {"tensor": 2}, {"tp_size": 2, "tp_plan": "auto"}),
    "tensor4": Plan("base_model_tp_plan", {"tensor": 4}, {"tp_size": 4, "tp_plan": "auto"}),
    "expert": Plan("base_model_ep_plan", {"data": 2}, {"fsdp_size": 2, "ep_size": 2}),
    "tensor-expert": Plan("base_model_ep_plan", {"tensor": 2}, {"tp_size": 2, "tp_plan": "auto", "ep_size": 2}),
    "fsdp": Plan("base_model_fsdp_plan", {"data": 2}, {"fsdp_size": 2}),
    "hsdp": Plan("base_model_fsdp_plan", {"data": 4}, {"dp_replicate_size": 2, "fsdp_size": 2}),
    "tensor-fsdp": Plan(
        "base_model_tp_plan", {"data": 2, "tensor": 2}, {"fsdp_size": 2, "tp_size": 2, "tp_plan": "auto"}
    ),
}
TYPES = tuple(CONFIG_MAPPING_NAMES)
"""All model types; a check's case is one of them."""


def has(config: PretrainedConfig, name: str) -> bool:
    """Whether a configuration has a field, and one value of it for all layers."""
    try:
        return hasattr(config, name)
    except Exception:  # heterogeneous configurations refuse the question
        return False


def small_config(kind: type[PretrainedConfig]) -> PretrainedConfig:
    """A configuration of a class with small sizes, also inside of its parts.

    Raises:
        ValueError, TypeError and others: The class's own, if no choice of sizes satisfies the class.
    """
    default = kind()
    given: dict[str, Any] = {name: value for name, value in SIZES.items() if has(default, name)}
    if has(default, "kv_lora_rank"):  # latent attention has its own head sizes, and a key for each head
        given.pop("head_dim", None)
        given["num_key_value_heads"] = SIZES["num_attention_heads"]
    for name, part in kind.sub_configs.items():
        if isinstance(part, type) and part not in (kind, PretrainedConfig) and getattr(default, name, None) is not None:
            given[name] = small_config(part).to_dict()
    code = find_spec(modeling_of(kind))
    if has(default, "rope_parameters") and code and "mrope_section" in Path(str(code.origin)).read_text():
        rope = default.rope_parameters or {}
        half = int(SIZES["head_dim"] * rope.get("partial_rotary_factor", 1)) // 2
        given["rope_parameters"] = rope | {"mrope_section": [half // 4, half // 4, half - half // 4 * 2]}
    while True:
        try:
            return kind(**given)
        except Exception as error:
            refused = [name for name in given if name in str(error)]
            if not refused:
                raise
            del given[refused[0]]


def modeling_of(kind: type[PretrainedConfig]) -> str:
    """The name of the module of a configuration's models, if the configuration has its own."""
    return kind.__module__.replace(".configuration_", ".modeling_")


def class_of(model_type: str) -> type[PreTrainedModel]:
    """The class of a type: the causal language model, else the first model whose configuration is the type's.

    Raises:
        LookupError: The library has no such class.
    """
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        causal: type[PreTrainedModel] = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
        return causal
    kind = CONFIG_MAPPING[model_type]
    module = importlib.import_module(modeling_of(kind))
    classes = [
        value for value in vars(module).values() if isinstance(value, type) and issubclass(value, PreTrainedModel)
    ]
    fits = [each for each in classes if each.config_class is kind and "PreTrained" not in each.__name__]
    if not fits:
        raise LookupError(f"no class of {module.__name__} has the configuration {kind.__name__}")
    return min(fits, key=lambda each: (not each.__name__.endswith("Model"), len(each.__name__)))


def small_model(model_type: str) -> PreTrainedModel:
    """A model of a type, with weights that are no zeros and ones."""
    config = small_config(CONFIG_MAPPING[model_type])
    model: PreTrainedModel = class_of(model_type)._from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim < 2:
                p.add_(0.1 * torch.randn_like(p))
    return model


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss of the labels; without a head the mean of the outputs, weighed by random numbers."""
    output = model(input_ids=batch["tokens"], use_cache=False)
    if hasattr(output, "logits"):
        logits: Tensor = output.logits
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
    hidden: Tensor = output.last_hidden_state
    weight = torch.randn(hidden.shape[-1], generator=torch.Generator().manual_seed(2)).to(hidden)
    return (hidden * weight).mean()


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {"tokens": torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=generator)}


@parity.check(ranks=2, precision="float32").parametrize("plan", PLANS).parametrize("model_type", TYPES)
def registered(job: parity.Job, plan: str, model_type: str) -> None:
    """Compare a model under a plan with the same model on one process."""
    options: dict[str, Any] = {"dtype": torch.get_default_dtype(), "attn_implementation": "eager"}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as own:
        folder = Path(from_all_ranks(own.encode())[0].decode())
        whole = saved_and_read(job, folder / "first", small_model(model_type), options)
        job.reference(whole.train(), loss_of, batch_of)
        same_weights(job.copy(), saved_and_read(job, folder / "second", job.copy(), options))
        model = type(whole).from_pretrained(
            folder / "second", distributed_config=DistributedConfig(**PLANS[plan].sizes), **options
        )
        torch.distributed.barrier()
    job.parallel(model.train(), batch=job.rows("data") if "data" in job.axes else None)


def saved_and_read(job: parity.Job, folder: Path, model: nn.Module, options: Mapping[str, Any]) -> PreTrainedModel:
    """Save a model on rank 0, and read it on every rank."""
    assert isinstance(model, PreTrainedModel)
    if job.rank == 0:
        model.save_pretrained(folder)
    torch.distributed.barrier()
    return type(model).from_pretrained(folder, **options)


def same_weights(saved: nn.Module, read: nn.Module) -> None:
    """Compare a model with what is read of its folder.

    Raises:
        ParityError: A tensor differs.
    """
    again = read.state_dict()
    for name, x in saved.state_dict().items():
        if name not in again or not torch.equal(x, again[name]):
            raise ParityError(f"{name} is another after saving and reading, without a plan")
