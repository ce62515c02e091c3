"""deepspeedai/DeepSpeed#8437: under AutoTP Muon makes each tensor-parallel rank's rows of a projection orthogonal,
instead of the whole matrix. Gradients are right, and the update depends on the count of ranks. Rewritten here.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import Muon, SumForward, orthogonal, own, real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


class MuonOfWhole(Muon):
    """Muon that gathers a matrix for the update: the first of two is cut by rows, the second by columns."""

    def update(self, p: Tensor, gradient: Tensor) -> Tensor:
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.mul_(0.9).add_(gradient)
        dim = 0 if p is self.param_groups[0]["params"][0] else 1
        parts = [torch.empty_like(momentum) for _ in range(2)]
        dist.all_gather(parts, momentum)
        return orthogonal(torch.cat(parts, dim)).chunk(2, dim)[dist.get_rank()]


def trained(job: parity.Job, optimizer_type: Any) -> None:
    reference = nn.Sequential(nn.Linear(16, 16, bias=False), nn.GELU(), nn.Linear(16, 16, bias=False))
    job.reference(reference, loss=squares, batch=real_batch, optimizer=Muon)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    model[0].weight, model[2].weight = own(model[0].weight, job.rank), own(model[2].weight, job.rank, 1)
    optimizer = optimizer_type(model.parameters())

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = SumForward.apply(model(batch), group).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    job.parallel(model, step=step)


@parity.check(ranks=2, axes={"tp": 2})
def right_whole_matrix(job: parity.Job) -> None:
    trained(job, MuonOfWhole)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_own_rows(job: parity.Job) -> None:
    trained(job, Muon)
