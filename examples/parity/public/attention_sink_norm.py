"""NVIDIA/Megatron-LM#7452, finding 8 (fixed by #7530): the learnable offsets of attention's softmax, one per head, are
cut over tensor-parallel ranks, and are not marked as cut. The norm for clipping takes the offsets for copies, and
counts the first rank's alone. Rewritten here.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import SumBackward, SumForward, clipped, own, real_batch, sgd_step, square_of, squares
from torch import Tensor, nn

import meshwright.parity as parity

CLIP = 0.001


class Attention(nn.Module):
    """Attention; every head has a score for no key at all."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.sinks = nn.Parameter(torch.randn(4))
        self.enter: Any = lambda x: x
        self.leave: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / 2
        sinks = self.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        y = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v
        return self.leave(self.out(y.transpose(1, 2).flatten(2)))


def attention(job: parity.Job, marked: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Attention()), loss=squares, batch=real_batch, clip=CLIP)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    block = model[1]
    for f in (block.q, block.k, block.v):
        f.weight = own(f.weight, job.rank)
    block.out.weight, block.sinks = own(block.out.weight, job.rank, 1), own(block.sinks, job.rank)
    block.enter, block.leave = (lambda x: SumBackward.apply(x, group)), (lambda x: SumForward.apply(x, group))

    def clip() -> None:
        cut = square_of([block.q.weight, block.k.weight, block.v.weight, block.out.weight])
        cut += square_of([block.sinks]) * (1 if marked or job.rank == 0 else 0)
        dist.all_reduce(cut, group=group)
        clipped(model.parameters(), cut + square_of(model[0].parameters()), CLIP)

    job.parallel(model, step=sgd_step(model, squares, clip))


@parity.check(ranks=2, axes={"tp": 2})
def right_all_heads(job: parity.Job) -> None:
    attention(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_first_ranks_heads(job: parity.Job) -> None:
    attention(job, False)
