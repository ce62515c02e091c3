"""torchtitan's Llama and parallelize function: tensor parallel with sequence parallelism, and fully_shard."""

from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims, parallel_dims
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama

import meshwright.parity as parity

parallel_dims.device_type = "cpu"  # torchtitan says cuda if there is no accelerator


def built(parallelism: ParallelismConfig) -> nn.Module:
    """Build the debug model with two layers; flex attention has no backward pass on CPU."""
    config = llama3_configs["debugmodel"](attn_backend="flex")
    config.layers = config.layers[:2]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism))
    return config.build()


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"])
    logits = logits.full_tensor() if isinstance(logits, DTensor) else logits
    return cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(0, 2048, (4, 16), generator=generator) for name in ("tokens", "labels")}


def parallelized(job: parity.Job, **degrees: int) -> nn.Module:
    whole = built(ParallelismConfig())
    whole.init_weights()
    job.reference(whole, loss=loss_of, batch=batch_of)
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor", **degrees)
    dims = ParallelDims.from_config(parallelism, job.world_size)
    dims.build_mesh()
    model = built(parallelism)
    model.load_state_dict(job.copy().state_dict())
    training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
    return parallelize_llama(model, parallel_dims=dims, training=training, parallelism=parallelism,
                             compile_config=CompileConfig(enable=False), ac_config=None, dump_folder="")  # fmt: skip


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def tensor(job: parity.Job) -> None:
    job.parallel(parallelized(job, tensor_parallel_degree=2, data_parallel_shard_degree=1))


@parity.check(ranks=2, precision="float32")
def fsdp(job: parity.Job) -> None:
    """torchtitan sums gradients over ranks: a rank's loss is a sum divided by all ranks' labels, as in the trainer."""
    model = parallelized(job, data_parallel_shard_degree=2)
    for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor

    def own_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        counted = (batch["labels"] != -100).sum()
        total = counted.clone()
        torch.distributed.all_reduce(total)
        return loss_of(model, batch) * counted / total

    job.parallel(model, loss=own_loss, batch=job.rows("data"))
