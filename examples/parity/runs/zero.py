"""A loop with torch's ZeroRedundancyOptimizer under DDP, clipping, and a running mean. One process, or torchrun.

`--wrong rate`: a rate times the ranks; `decay`: rank 1's optimizer has another decay of moments; `mean`: each rank
keeps the running mean of local rows.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

wrong, world = sys.argv[-1], int(os.environ.get("WORLD_SIZE", "1"))


class Mean(nn.Module):
    """The running mean of inputs over all rows of all ranks."""

    mean: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.detach().mean(0)
        if world > 1 and wrong != "mean":
            dist.all_reduce(mean)
            mean /= world
        self.mean.lerp_(mean, 0.1)
        return x


torch.manual_seed(1)
model: nn.Module = nn.Sequential(nn.Linear(16, 32), Mean(32), nn.GELU(), nn.Linear(32, 8))
rank, rate = 0, 1e-2
if world > 1:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = DistributedDataParallel(model, broadcast_buffers=False)
    optimizer: torch.optim.Optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=rate * (world if wrong == "rate" else 1),
        betas=(0.9, 0.99 if wrong == "decay" and rank == 1 else 0.999),
    )  # fmt: skip
else:
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
generator = torch.Generator().manual_seed(2)
for _ in range(3):
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 8, (8,), generator=generator)
    nn.functional.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
if world > 1:
    dist.destroy_process_group()
