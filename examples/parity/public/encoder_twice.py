"""deepspeedai/DeepSpeed#8224 (0.18.3 to 0.19.3): a step runs a module twice, on two branches of the graph; the gradient
summed over ranks has one branch's share alone. Rewritten here; fixed by #8245.
"""

from typing import Any

import torch.distributed as dist
from common import real_batch, sgd_step
from torch import Tensor, nn

import meshwright.parity as parity


class Twice(nn.Module):
    """An encoder of two inputs; `other` is applied to the second output."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(16, 16), nn.Linear(16, 16)
        self.other: Any = lambda y: y

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.encoder(x), self.other(self.encoder(x.flip(1)))
        return self.head(first) + second


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def encoded(job: parity.Job, both: bool) -> None:
    job.reference(Twice(), loss=loss_of, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("data")
    if not both:
        model.other = lambda y: y.detach()  # the sum never has this branch's share

    def reduce() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= 2

    step = sgd_step(model, loss_of, reduce)

    def reported(model: nn.Module, batch: Tensor) -> Tensor:
        total = step(model, batch) / 2
        dist.all_reduce(total, group=group)
        return total

    job.parallel(model, step=reported, batch=lambda x: x.chunk(2)[job.rank])


@parity.check(ranks=2)
def right_both(job: parity.Job) -> None:
    encoded(job, True)


@parity.check(ranks=2)
def wrong_first_alone(job: parity.Job) -> None:
    encoded(job, False)
