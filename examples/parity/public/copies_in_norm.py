"""NVIDIA-NeMo/RL#3788 (and ROCm/TransformerEngine#715): squares of gradients are summed over tensor-parallel ranks for
every parameter. Parameters that all ranks hold are counted once per rank, and clipping is stronger than asked.
Rewritten here.
"""

from typing import Any

import torch.distributed as dist
from common import SumBackward, SumForward, clipped, own, real_batch, sgd_step, square_of, squares
from torch import Tensor, nn

import meshwright.parity as parity

CLIP = 0.01


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)
        self.enter: Any = lambda x: x
        self.leave: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.down(self.up(self.enter(self.norm(x))).relu()))


def pair(job: parity.Job, once: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Pair()), loss=squares, batch=real_batch, clip=CLIP)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    block = model[1]
    block.up.weight, block.down.weight = own(block.up.weight, job.rank), own(block.down.weight, job.rank, 1)
    block.enter, block.leave = (lambda x: SumBackward.apply(x, group)), (lambda x: SumForward.apply(x, group))
    cut, copies = [block.up.weight, block.down.weight], [*model[0].parameters(), *block.norm.parameters()]

    def clip() -> None:
        total = square_of(cut) + square_of(copies) / (2 if once else 1)
        dist.all_reduce(total, group=group)
        clipped(model.parameters(), total, CLIP)

    job.parallel(model, step=sgd_step(model, squares, clip))


@parity.check(ranks=2, axes={"tp": 2})
def right_counted_once(job: parity.Job) -> None:
    pair(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_counted_on_each_rank(job: parity.Job) -> None:
    pair(job, False)
