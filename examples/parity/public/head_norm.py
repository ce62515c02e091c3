"""NVIDIA/Megatron-LM#7452, finding 11: one norm's weight serves the heads of all tensor-parallel ranks (GatedDeltaNet's
out_norm). Each rank has the gradient of local heads, and ranks sum these only if sequences are cut too
(NVIDIA-NeMo/RL#3716 is the same for norms of queries and keys). Rewritten here.
"""

from typing import Any

import torch.distributed as dist
from common import SumBackward, SumForward, own, real_batch, sgd_step, squares
from torch import Tensor, nn

import meshwright.parity as parity


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.out = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.out_norm = nn.RMSNorm(4)
        self.enter: Any = lambda x: x
        self.leave: Any = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        heads = self.out_norm(self.value(x).unflatten(-1, (-1, 4))).flatten(-2)
        return self.leave(self.out(heads * self.gate(x).sigmoid()))


def gated(job: parity.Job, summed: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Gated()), loss=squares, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    block = model[1]
    block.value.weight, block.gate.weight = own(block.value.weight, job.rank), own(block.gate.weight, job.rank)
    block.out.weight = own(block.out.weight, job.rank, 1)
    block.enter, block.leave = (lambda x: SumBackward.apply(x, group)), (lambda x: SumForward.apply(x, group))

    def reduce() -> None:
        if summed:
            dist.all_reduce(block.out_norm.weight.grad, group=group)

    job.parallel(model, step=sgd_step(model, squares, reduce))


@parity.check(ranks=2, axes={"tp": 2})
def right_summed(job: parity.Job) -> None:
    gated(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_own_heads(job: parity.Job) -> None:
    gated(job, False)
