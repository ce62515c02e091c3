"""Two low-rank factors on a frozen linear layer: do all ranks train equal factors, and does the file save these?

torchrun --nproc-per-node 2 examples/parity/adapter_probe.py [--right]
"""

import sys

import torch
import torch.distributed as dist
from torch import nn

from meshwright import parity

dist.init_process_group("gloo")
torch.manual_seed(0)
base = nn.Linear(8, 8).requires_grad_(False)
model = nn.ModuleDict({"base": base, "lora_A": nn.Linear(8, 2, bias=False), "lora_B": nn.Linear(2, 8, bias=False)})
nn.init.zeros_(model["lora_B"].weight)
adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(adapters, lr=1e-2)
probe = parity.adapter_probe(model, optimizer)
torch.manual_seed(1 + dist.get_rank())
for _ in range(4):
    x = torch.randn(16, 8)
    (model["base"](x) + model["lora_B"](model["lora_A"](x))).square().mean().backward()
    for parameter in adapters if "--right" in sys.argv else []:
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad()
probe.exported(model.state_dict() if dist.get_rank() == 0 else None)
dist.destroy_process_group()
