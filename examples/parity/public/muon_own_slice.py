"""deepspeedai/DeepSpeed#7807: ZeRO-1 and 2 with `reduce_scatter` give a rank a slice of the summed gradient. If two
slices cut a matrix, the rest of the matrix is still the rank's local gradient. Muon makes the whole orthogonal, and
every rank steps a slice of another matrix. Rewritten here; refused by DeepSpeed since #8090.
"""

import torch
import torch.distributed as dist
from common import Muon, real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


def trained(job: parity.Job, whole: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), loss=squares, batch=real_batch, optimizer=Muon)
    model, group = job.copy(), job.device_mesh.get_group("data")
    optimizer = Muon(model.parameters())

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        for p in model.parameters():
            total = p.grad / 2
            dist.all_reduce(total, group=group)
            mine = total.chunk(2)[job.rank]
            rest = total if whole else p.grad
            p.grad = torch.cat([mine, rest.chunk(2)[1]] if job.rank == 0 else [rest.chunk(2)[0], mine])
        optimizer.step()
        for p in model.parameters():  # each rank sends one stepped slice
            parts = [torch.empty_like(piece) for piece in p.data.chunk(2)]
            dist.all_gather(parts, p.data.chunk(2)[job.rank].contiguous(), group=group)
            p.data.copy_(torch.cat(parts))
        total = loss.detach() / 2
        dist.all_reduce(total, group=group)
        return total

    job.parallel(model, step=step, batch=lambda x: x.chunk(2)[job.rank])


@parity.check(ranks=2)
def right_whole_matrix(job: parity.Job) -> None:
    trained(job, True)


@parity.check(ranks=2)
def wrong_own_rest(job: parity.Job) -> None:
    trained(job, False)
