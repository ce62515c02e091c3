"""pytorch/torchtitan#1805, fixed by #1878, and again in #4054: routed experts cut over tensor ranks call a DTensor's
`to_local()` without `grad_placements`. The gradients are partial sums, and are taken for the whole. Rewritten here with
torch's DTensor.
"""

from typing import Any

from common import SumForward, own, real_batch, squares
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate

import meshwright.parity as parity


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(16), nn.Linear(16, 2, bias=False)
        self.up, self.down = (
            nn.ModuleList(nn.Linear(a, b, bias=False) for _ in range(2)) for a, b in ((16, 24), (24, 16))
        )
        self.enter: Any = lambda x: x
        self.leave: Any = lambda x: x

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm(h)
        gates = self.router(x).softmax(-1)
        x, weights = self.enter(x), self.enter(gates)
        y = sum(weights[..., i : i + 1] * self.down[i](self.up[i](x).relu()) for i in range(2))
        return h + self.leave(y)


def experts(job: parity.Job, mended: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Experts()), loss=squares, batch=real_batch)
    model, mesh = job.copy(), job.device_mesh["tp"]
    block, group = model[1], job.device_mesh.get_group("tp")
    for up, down in zip(block.up, block.down, strict=True):
        up.weight, down.weight = own(up.weight, job.rank), own(down.weight, job.rank, 1)

    def enter(x: Tensor) -> Tensor:
        whole = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()] if mended else None)

    block.enter, block.leave = enter, lambda y: SumForward.apply(y, group)
    job.parallel(model)


@parity.check(ranks=2, axes={"tp": 2})
def right_grad_placements(job: parity.Job) -> None:
    experts(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_to_local(job: parity.Job) -> None:
    experts(job, False)
