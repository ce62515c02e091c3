"""bigcode-project/Megatron-LM#11: keys and values of one head are on all tensor ranks. After the backward pass the
gradients of the weights are summed over ranks, and the gradients of the biases are not. Rewritten here.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import SumBackward, SumForward, own, real_batch, squares
from torch import Tensor, nn

import meshwright.parity as parity


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(16, 16), nn.Linear(16, 8), nn.Linear(16, 16, bias=False)
        self.enter = self.leave = lambda x: x

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        q = self.q(x).unflatten(-1, (-1, 4)).transpose(1, 2)
        k, v = (y[:, None].expand_as(q) for y in self.kv(x).chunk(2, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.leave(self.out(y.transpose(1, 2).flatten(2)))


def attention(job: parity.Job, biases: bool) -> None:
    job.reference(nn.Sequential(nn.Linear(16, 16), Attention()), loss=squares, batch=real_batch)
    model, group = job.copy(), job.device_mesh.get_group("tp")
    block = model[1]
    block.q.weight, block.q.bias = own(block.q.weight, job.rank), own(block.q.bias, job.rank)
    block.out.weight = own(block.out.weight, job.rank, 1)
    block.enter, block.leave = (lambda x: SumBackward.apply(x, group)), (lambda x: SumForward.apply(x, group))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(model: nn.Module, batch: Tensor) -> Tensor:
        loss = squares(model, batch)
        loss.backward()
        for p in (block.kv.weight, *((block.kv.bias,) if biases else ())):
            dist.all_reduce(p.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    job.parallel(model, step=step)


@parity.check(ranks=2, axes={"tp": 2})
def right_weights_and_biases(job: parity.Job) -> None:
    attention(job, True)


@parity.check(ranks=2, axes={"tp": 2})
def wrong_weights_alone(job: parity.Job) -> None:
    attention(job, False)
