"""huggingface/transformers#48205 and #48687 as they stand in a released package: OLMoE, experts on ranks of their own.
Seen on transformers 5.16.1; what each version says is in docs/parity.md."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import OlmoeConfig, OlmoeForCausalLM
from transformers.distributed import DistributedConfig

import meshwright.parity as parity

CONFIG = OlmoeConfig(
    vocab_size=96, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False, max_position_embeddings=32,
    attn_implementation="eager", use_cache=False,
)  # fmt: skip


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(input_ids=batch["tokens"], labels=batch["labels"]).loss


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    tokens = torch.randint(0, 96, (4, 10), generator=generator)
    return {"tokens": tokens, "labels": tokens.clone()}


def experts(job: parity.Job, implementation: str) -> None:
    job.reference(OlmoeForCausalLM(CONFIG), loss=loss_of, batch=batch_of)
    folder = [tempfile.mkdtemp() if job.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    if job.rank == 0:
        job.copy().save_pretrained(folder[0])
    dist.barrier()
    plan = DistributedConfig(tp_size=2, enable_expert_parallel=True)
    model = OlmoeForCausalLM.from_pretrained(
        Path(folder[0]), distributed_config=plan, dtype=torch.get_default_dtype(), experts_implementation=implementation
    )
    model.train()
    job.parallel(model)


@parity.check(ranks=2, axes={"ep": 2}, precision="float32")
def each_expert(job: parity.Job) -> None:
    experts(job, "eager")


@parity.check(ranks=2, axes={"ep": 2}, precision="float32")
def batched(job: parity.Job) -> None:
    experts(job, "batched_mm")
