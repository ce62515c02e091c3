"""A ResNet-like network with batch norm on images, in channels-last bf16: python vision.py"""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

tiny = bool(os.environ.get("TINY"))
WIDTH, SIZE, BATCH = (8, 16, 8) if tiny else (64, 224, 128)


class Block(nn.Module):
    def __init__(self, before, width, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, 1, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.short = nn.Identity() if before == width and stride == 1 else nn.Conv2d(before, width, 1, stride)

    def forward(self, x):
        return torch.relu(self.body(x) + self.short(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, WIDTH, 7, 2, 3), nn.BatchNorm2d(WIDTH), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        widths = [(WIDTH, WIDTH, 1)] * 2 + [(WIDTH, 2 * WIDTH, 2), (2 * WIDTH, 2 * WIDTH, 1)]
        self.blocks = nn.Sequential(*(Block(*sizes) for sizes in widths))
        self.head = nn.Linear(2 * WIDTH, 1000)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
data = TensorDataset(torch.randn(4 * BATCH, 3, SIZE, SIZE), torch.randint(1000, (4 * BATCH,)))
loader = DataLoader(data, BATCH, shuffle=True, num_workers=0)
model = Net().to(device, memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
right = 0
for images, classes in loader:
    x, y = images.to(device, memory_format=torch.channels_last), classes.to(device)
    with torch.autocast(device, dtype=torch.bfloat16, enabled=not tiny):
        out = model(x)
        loss = nn.functional.cross_entropy(out, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    right += (out.argmax(1) == y).sum().item()
print(f"accuracy {right / (4 * BATCH):.3f}")
