"""inclusionAI/AReno#496: latent attention's first projection is whole on every tensor-parallel rank. The second, cut by
columns, sums the input's gradient in the backward pass; the trainer then sums the first projection's gradients
again: twice too large on two ranks. Rewritten here; fixed in AReno.
"""

from typing import Any

import torch.distributed as dist
from common import SumBackward, SumForward, own, real_batch, sgd_step, squares
from torch import Tensor, nn

import meshwright.parity as parity


class Latent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_a, self.q_b, self.out = (nn.Linear(a, b, bias=False) for a, b in ((16, 8), (8, 16), (16, 16)))
        self.norm = nn.RMSNorm(8)
        self.enter: Any = lambda x: x
        self.leave: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        return self.leave(self.out(self.q_b(self.enter(self.norm(self.q_a(x)))).relu()))


def latent(job: parity.Job, once: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Latent()), loss=squares, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    block = model[1]
    block.q_b.weight, block.out.weight = own(block.q_b.weight, job.rank), own(block.out.weight, job.rank, 1)
    block.enter, block.leave = (lambda x: SumBackward.apply(x, group)), (lambda x: SumForward.apply(x, group))

    def reduce() -> None:
        for p in () if once else (block.q_a.weight, block.norm.weight):
            dist.all_reduce(p.grad, group=group)

    job.parallel(model, step=sgd_step(model, squares, reduce))


@parity.check(ranks=2, axes={"tp": 2})
def right_once(job: parity.Job) -> None:
    latent(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_twice(job: parity.Job) -> None:
    latent(job, False)
