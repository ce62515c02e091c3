"""deepspeedai/DeepSpeed#8439, #7776: under ZeRO 1 and 2 Muon's update is computed before gradients are clipped. The
norm of an orthogonal matrix is a measure of the matrix's size, and divides the update. Rewritten here.
"""

import torch
from common import Muon, clipped, orthogonal, real_batch, square_of, squares
from torch import Tensor, nn

import meshwright.parity as parity

CLIP = 1.0


def trained(job: parity.Job, clipped_first: bool) -> None:
    reference = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    job.reference(reference, loss=squares, batch=real_batch, optimizer=Muon, clip=CLIP)
    model = nn.parallel.DistributedDataParallel(job.copy())
    optimizer = Muon(model.parameters())
    momenta = {p: torch.zeros_like(p) for p in model.parameters() if p.dim() > 1}

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        if clipped_first:
            clipped(model.parameters(), square_of(model.parameters()), CLIP)
            optimizer.step()
            return loss.detach()
        moves = {p: p.grad for p in model.parameters()}
        for p, momentum in momenta.items():
            moves[p] = orthogonal(momentum.mul_(0.9).add_(p.grad))
        norm = float(torch.stack([move.square().sum() for move in moves.values()]).sum().sqrt())
        with torch.no_grad():
            for p, move in moves.items():
                p.sub_(move, alpha=0.02 * min(1.0, CLIP / norm))
        return loss.detach()

    job.parallel(model, step=step)


@parity.check(ranks=2)
def right_clipped_first(job: parity.Job) -> None:
    trained(job, True)


@parity.check(ranks=2)
def wrong_clipped_after(job: parity.Job) -> None:
    trained(job, False)
