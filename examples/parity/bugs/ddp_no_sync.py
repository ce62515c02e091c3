"""Two public mistakes with torch's DDP and gradient accumulation, written as in the loops, and the right loop.

modelscope/FunASR#3472: `batch_idx % accum_grad` reduced the first microbatch, not the last one before the optimizer.
karpathy/build-nanogpt#30: require_backward_grad_sync was set between forward and backward, which is too late.
"""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import meshwright.parity as parity

MICRO = 2


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def batch_of(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(8, 12, generator=generator), torch.randint(0, 5, (8,), generator=generator)


def accumulated(job: parity.Job, loop: str) -> None:
    job.reference(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)), loss=loss_of, batch=batch_of)
    model = DistributedDataParallel(job.copy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> None:
        for micro in range(MICRO):
            last = micro == MICRO - 1
            reduces = {"right": last, "funasr": micro % MICRO == 0, "nanogpt": True}[loop]
            with nullcontext() if reduces else model.no_sync():
                loss = loss_of(model, tuple(x.chunk(MICRO)[micro] for x in batch)) / MICRO
                if loop == "nanogpt":
                    model.require_backward_grad_sync = last
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    job.parallel(model, step=step, batch=job.rows("data"))


@parity.check(ranks=2)
def mended(job: parity.Job) -> None:
    accumulated(job, "right")


@parity.check(ranks=2)
def funasr_3472(job: parity.Job) -> None:
    accumulated(job, "funasr")


@parity.check(ranks=2)
def build_nanogpt_30(job: parity.Job) -> None:
    accumulated(job, "nanogpt")
