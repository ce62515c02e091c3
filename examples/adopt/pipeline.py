"""Stages under torch's pipelining, 1F1B: torchrun --nproc-per-node 2 pipeline.py"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

WIDTH, LAYERS, ROWS, LENGTH = (64, 4, 8, 32) if os.environ.get("TINY") else (4096, 16, 32, 512)
MICROBATCHES = 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleDict({str(number): Block() for number in range(LAYERS)})

    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x


kind = "cuda" if torch.cuda.is_available() else "cpu"
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device("cpu")
dist.init_process_group("nccl" if kind == "cuda" else "gloo")
torch.manual_seed(0)
part = Stack()
for number in range(LAYERS):
    if number * world // LAYERS != rank:
        del part.blocks[str(number)]
part.to(device)
example = torch.empty(ROWS // MICROBATCHES, LENGTH, WIDTH, device=device, requires_grad=True)
stage = PipelineStage(part, rank, world, device, input_args=(example,), output_args=(example,))
schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=lambda y, target: (y - target).square().mean())
optimizer = torch.optim.AdamW(part.parameters(), lr=1e-4)
for step in range(3):
    torch.manual_seed(step)
    x = torch.randn(ROWS, LENGTH, WIDTH).to(device)
    last = {"target": x.roll(1, -1), "losses": []} if rank == world - 1 else {}
    schedule.step(*([x] if rank == 0 else []), **last)
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
