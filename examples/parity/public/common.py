"""Differentiable sums over a group and a step with plain SGD, which the programs beside this file use."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class SumBackward(torch.autograd.Function):
    """Copy forward, sum over a group backward: before what is cut by columns."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return summed(gradients[0], ctx.group), None


class SumForward(torch.autograd.Function):
    """Sum over a group forward, copy backward: after what is cut by rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return summed(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0], None


def summed(x: Tensor, group: Any) -> Tensor:
    x = x.clone()
    dist.all_reduce(x, group=group)
    return x


def own(weight: Tensor, rank: int, dim: int = 0) -> torch.nn.Parameter:
    """This rank's half of a weight."""
    return torch.nn.Parameter(weight.detach().chunk(2, dim)[rank].clone())


def real_batch(generator: torch.Generator) -> Tensor:
    """[rows, positions, width]."""
    return torch.randn(4, 6, 16, generator=generator)


def squares(model: Any, batch: Tensor) -> Tensor:
    """The mean square of the output."""
    return model(batch).square().mean()
