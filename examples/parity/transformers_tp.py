"""Tensor-parallel plans of transformers: DistributedConfig(tp_plan="auto") on a small Llama."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.distributed import DistributedConfig

import meshwright.parity as parity

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=32, attn_implementation="eager", use_cache=False,
)  # fmt: skip


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["tokens"], labels=batch["labels"]).loss


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(0, 64, (4, 10), generator=generator)
    return {"tokens": tokens, "labels": tokens.clone()}


@parity.check(ranks=2, axes={"tp": 2}, precision="float32")
def llama_tp_plan(job: parity.Job) -> None:
    job.reference(LlamaForCausalLM(CONFIG), loss=loss_of, batch=batch_of)
    folder = [tempfile.mkdtemp() if job.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    if job.rank == 0:
        job.copy().save_pretrained(folder[0])
    dist.barrier()
    dtype = torch.get_default_dtype()
    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    model = LlamaForCausalLM.from_pretrained(Path(folder[0]), distributed_config=plan, dtype=dtype)
    model.train()
    job.parallel(model)
