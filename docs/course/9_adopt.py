"""Exercise 9: a script of anybody's, two microbatches a step. `meshwright adopt --prove 2 docs/course/9_adopt.py`"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ROWS, MICROBATCHES = 4, 2
rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
replica = model
if world > 1:
    dist.init_process_group("gloo")
    replica = DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for _ in range(3):
    for number in range(MICROBATCHES):
        x = torch.randn(ROWS * world, 16)[rank::world]
        waits = world > 1 and number < MICROBATCHES  # mend
        with replica.no_sync() if waits else nullcontext():
            loss = replica(x).square().mean() / MICROBATCHES
            loss.backward()
    optimizer.step()
    optimizer.zero_grad()
