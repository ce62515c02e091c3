"""Packed documents with a mask, accumulation, a scaler, torch.compile: python packed.py, or by torchrun"""

import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel

tiny = bool(os.environ.get("TINY"))
VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = (256, 32, 64, 4, 2) if tiny else (50304, 2048, 1024, 16, 24)
MICROBATCHES, ROWS = 4, 2

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
device = "cuda" if torch.cuda.is_available() else "cpu"
if world > 1:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
torch.manual_seed(0)


def packed():
    """Draw rows of documents of random lengths, for all devices. Labels at a document's end are -100, not counted."""
    ids = torch.randint(VOCABULARY, (ROWS * world, LENGTH + 1))
    labels = ids[:, 1:].clone()
    for row in labels:
        end = 0
        while end < LENGTH:
            end += int(torch.randint(LENGTH // 8, LENGTH // 2, ()))
            if end <= LENGTH:
                row[end - 1] = -100
    return ids[:, :-1], labels


class Packed(GPT):
    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


model = Packed(VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS).to(device)
replica = DistributedDataParallel(model) if world > 1 else model
run = replica if tiny else torch.compile(replica)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device == "cuda")
scaler = torch.amp.GradScaler(device, enabled=device == "cuda")
for step in range(3):
    batches = [packed() for _ in range(MICROBATCHES)]
    tokens = sum((labels != -100).sum() for _, labels in batches).item()
    for number, (ids, labels) in enumerate(batches):
        kept = replica.no_sync() if world > 1 and number + 1 < MICROBATCHES else nullcontext()
        with kept, torch.autocast(device, torch.float16 if device == "cuda" else torch.bfloat16, enabled=not tiny):
            logits = run(ids[rank::world].to(device))
            own = labels[rank::world].to(device)
            loss = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum") / tokens
            loss = loss * world  # replicas average gradients
            scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    print(f"step {step}: {tokens} labels, loss {loss.item() * MICROBATCHES:.4f}")
