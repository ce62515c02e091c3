"""NVIDIA/Megatron-LM#7452, finding 5: under sequence parallelism the mask of padding is cut over the library's
tensor-parallel group, and the hidden states over the model's group: a router's balance leaves out tokens that are no
padding. Rewritten here.
"""

from typing import Any

import torch
from common import SumForward, averaged_by_axes, own_positions, real_batch, sgd_step, squares, summed
from torch import Tensor, nn

import meshwright.parity as parity

REAL = torch.arange(6) < torch.tensor([6, 5, 4, 3])[:, None]
"""Rows of 6, 5, 4 and 3 tokens that are no padding, [rows, positions]."""


class Router(nn.Module):
    """Gates of two experts and their balance over the tokens that are no padding."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(16, 2, bias=False), nn.Linear(16, 2)
        self.cut: Any = lambda x: x
        self.total: Any = lambda x: x
        self.real, self.balance = REAL, torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.cut(x)
        scores = self.gate(x).softmax(-1)
        self.balance = (self.total(scores[self.real].sum(0)) / self.total(self.real.sum())).square().sum()
        return (scores * self.value(x)).sum(-1)


def routed(job: parity.Job, mask_axis: str) -> None:
    def loss_of(model: Any, batch: Tensor, weight: float = 0.5) -> Tensor:
        return squares(model, batch) + weight * model[1].balance

    job.reference(nn.Sequential(nn.Linear(16, 16), Router()), loss=loss_of, batch=real_batch)
    model, group, masks = job.copy(), job.device_mesh.get_group("tp"), job.device_mesh.get_group(mask_axis)
    model[1].cut, model[1].total = (lambda x: own_positions(x, group)), (lambda x: SumForward.apply(x, None))
    model[1].real = own_positions(REAL.chunk(2)[job.index("data")], masks)

    # A rank has the gradient of the balance for local tokens, which the mean over four ranks divides.
    step = sgd_step(model, lambda model, batch: loss_of(model, batch, 2.0), lambda: averaged_by_axes(model, job))

    def reported(model: Any, batch: Tensor) -> Tensor:
        return summed(step(model, batch), None) / 4 - 1.5 * model[1].balance.detach()

    job.parallel(model, step=reported, batch=job.rows("data"))


@parity.check(ranks=4, axes={"tp": 2})
def right_own_group(job: parity.Job) -> None:
    routed(job, "tp")


@parity.check(ranks=4, axes={"tp": 2})
def wrong_other_group(job: parity.Job) -> None:
    routed(job, "data")
