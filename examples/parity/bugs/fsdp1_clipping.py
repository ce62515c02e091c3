"""pytorch/pytorch#88621 and PrimeIntellect-ai/OpenDiloco#6: torch.nn.utils.clip_grad_norm_ on FullyShardedDataParallel
(FSDP1) clips each rank by the norm of this rank's shards; the wrapper's method clip_grad_norm_ is right."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import cross_entropy

import meshwright.parity as parity

CLIP = 0.05


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def batch_of(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 12, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def clipped(job: parity.Job, own: bool) -> None:
    network = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5))
    job.reference(network, loss=loss_of, batch=batch_of, clip=CLIP)
    model = FullyShardedDataParallel(job.copy(), device_id=torch.device("cpu"), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        if own:
            model.clip_grad_norm_(CLIP)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step, batch=job.rows("data"))


@parity.check(ranks=2, precision="float32")
def by_the_wrapper(job: parity.Job) -> None:
    clipped(job, own=True)


@parity.check(ranks=2, precision="float32")
def by_local_norms(job: parity.Job) -> None:
    clipped(job, own=False)
