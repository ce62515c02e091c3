"""pytorch/torchtitan#596 (fixed by #649): under pipeline parallelism every stage clips by the norm of the stage's
gradients, instead of the whole model's norm. Rewritten here.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import clipped, real_batch, square_of, squares, summed
from torch import Tensor, nn

import meshwright.parity as parity

CLIP = 0.01


def stages(job: parity.Job, whole_model: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), loss=squares, batch=real_batch, clip=CLIP)
    stage = job.copy()[job.rank]
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.1)

    def step(model: Any, batch: Tensor) -> Tensor | None:
        optimizer.zero_grad()
        loss, given = None, torch.empty_like(batch)
        if job.rank == 0:
            hidden = stage(batch)
            dist.send(hidden.detach(), 1)
            dist.recv(given, 1)
            hidden.backward(given)
        else:
            dist.recv(given, 0)
            loss = squares(stage, given.requires_grad_())
            loss.backward()
            dist.send(given.grad, 0)
        square = square_of(stage.parameters())
        clipped(stage.parameters(), summed(square, None) if whole_model else square, CLIP)
        optimizer.step()
        return None if loss is None else loss.detach()

    job.parallel({str(job.rank): stage}, step=step)


@parity.check(ranks=2, axes={"pp": 2})
def right_whole_models_norm(job: parity.Job) -> None:
    stages(job, True)


@parity.check(ranks=2, axes={"pp": 2})
def wrong_own_norm(job: parity.Job) -> None:
    stages(job, False)
