"""A GPT in the manner of nanoGPT: python gpt.py --layers 4, or replicas by torchrun --nproc-per-node 8 gpt.py"""

import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out, self.heads = nn.Linear(width, 3 * width), nn.Linear(width, width), heads

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (y.view(B, T, self.heads, -1).transpose(1, 2) for y in self.qkv(x).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln1, self.ln2, self.attention = nn.LayerNorm(width), nn.LayerNorm(width), Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, block_size, width, heads, layers):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(block_size, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def main():
    parser = argparse.ArgumentParser()
    for name, value in (("vocabulary", 50304), ("block_size", 1024), ("width", 768), ("heads", 12), ("layers", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if world > 1:
        dist.init_process_group("nccl" if device == "cuda" else "gloo")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(1337)
    data = torch.randint(args.vocabulary, (100_000,))

    def get_batch():
        starts = torch.randint(len(data) - args.block_size - 1, (args.batch_size * world,))[rank::world]
        x = torch.stack([data[i : i + args.block_size] for i in starts])
        y = torch.stack([data[i + 1 : i + 1 + args.block_size] for i in starts])
        return x.to(device), y.to(device)

    model = GPT(args.vocabulary, args.block_size, args.width, args.heads, args.layers).to(device)
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95))
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 6e-4 * min(1, (step + 1) / 10) * (1 + math.cos(math.pi * step / args.steps)) / 2
        x, y = get_batch()
        with torch.autocast(device, dtype=getattr(torch, args.dtype), enabled=args.dtype != "float32"):
            loss = model(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
