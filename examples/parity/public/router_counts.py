"""NVIDIA/Megatron-LM#7452, finding 10: under sequence parallelism with padding the counts of tokens are summed in
place, so that the router's balance is scaled by all ranks' tokens instead of this rank's, and the gradient doubles.
Rewritten here.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import SumForward, summed
from torch import Tensor, nn

import meshwright.parity as parity


class Router(nn.Module):
    """Gates of two experts and their balance, which is scaled by the tokens that `counted` returns."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(16, 2, bias=False), nn.Linear(16, 2)
        self.total: Any = lambda x: x
        self.counted: Any = lambda tokens_here: tokens_here
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        tokens = torch.tensor(float(scores.shape[0] * scores.shape[1]))
        all_tokens = self.total(tokens)
        mean = self.total(scores.sum((0, 1))) / all_tokens
        # Equal on all ranks. A rank has the gradient for local tokens, and the ranks' gradients are summed.
        self.balance = mean.square().sum() * self.counted(tokens) / tokens
        return (scores * self.value(x)).sum(-1)


def loss_of(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean() + 0.5 * model[1].balance


def router(job: parity.Job, mended: bool) -> None:
    batch = lambda generator: torch.randn(4, 6, 16, generator=generator)  # noqa: E731
    job.reference(nn.Sequential(nn.Linear(16, 16), Router()), loss=loss_of, batch=batch)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    model[1].total = lambda x: SumForward.apply(x, group)
    if not mended:
        model[1].counted = lambda tokens_here: summed(tokens_here, group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: Any, batch: Tensor) -> Tensor:
        first = model(batch).square().mean() / 2
        balance = 0.5 * model[1].balance
        (first + balance).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        return summed(first.detach(), group) + balance.detach()

    job.parallel(model, step=step, batch=lambda x: x.chunk(2, 1)[job.rank])


@parity.check(ranks=2, axes={"tp": 2})
def right_own_tokens(job: parity.Job) -> None:
    router(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_all_tokens(job: parity.Job) -> None:
    router(job, False)
