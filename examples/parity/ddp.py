"""torch's DistributedDataParallel: each rank takes its share of the rows, gradients are averaged."""

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshwright.parity as parity


def build_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(64, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 64))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def batch_of(generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {name: torch.randint(0, 64, (8, 12), generator=generator) for name in ("tokens", "labels")}


@parity.check(ranks=2)
def ddp(job: parity.Job) -> None:
    job.reference(build_model(), loss=loss_of, batch=batch_of, labels=None)
    job.parallel(DistributedDataParallel(job.copy()), batch=job.rows("data"))


@parity.check(ranks=2)
def ddp_unequal(job: parity.Job) -> None:
    job.reference(build_model(), loss=loss_of, batch=batch_of)
    job.parallel(DistributedDataParallel(job.copy()), batch=job.rows("data"))
