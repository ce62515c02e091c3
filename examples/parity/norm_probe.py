"""A training script with one line more: does the script clip by the norm of the full gradients?

torchrun --nproc-per-node 2 examples/parity/norm_probe.py [--right]

Each rank has another expert; all ranks have the same router.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from meshwright import parity

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = nn.ModuleDict({"router": nn.Linear(8, 8)})
torch.manual_seed(1 + rank)
model["expert"] = nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
probe = parity.norm_probe(model, optimizer)
for _ in range(4):
    x = torch.randn(16, 8)
    model["expert"](model["router"](x)).square().mean().backward()
    for parameter in model["router"].parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= size
    if "--right" in sys.argv:
        squares = torch.stack([p.grad.square().sum() for p in model["expert"].parameters()]).sum()
        dist.all_reduce(squares)
        squares += sum(p.grad.square().sum() for p in model["router"].parameters())
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, squares.sqrt())
    else:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
