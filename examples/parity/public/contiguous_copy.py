"""NovaSky-AI/SkyRL#1886, in Megatron's mappings: `all_reduce(x.contiguous()); return x` sums a copy if the gradient is
not contiguous (here after a transpose), and returns the rank's term alone. Rewritten here.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import SumForward, own, real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, mended: bool) -> Tensor:
        ctx.facts = group, mended
        return x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        group, mended = ctx.facts
        x = gradients[0].contiguous() if mended else gradients[0]
        dist.all_reduce(x.contiguous(), group=group)
        return x, None, None


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.enter: Any = lambda x: x
        self.leave: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(self.norm(x)).transpose(0, 1)  # positions first
        return self.leave(self.down(self.up(x).relu())).transpose(0, 1)


def pair(job: parity.Job, mended: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Pair()), loss=squares, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    block = model[1]
    block.up.weight, block.up.bias = own(block.up.weight, job.rank), own(block.up.bias, job.rank)
    block.down.weight = own(block.down.weight, job.rank, 1)
    block.enter, block.leave = (lambda x: Enter.apply(x, group, mended)), (lambda x: SumForward.apply(x, group))
    job.parallel(model)


@parity.check(ranks=2, axes={"tp": 2})
def right_in_place(job: parity.Job) -> None:
    pair(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_copy(job: parity.Job) -> None:
    pair(job, False)
