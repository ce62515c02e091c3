"""NVIDIA/Megatron-LM#7452, finding 6: cross attention's projections are built without a group, and gather sequences
over the library's tensor-parallel group: two replicas' halves instead of one sequence's. Rewritten here.
"""

from typing import Any

import torch.nn.functional as F
from common import Gathered, Scattered, averaged_by_axes, own, real_batch, sgd_step, squares, summed
from torch import Tensor, nn

import meshwright.parity as parity


class CrossAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.enter: Any = lambda x: x
        self.leave: Any = lambda x: x

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        x, context = self.enter(x), self.enter(context)
        q, k, v = (y.unflatten(-1, (-1, 4)).transpose(1, 2) for y in (self.q(x), self.k(context), self.v(context)))
        return self.leave(self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


class Decoder(nn.Module):
    """Cross attention with queries from the first half of the width, keys and values from the second."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.encode, self.attention = nn.Linear(8, 16), nn.Linear(8, 16), CrossAttention()

    def forward(self, batch: Tensor) -> Tensor:
        return self.attention(self.embed(batch[..., :8]), self.encode(batch[..., 8:]))


def decoder(job: parity.Job, axis: str) -> None:
    job.reference(Decoder(), loss=squares, batch=real_batch)
    model, group, entered = job.copy(), job.device_mesh.get_group("tp"), job.device_mesh.get_group(axis)
    block = model.attention
    for f in (block.q, block.k, block.v):
        f.weight = own(f.weight, job.index("tp"))
    block.out.weight = own(block.out.weight, job.index("tp"), 1)
    block.enter, block.leave = (lambda x: Gathered.apply(x, entered)), (lambda x: Scattered.apply(x, group))

    step = sgd_step(model, squares, lambda: averaged_by_axes(model, job, "attention."))
    positions = lambda x: job.rows("data")(x).chunk(2, 1)[job.index("tp")]  # noqa: E731
    job.parallel(model, step=lambda model, x: summed(step(model, x), None) / 4, batch=positions)


@parity.check(ranks=4, axes={"tp": 2})
def right_own_group(job: parity.Job) -> None:
    decoder(job, "tp")


@parity.check(ranks=4, axes={"tp": 2})
def wrong_other_group(job: parity.Job) -> None:
    decoder(job, "data")
