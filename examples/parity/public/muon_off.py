"""deepspeedai/DeepSpeed#8438: under zero.Init a parameter is a flat placeholder while the optimizer reads the
dimensions, so that no parameter is a matrix: Muon is silently off, and the loss falls all the same. Rewritten here.
"""

from common import Muon, real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


class OfPlaceholders(Muon):
    """Muon that sees `seen` dimensions of each parameter."""

    seen = 1

    def update(self, p: Tensor, gradient: Tensor) -> Tensor:
        return super().update(p, gradient) if self.seen > 1 else gradient


class OfShapes(OfPlaceholders):
    seen = 2


def trained(job: parity.Job, optimizer: type[Muon]) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), loss=squares, batch=real_batch, optimizer=Muon)
    model = nn.parallel.DistributedDataParallel(job.copy())
    mine = optimizer(model.parameters())

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        mine.zero_grad()
        loss = squares(model, batch)
        loss.backward()
        mine.step()
        return loss.detach()

    job.parallel(model, step=step)


@parity.check(ranks=2)
def right_by_shape(job: parity.Job) -> None:
    trained(job, OfShapes)


@parity.check(ranks=2)
def wrong_by_placeholder(job: parity.Job) -> None:
    trained(job, OfPlaceholders)
