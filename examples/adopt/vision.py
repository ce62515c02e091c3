"""A ResNet-like network on images, in channels-last bf16: python vision.py, or by torchrun"""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=128)
parser.add_argument("--groups", type=int, default=0, help="of group norm; 0: batch norm, over a device's own images")
args = parser.parse_args()
tiny = bool(os.environ.get("TINY"))
WIDTH, SIZE, IMAGES = (8, 16, 64) if tiny else (64, 224, 512)


def norm(width):
    return nn.GroupNorm(args.groups, width) if args.groups else nn.BatchNorm2d(width)


class Block(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            norm(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            norm(width),
        )
        self.short = nn.Identity() if before == width and stride == 1 else nn.Conv2d(before, width, 1, stride)

    def forward(self, x):
        return torch.relu(self.body(x) + self.short(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 7, 2, 3), norm(WIDTH), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        widths = [(WIDTH, WIDTH, 1)] * 2 + [(WIDTH, 2 * WIDTH, 2), (2 * WIDTH, 2 * WIDTH, 1)]
        self.blocks = nn.Sequential(*(Block(*sizes) for sizes in widths))
        self.head = nn.Linear(2 * WIDTH, 1000)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
device = "cuda" if torch.cuda.is_available() else "cpu"
if world > 1:
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
torch.manual_seed(0)
data = TensorDataset(torch.randint(256, (IMAGES, 3, SIZE, SIZE)).byte(), torch.randint(1000, (IMAGES,)))
loader = DataLoader(data, args.batch, sampler=DistributedSampler(data, world, rank), num_workers=0)
model = Net().to(device, memory_format=torch.channels_last)
run = DistributedDataParallel(model) if world > 1 else model
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
right = 0
for images, classes in loader:
    x, y = images.to(device, memory_format=torch.channels_last) / 255, classes.to(device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=not tiny):
        out = run(x)
        loss = nn.functional.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    right += (out.argmax(1) == y).sum().item()
print(f"rank {rank}: accuracy {right * world / IMAGES:.3f}")
