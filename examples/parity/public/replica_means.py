"""pytorch/torchtitan#2318: the loss is divided by the labels of the global batch, and FSDP sums gradients, while DDP
and HSDP still average over replicas: gradients and norms are too small by the count of replicas. Rewritten here with
torch's DistributedDataParallel.
"""

import torch
from common import sgd_step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import meshwright.parity as parity


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    inputs = torch.randn(8, 16, generator=generator)
    return {"inputs": inputs, "labels": torch.randint(0, 5, (8,), generator=generator)}


def losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["inputs"]), batch["labels"], reduction="sum")


def replicas(job: parity.Job, times: int) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)), batch=batch_of,
                  loss=lambda model, batch: losses(model, batch) / (batch["labels"] != -100).sum())  # fmt: skip
    model = DistributedDataParallel(job.copy())

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        count = (batch["labels"] != -100).sum()
        torch.distributed.all_reduce(count)
        return losses(model, batch) / count * times

    step = sgd_step(model, loss)

    def reported(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        total = step(model, batch) / times
        torch.distributed.all_reduce(total)
        return total

    job.parallel(model, step=reported, batch=job.rows("data"))


@parity.check(ranks=2)
def right_times_replicas(job: parity.Job) -> None:
    replicas(job, 2)


@parity.check(ranks=2)
def wrong_mean_of_sums(job: parity.Job) -> None:
    replicas(job, 1)
