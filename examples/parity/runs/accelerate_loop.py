"""A loop with Accelerate: two microbatches a step, clipping. One process, or torchrun.

`--wrong prepare`: the model is not prepared; `clip`: each microbatch is clipped, also before the sum over ranks.
"""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

wrong = sys.argv[-1]
accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
torch.manual_seed(1)
model = nn.Sequential(nn.Embedding(64, 16), nn.Flatten(), nn.Linear(8 * 16, 32), nn.GELU(), nn.Linear(32, 64))
tokens = torch.randint(0, 64, (16, 9), generator=torch.Generator().manual_seed(2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(tokens[:, :8], tokens[:, 8]), batch_size=4 // accelerator.num_processes)
optimizer, loader = accelerator.prepare(optimizer, loader)
if wrong != "prepare":
    model = accelerator.prepare(model)
for inputs, labels in loader:
    with accelerator.accumulate(model):
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        if wrong == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        elif accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
accelerator.end_training()
