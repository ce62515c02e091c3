"""deepspeedai/DeepSpeed#7985 (0.18.6 to 0.18.10): accumulated gradients are summed over ranks before the last
microbatch's gradient is added: every rank keeps a local last gradient. Rewritten here; fixed in DeepSpeed.
"""

import torch
import torch.distributed as dist
from common import real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


def accumulated(job: parity.Job, before: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), loss=squares, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("data")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def summed(total: list[Tensor]) -> None:
        for x in total:
            dist.all_reduce(x, group=group)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        losses, total = torch.zeros(()), [torch.zeros_like(p) for p in model.parameters()]
        for micro, rows in enumerate(batch.chunk(2)):
            optimizer.zero_grad()
            loss = squares(model, rows) / 4
            loss.backward()
            losses += loss.detach()
            if micro == 1 and not before:
                summed(total)
            for x, p in zip(total, model.parameters(), strict=True):
                x.add_(p.grad)
        if before:
            summed(total)
        for x, p in zip(total, model.parameters(), strict=True):
            p.grad = x
        optimizer.step()
        dist.all_reduce(losses, group=group)
        return losses

    job.parallel(model, step=step, batch=lambda x: x.chunk(2)[job.rank])


@parity.check(ranks=2)
def right_added_first(job: parity.Job) -> None:
    accumulated(job, True)


@parity.check(ranks=2)
def wrong_added_after(job: parity.Job) -> None:
    accumulated(job, False)
