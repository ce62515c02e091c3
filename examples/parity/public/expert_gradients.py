"""pytorch/pytorch#160285 (torchtitan's experts): an expert on one rank receives tokens of all data ranks, each with the
gradient of the sending rank's mean loss. All other gradients are averaged over ranks; the experts' sums are not, and
are twice too large on two ranks. Rewritten here.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright.parity as parity


class Experts(nn.Module):
    """Two experts: the first half of each row's positions is for the first expert, the second half for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.experts = nn.Linear(16, 16), nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.travel: Any = None

    def forward(self, x: Tensor) -> Tensor:
        boxes = torch.stack(self.enter(x).unflatten(1, (2, -1)).unbind(1))  # [experts, rows, positions, width]
        if self.travel is not None:
            return self.travel(boxes)
        return torch.stack([expert(box) for expert, box in zip(self.experts, boxes, strict=True)])


class Exchange(torch.autograd.Function):
    """Send box i to rank i. The exchange is the inverse of itself, and the backward pass of itself."""

    @staticmethod
    def forward(ctx: object, boxes: Tensor) -> Tensor:
        parts = [torch.empty_like(boxes) for _ in range(2)]
        dist.all_gather(parts, boxes.contiguous())
        return torch.stack([peer[dist.get_rank()] for peer in parts])

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> Tensor:
        return Exchange.apply(gradients[0])


def experts(job: parity.Job, divided: bool) -> None:
    batch = lambda generator: torch.randn(8, 6, 16, generator=generator)  # noqa: E731
    job.reference(Experts(), loss=lambda model, batch: model(batch).square().mean(), batch=batch)
    model, group = job.copy(), job.device_mesh.get_group("data")
    mine = model.experts[job.rank]
    model.experts[1 - job.rank] = None
    model.travel = lambda boxes: Exchange.apply(mine(Exchange.apply(boxes)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        loss = model(batch).square().mean()
        loss.backward()
        for p in model.enter.parameters():
            dist.all_reduce(p.grad, group=group)
        for p in (*model.enter.parameters(), *(mine.parameters() if divided else ())):
            p.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step, batch=job.rows("data"))


@parity.check(ranks=2)
def right_divided(job: parity.Job) -> None:
    experts(job, True)


@parity.check(ranks=2)
def wrong_sums(job: parity.Job) -> None:
    experts(job, False)
