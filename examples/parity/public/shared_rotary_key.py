"""pytorch/torchtitan#1373 (a review of DeepSeek-V3 there): the rotary key, one for all heads, is added to keys with
heads cut over tensor ranks. Each rank has the rotary key's gradient for local heads, and no rank sums these. Rewritten
here.
"""

from typing import Any

import torch.nn.functional as F
from common import SumBackward, SumForward, own, real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.shared_key, self.out = nn.Linear(16, 4, bias=False), nn.Linear(16, 16, bias=False)
        self.enter: Any = lambda x: x
        self.enter_key: Any = lambda x: x
        self.leave: Any = lambda x: x

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm(h)
        shared = self.enter_key(self.shared_key(x))[:, None]
        x = self.enter(x)
        q, k, v = (w(x).unflatten(-1, (-1, 4)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k + shared, v, is_causal=True)
        return h + self.leave(self.out(y.transpose(1, 2).flatten(2)))


def attention(job: parity.Job, adds: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Attention()), loss=squares, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    block = model[1]
    for linear in (block.q, block.k, block.v):
        linear.weight = own(linear.weight, job.rank)
    block.out.weight = own(block.out.weight, job.rank, 1)
    block.enter, block.leave = (lambda x: SumBackward.apply(x, group)), (lambda x: SumForward.apply(x, group))
    if adds:
        block.enter_key = lambda x: SumBackward.apply(x, group)
    job.parallel(model)


@parity.check(ranks=2, axes={"tp": 2})
def right_added_up(job: parity.Job) -> None:
    attention(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_local_heads(job: parity.Job) -> None:
    attention(job, False)
