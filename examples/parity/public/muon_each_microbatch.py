"""deepspeedai/DeepSpeed#8443: under ZeRO-3 Muon's update is computed during the reduction of gradients, in every
microbatch, of partial gradients instead of the sum. A sum of orthogonal matrices is not the orthogonal matrix of a sum.
Rewritten here.
"""

import torch
from common import Muon, orthogonal, real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


def trained(job: parity.Job, at_the_end: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), loss=squares, batch=real_batch, optimizer=Muon)
    model = nn.parallel.DistributedDataParallel(job.copy())
    optimizer = Muon(model.parameters())
    momenta = {p: torch.zeros_like(p) for p in model.parameters() if p.dim() > 1}

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        total, moves = torch.zeros(()), {p: torch.zeros_like(p) for p in momenta}
        for rows in batch.chunk(2):
            before = {p: torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in momenta}
            loss = squares(model, rows) / 2
            loss.backward()
            total += loss.detach()
            for p, momentum in momenta.items():
                momentum.mul_(0.9).add_(p.grad - before[p])
                moves[p] += orthogonal(momentum) / 2
        if at_the_end:
            optimizer.step()
            return total
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(moves.get(p, p.grad), alpha=0.02)
        return total

    job.parallel(model, step=step)


@parity.check(ranks=2)
def right_at_the_end(job: parity.Job) -> None:
    trained(job, True)


@parity.check(ranks=2)
def wrong_in_each_microbatch(job: parity.Job) -> None:
    trained(job, False)
