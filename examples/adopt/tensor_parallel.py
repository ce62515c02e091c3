"""A feed-forward stack under torch's tensor-parallel plan: torchrun --nproc-per-node 4 tensor_parallel.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

WIDTH, INNER, LAYERS = (64, 128, 2) if os.environ.get("TINY") else (4096, 16384, 8)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


kind = "cuda" if torch.cuda.is_available() else "cpu"
if kind == "cuda":
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
mesh = init_device_mesh(kind, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
torch.manual_seed(0)
model = nn.Sequential(*(Layer() for _ in range(LAYERS))).to(kind)
for layer in model:
    parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
for step in range(3):
    torch.manual_seed(step)
    x = torch.randn(4, 256, WIDTH).to(kind)
    loss = (model(x) - x.roll(1, -1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss.item():.4f}")
dist.destroy_process_group()
