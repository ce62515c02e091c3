"""NVIDIA/Megatron-LM#7452, finding 4: recomputation keeps a slice of an activation on each rank of a tensor-parallel
group, and gathers the slices in the backward pass. If the group is not the layer's, the slices are of other ranks'
activations. Rewritten here.
"""

from typing import Any

import torch
import torch.distributed as dist
from common import real_batch, sgd_step, squares
from torch import Tensor, nn

import meshwright.parity as parity


class Recomputed(torch.autograd.Function):
    """module(x) that saves this rank's slice of x's positions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, group: Any, *weights: Tensor) -> Tensor:
        ctx.module, ctx.group = module, group
        ctx.save_for_backward(x.chunk(2, 1)[dist.get_rank(group)].contiguous(), *weights)
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        piece, *weights = ctx.saved_tensors
        parts = [torch.empty_like(piece) for _ in range(2)]
        dist.all_gather(parts, piece, group=ctx.group)
        x = torch.cat(parts, 1).requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        return (*torch.autograd.grad(y, [x], gradients, retain_graph=True), None, None,
                *torch.autograd.grad(y, weights, gradients))  # fmt: skip


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 16), nn.GELU())
        self.group: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) if self.group is None else Recomputed.apply(x, self.body, self.group, *self.parameters())


def layers(job: parity.Job, axis: str) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Layer(), nn.Linear(16, 16)), loss=squares, batch=real_batch)
    model, data = job.copy(), job.device_mesh.get_group("data")
    model[1].group = job.device_mesh.get_group(axis)

    def reduce() -> None:
        for p in model.parameters():
            dist.all_reduce(p.grad, group=data)
            p.grad /= 2

    step = sgd_step(model, squares, reduce)

    def reported(model: nn.Module, batch: Tensor) -> Tensor:
        total = step(model, batch) / 2
        dist.all_reduce(total, group=data)
        return total

    job.parallel(model, step=reported, batch=lambda x: x.chunk(2)[job.index("data")])


@parity.check(ranks=4, axes={"tp": 2})
def right_own_group(job: parity.Job) -> None:
    layers(job, "tp")


@parity.check(ranks=4, axes={"tp": 2})
def wrong_other_group(job: parity.Job) -> None:
    layers(job, "data")
