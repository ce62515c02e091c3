"""NVIDIA/Megatron-LM#7452, finding 12: every pipeline stage counts layers from 0, and a checkpoint is read by these
names: the second stage loads the layers of the first, and no name is missing. Rewritten here.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


def stages(job: parity.Job, own_numbers: bool) -> None:
    job.reference(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), loss=squares, batch=real_batch)
    saved, first = job.copy().state_dict(), 2 * job.rank
    stage = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    wanted = {name: name if own_numbers else f"{first + int(name[0])}{name[1:]}" for name in stage.state_dict()}
    stage.load_state_dict({name: saved[key] for name, key in wanted.items()}, strict=True)
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
            given.requires_grad_()
            loss = squares(stage, given)
            loss.backward()
            dist.send(given.grad, 0)
        optimizer.step()
        return None if loss is None else loss.detach()

    job.parallel({str(first + i): layer for i, layer in enumerate(stage)}, step=step)


@parity.check(ranks=2, axes={"pp": 2})
def right_models_numbers(job: parity.Job) -> None:
    stages(job, False)


@parity.check(ranks=2, axes={"pp": 2})
def wrong_stages_numbers(job: parity.Job) -> None:
    stages(job, True)
