"""A GPT under DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py"""

import argparse
import os

import torch
import torch.distributed as dist
from gpt import GPT
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main(width, heads, layers, vocabulary, length):
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank = dist.get_rank()
    device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    tokens = torch.randint(vocabulary, (256, length + 1))
    data = TensorDataset(tokens[:, :-1].clone(), tokens[:, 1:].clone())
    loader = DataLoader(data, args.batch, sampler=DistributedSampler(data), num_workers=2, pin_memory=True)
    model = GPT(vocabulary, length, width, heads, layers).to(device)
    model = DistributedDataParallel(model, device_ids=[rank] if device != "cpu" else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    for step, (x, y) in enumerate(loader):
        if step == args.steps:
            break
        loss = model(x.to(device, non_blocking=True), y.to(device, non_blocking=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*((64, 4, 2, 256, 32) if os.environ.get("TINY") else (768, 12, 12, 50304, 1024)))
