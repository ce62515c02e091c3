"""Exercise 2: a matrix cut along its columns, the next along its rows. `meshwright parity` marks this file."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, gelu

import meshwright.parity as parity


class Enter(torch.autograd.Function):
    """Begins the cut pair. Forward: each rank takes the whole x. Backward: each rank has an addend of x's gradient."""

    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        return gradient.clone()  # mend


class Leave(torch.autograd.Function):
    """Ends the cut pair. Forward: each rank has an addend of every output. Backward: each takes the whole gradient."""

    @staticmethod
    def forward(context, part):
        whole = part.clone()
        dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(context, gradient):
        return gradient.clone()


class Network(nn.Module):
    """`up` and `down` form a feed-forward layer; `first` needs the gradient of x."""

    def __init__(self):
        super().__init__()
        self.first, self.up = nn.Linear(8, 8), nn.Linear(8, 32, bias=False)
        self.down, self.head = nn.Linear(32, 8, bias=False), nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.down(gelu(self.up(self.first(x)))))


class CutNetwork(Network):
    """This rank has half of the columns of `up` (torch's rows: a Linear holds the matrix transposed)."""

    def __init__(self, whole, rank):
        super().__init__()
        self.load_state_dict(whole.state_dict())
        self.up.weight = nn.Parameter(whole.up.weight.detach().chunk(2, dim=0)[rank].clone())
        self.down.weight = nn.Parameter(whole.down.weight.detach().chunk(2, dim=1)[rank].clone())

    def forward(self, x):
        part = self.down(gelu(self.up(Enter.apply(self.first(x)))))
        return self.head(Leave.apply(part))


def loss_of(model, batch):
    return cross_entropy(model(batch["inputs"]), batch["labels"])


def batch_of(generator):
    inputs = torch.randn(8, 8, generator=generator)
    return {"inputs": inputs, "labels": torch.randint(0, 5, (8,), generator=generator)}


@parity.check(ranks=2, axes={"tensor": 2})
def columns_and_rows(job):
    job.reference(Network(), loss=loss_of, batch=batch_of)
    job.parallel(CutNetwork(job.copy(), job.rank), loss=loss_of)
