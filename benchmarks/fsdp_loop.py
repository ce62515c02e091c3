"""A GPT under FSDP2 with bf16 products, as in public trainers: torchrun --nproc-per-node 8 fsdp_loop.py"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

parser = argparse.ArgumentParser()
for name in ("width", "layers", "heads", "inner", "vocabulary", "length", "micro", "accumulated"):
    parser.add_argument(f"--{name}", type=int, required=True)
parser.add_argument("--recompute", action="store_true")


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.heads = heads

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = (y.view(rows, length, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, dim=2))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(x.transpose(1, 2).reshape(rows, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention = Attention(width, heads)
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.tokens = nn.Embedding(args.vocabulary, args.width)
        self.positions = nn.Embedding(args.length, args.width)
        self.blocks = nn.ModuleList(Block(args.width, args.heads, args.inner) for _ in range(args.layers))
        self.norm = nn.LayerNorm(args.width, bias=False)
        self.vocabulary = args.vocabulary

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits[:, :-1].reshape(-1, self.vocabulary), ids[:, 1:].reshape(-1))


def main():
    args = parser.parse_args()
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    with torch.device("meta"):
        model = GPT(args)
    if args.recompute:
        apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, Block))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _step in range(3):
        for _ in range(args.accumulated):
            ids = torch.randint(args.vocabulary, (args.micro, args.length)).cuda()
            (model(ids) / args.accumulated).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
