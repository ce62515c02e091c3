"""deepspeedai/DeepSpeed#7839 (fixes #7837): in bf16 without ZeRO gradients are not set to zero after a step, and every
step uses the sum of all gradients before. Rewritten here.
"""

import torch
from common import real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


def trained(job: parity.Job, zeroed: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), loss=squares, batch=real_batch)
    model = nn.parallel.DistributedDataParallel(job.copy())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        loss = squares(model, batch)
        loss.backward()
        optimizer.step()
        if zeroed:
            optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step, batch=job.rows("data"))


@parity.check(ranks=2)
def right_zeroed(job: parity.Job) -> None:
    trained(job, True)


@parity.check(ranks=2)
def wrong_never_zeroed(job: parity.Job) -> None:
    trained(job, False)
