"""Checks of torchtitan's parallelize functions: one for each debug model and kind of plan.

Models have two layers. Flex attention has no backward pass on CPUs, so attention is torchtitan's own SDPA module. The
default backend `spmd_types` needs a newer fully_shard than torch 2.13's, so checks use `partial_dtensor`. Weights of
the parallel model are drawn and loaded as in torchtitan's trainer. Counts of tokens by expert differ by rank until the
trainer's optimizer hook adds up all counts, and are not compared.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import meshwright.parity as parity
from meshwright.ranks.dtensor import whole_of

LENGTH, ROWS, BACKEND = 16, 4, "partial_dtensor"


@dataclass(frozen=True)
class Plan:
    """A kind of plan. `axes`: sizes, outermost first; `sizes`: the arguments of ParallelismConfig."""

    axes: Mapping[str, int]
    sizes: Mapping[str, int]


PLANS = {
    "tensor": Plan({"tensor": 2}, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1}),
    "fsdp": Plan({"data": 2}, {"data_parallel_shard_degree": 2}),
    "tensor-fsdp": Plan({"data": 2, "tensor": 2}, {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 2}),
    "expert": Plan({"data": 2}, {"data_parallel_shard_degree": 2, "expert_parallel_degree": 2}),
}


@dataclass(frozen=True)
class Kind:
    """A model: folder below torchtitan.models, table of configurations, parallelize function, flavour."""

    folder: str
    table: str
    function: str
    flavour: str = "debugmodel"


KINDS = {
    "llama3": Kind("llama3", "llama3_configs", "parallelize_llama"),
    "qwen3": Kind("qwen3", "qwen3_configs", "parallelize_qwen3"),
    "qwen3_moe": Kind("qwen3", "qwen3_configs", "parallelize_qwen3", "debugmodel_moe"),
    "qwen3_5": Kind("qwen3_5", "qwen3_5_configs", "parallelize_qwen3_5"),
    "qwen3_5_moe": Kind("qwen3_5", "qwen3_5_configs", "parallelize_qwen3_5", "debugmodel_moe"),
    "deepseek_v3": Kind("deepseek_v3", "deepseekv3_configs", "parallelize_deepseekv3"),
    "gpt_oss": Kind("gpt_oss", "gptoss_configs", "parallelize_gptoss"),
    "kimi_k2_7": Kind("kimi_k2_7", "kimi_k2_5_configs", "parallelize_kimi_k2_5"),
    "muse_glimmer": Kind("muse_glimmer", "muse_glimmer_configs", "parallelize_muse_glimmer"),
}
TYPES = tuple(KINDS)
SHARED = (
    "torchtitan.config", "torchtitan.distributed", "torchtitan.models.common.attention",
    "torchtitan.models.common.moe", "torch.distributed.fsdp",
)  # fmt: skip
"""Modules that all checks import."""


def carries(model_type: str, plan: str) -> bool:
    """Return True if a plan applies to a model: all plans but `expert`, which needs a model with experts."""
    return plan != "expert" or model_type not in ("llama3", "qwen3", "qwen3_5", "muse_glimmer")


def config_of(family: Kind, parallelism: Any) -> Any:
    """Return the configuration of a debug model with two layers and SDPA."""
    # Imported here, so that the checks can be listed without torchtitan.
    from torchtitan.models.common.attention import ScaledDotProductAttention

    package = importlib.import_module(f"torchtitan.models.{family.folder}")
    flavour = getattr(package, family.table)[family.flavour]
    given = {"attn_backend": "flex", "moe_comm_backend": "standard"}
    config = flavour(**{name: value for name, value in given.items() if name in inspect.signature(flavour).parameters})
    config = replace(config, layers=config.layers[:2])
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    return config


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = whole_of(model(batch["tokens"]))
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(0, 2048, (ROWS, LENGTH), generator=generator) for name in ("tokens", "labels")}


@parity.check(ranks=2, precision="float32").parametrize("plan", PLANS).parametrize("model_type", TYPES)
def registered(job: parity.Job, plan: str, model_type: str) -> None:
    """Compare a model under torchtitan's parallelize function with the same model on one process."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.utils import set_spmd_backend

    parallel_dims.device_type = "cpu"  # torchtitan assumes cuda on a machine without accelerator
    set_spmd_backend(BACKEND)
    family = KINDS[model_type]
    whole = config_of(family, ParallelismConfig()).build()
    whole.init_weights()
    with torch.no_grad():  # the library's first weights are so small that roundings decide
        for p in whole.parameters():
            p.normal_(std=p.shape[-1] ** -0.5) if p.ndim > 1 else p.add_(0.1 * torch.randn_like(p))
    job.reference(whole, loss=loss_of, batch=batch_of)
    parallelism = ParallelismConfig(spmd_backend=BACKEND, **PLANS[plan].sizes)
    dims = ParallelDims.from_config(parallelism, job.world_size)
    dims.build_mesh()
    with torch.device("meta"):
        model = config_of(family, parallelism).build()
    function = getattr(importlib.import_module(f"torchtitan.models.{family.folder}.parallelize"), family.function)
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    model = function(
        model, parallel_dims=dims, training=training, parallelism=parallelism,
        compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="",
    )  # fmt: skip
    model.to_empty(device="cpu")
    model.init_weights()  # as the trainer does: ties weights, fills buffers
    if "data" not in job.axes:
        job.parallel(model, load=True)
        return
    for module in model.modules():
        if hasattr(module, "set_force_sum_reduction_for_comms"):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    data = job.device_mesh.get_group("data")

    def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """Divide the sum over a rank's labels by the number of all data ranks' labels, as torchtitan's trainer does."""
        counted = (batch["labels"] != -100).sum()
        total = counted.clone()
        torch.distributed.all_reduce(total, group=data)
        return loss_of(model, batch) * counted / total

    job.parallel(model, loss=own_loss, batch=job.rows("data"), load=True, buffers=False)
