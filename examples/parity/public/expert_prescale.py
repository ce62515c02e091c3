"""NVIDIA/Megatron-LM#7165: generalised tensor parallelism makes the data-parallel group smaller. Dense gradients are
divided by the smaller size, and the group's average supplies the missing factor. Experts' gradients are divided by the
same size, and the experts' group supplies a smaller factor. Rewritten here; fixed in Megatron.
"""

import torch
import torch.distributed as dist
from expert_gradients import Exchange, Experts
from torch import Tensor, nn

import meshwright.parity as parity

SHARED, SHARED_BY_EXPERTS = 2, 1
"""Factors that make the data-parallel group smaller, for dense layers and for experts."""


def experts(job: parity.Job, corrected: bool) -> None:
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
        smaller = 2 // SHARED
        for p in model.enter.parameters():
            p.grad /= smaller * SHARED
            dist.all_reduce(p.grad, group=group)
        for p in mine.parameters():
            p.grad /= smaller * (SHARED / SHARED_BY_EXPERTS if corrected else SHARED_BY_EXPERTS)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step, batch=job.rows("data"))


@parity.check(ranks=2)
def right_corrected(job: parity.Job) -> None:
    experts(job, True)


@parity.check(ranks=2)
def wrong_dense_size(job: parity.Job) -> None:
    experts(job, False)
