"""NVIDIA/Megatron-LM#6660: if a gradient's data-parallel group has one rank, the reduced gradient and the accumulated
gradient are the same buffer. Every microbatch adds the buffer to itself: 2^N. Rewritten here.
"""

import torch
import torch.distributed as dist
from common import real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


def accumulated(job: parity.Job, copied: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)), loss=squares, batch=real_batch)
    model = job.copy()
    alone = [dist.new_group([rank]) for rank in range(2)][job.rank]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        losses, total = torch.zeros(()), [torch.zeros_like(p) for p in model.parameters()]
        for rows in batch.chunk(2):
            loss = squares(model, rows) / 2
            loss.backward()
            losses += loss.detach()
            for x, p in zip(total, model.parameters(), strict=True):
                local = p.grad if copied else x.add_(p.grad)
                dist.all_reduce(local, group=alone)
                x.add_(local)
                p.grad = None
        for x, p in zip(total, model.parameters(), strict=True):
            p.grad = x
        optimizer.step()
        return losses

    job.parallel(model, step=step)


@parity.check(ranks=2)
def right_apart(job: parity.Job) -> None:
    accumulated(job, True)


@parity.check(ranks=2)
def wrong_in_place(job: parity.Job) -> None:
    accumulated(job, False)
