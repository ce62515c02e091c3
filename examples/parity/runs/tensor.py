"""A loop with torch's tensor-parallel plan on DTensors, clipping. One process, or torchrun.

`--wrong partial`: the second layer's partial sums are taken for the whole; `local`: each rank clips by a local norm.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

wrong, world = sys.argv[-1], int(os.environ.get("WORLD_SIZE", "1"))
torch.manual_seed(1)
model = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16, bias=False), nn.Linear(16, 8))
if world > 1:
    dist.init_process_group("gloo")
    row = RowwiseParallel(output_layouts=Partial()) if wrong == "partial" else RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (world,)), {"1": ColwiseParallel(), "3": row})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
generator = torch.Generator().manual_seed(2)
for _ in range(3):
    x, y = torch.randn(8, 16, generator=generator), torch.randint(0, 8, (8,), generator=generator)
    nn.functional.cross_entropy(model(x), y).backward()
    plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    norms = [nn.utils.get_total_norm([p.grad for p in plain])]
    if cut:
        of_cut = nn.utils.get_total_norm([p.grad.to_local() if wrong == "local" else p.grad for p in cut])
        norms.append(of_cut.full_tensor() if isinstance(of_cut, DTensor) else of_cut)
    norm = torch.stack(norms).square().sum().sqrt()
    for group in (plain, cut):
        nn.utils.clip_grads_with_norm_(group, 0.1, norm, foreach=False)
    optimizer.step()
    optimizer.zero_grad()
if world > 1:
    dist.destroy_process_group()
