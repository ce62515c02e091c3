"""pytorch/torchtitan#4154: the bias that balances a router moves by the experts' counts of tokens. A tensor-parallel
rank counts a slice of each sequence, and the counts are not summed over the ranks. Rewritten here.
"""

from typing import Any

import torch
from common import averaged, own_positions, real_batch, sgd_step, squares, summed
from torch import Tensor, nn

import meshwright.parity as parity


class Router(nn.Module):
    """Experts; each token uses the expert with the largest score plus bias, and multiplies the output by the score."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(16, 4, bias=False), nn.Linear(16, 4)
        self.register_buffer("bias", torch.zeros(4))
        self.total: Any = lambda counts: counts

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        chosen = nn.functional.one_hot((scores + self.bias).argmax(-1), 4).to(x.dtype)
        counts = self.total(chosen.sum((0, 1)))
        with torch.no_grad():
            self.bias = self.bias + 0.1 * (counts.mean() - counts).sign()
        return (scores * chosen * self.value(x)).sum(-1)


def routed(job: parity.Job, added_up: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Router()), loss=squares, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    if added_up:
        model[1].total = lambda counts: summed(counts, group)

    step = sgd_step(model, squares, lambda: averaged(model, group))
    half = lambda x: own_positions(x, group)  # noqa: E731
    job.parallel(model, step=lambda model, x: summed(step(model, x), group) / 2, batch=half)


@parity.check(ranks=2, axes={"tp": 2})
def right_all_tokens(job: parity.Job) -> None:
    routed(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_own_tokens(job: parity.Job) -> None:
    routed(job, False)
