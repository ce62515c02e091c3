"""A loop with DistributedDataParallel: two microbatches a step, clipping. One process, or torchrun.

`--wrong sync`: gradient sync is set after the forward pass; `thawed`: a layer is thawed after DDP was made;
`order`: gradients are clipped before a reduction by hand; `division`: microbatches' losses are summed, not averaged.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

wrong, world = sys.argv[-1], int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
trained = list(model.parameters())
if world > 1:
    dist.init_process_group("gloo")
    thawed = model[2].requires_grad_(wrong != "thawed")
    model = model if wrong == "order" else DistributedDataParallel(model)
    thawed.requires_grad_()
rank = dist.get_rank() if world > 1 else 0
optimizer = torch.optim.AdamW(trained, lr=1e-2)
generator = torch.Generator().manual_seed(2)
for _ in range(3):
    x, y = torch.randn(16, 16, generator=generator), torch.randint(0, 8, (16,), generator=generator)
    for number in range(2):
        own, labels = (part.chunk(2)[number].chunk(world)[rank] for part in (x, y))
        if isinstance(model, DistributedDataParallel) and wrong != "sync":
            model.require_backward_grad_sync = number == 1
        loss = nn.functional.cross_entropy(model(own), labels) / (1 if wrong == "division" else 2)
        if isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = number == 1
        loss.backward()
    nn.utils.clip_grad_norm_(trained, 0.1)
    for parameter in trained if world > 1 and wrong == "order" else ():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
    optimizer.step()
    optimizer.zero_grad()
if world > 1:
    dist.destroy_process_group()
