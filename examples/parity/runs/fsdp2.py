"""A loop with fully_shard (FSDP2), clipping. One process, or torchrun.

`--wrong divide`: gradients are summed and not averaged; `local`: each rank clips by the norm of the rank's shards.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

wrong, world = sys.argv[-1], int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 8))
if world > 1:
    dist.init_process_group("gloo")
    for layer in (*(part for part in model if isinstance(part, nn.Linear)), model):
        fully_shard(layer)
        if wrong == "divide":
            layer.set_gradient_divide_factor(1.0)
            layer.set_force_sum_reduction_for_comms(True)
rank = dist.get_rank() if world > 1 else 0
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
generator = torch.Generator().manual_seed(2)
for _ in range(3):
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 8, (8,), generator=generator)
    nn.functional.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank]).backward()
    if wrong == "local":
        norm = nn.utils.get_total_norm([p.grad.to_local() for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, norm)
    else:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
if world > 1:
    dist.destroy_process_group()
