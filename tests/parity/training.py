"""A common training script: on one process, or on ranks over data and tensor axes, cut by hand.

python -m tests.parity.training [--ranks data=2 tp=2] [--wrong NAME] [--steps 2] [--micro 1]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, HIDDEN, ROWS, POSITIONS = 32, 16, 8, 6


class Sum(torch.autograd.Function):
    """Sum over a group, forward and backward as asked."""

    @staticmethod
    def forward(context: Any, x: Tensor, group: Any, forward: bool, backward: bool) -> Tensor:
        context.group, context.backward_sum = group, backward
        x = x.clone()
        if forward and group is not None:
            dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        gradient = gradient.clone()
        if context.backward_sum and context.group is not None:
            dist.all_reduce(gradient, group=context.group)
        return gradient, None, None, None


class FeedForward(nn.Module):
    """A feed-forward with the hidden units cut over `group`."""

    def __init__(self, group: Any, wrong: str) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN, bias=False)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))
        self.group, self.wrong = group, wrong

    def cut(self, index: int, size: int) -> None:
        rows = torch.arange(4 * HIDDEN).chunk(size)[index]
        self.up.weight, self.up.bias = nn.Parameter(self.up.weight[rows]), nn.Parameter(self.up.bias[rows])
        self.down.weight = nn.Parameter(self.down.weight[:, rows])

    def forward(self, x: Tensor) -> Tensor:
        x = Sum.apply(x, self.group, False, self.wrong != "backward")
        act = F.relu if self.wrong == "version" else F.gelu
        return Sum.apply(self.down(act(self.up(x))), self.group, self.wrong != "forward", False) + self.bias


class Model(nn.Module):
    def __init__(self, group: Any = None, wrong: str = "") -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.norms = nn.ModuleList(nn.LayerNorm(HIDDEN) for _ in range(2))
        self.blocks = nn.ModuleList(FeedForward(group, wrong if n else "") for n in range(2))
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for norm, block in zip(self.norms, self.blocks, strict=True):
            x = x + self.drop(block(norm(x)))
        return self.head(x).clone()  # FSDP2 warns of views


def train(
    ranks: Mapping[str, int] | None = None, wrong: str = "", steps: int = 2, micro: int = 1, wrap: str = ""
) -> None:
    """Train some steps; `ranks`: sizes of the axes data and tp, in that order. `wrap`: ddp or fsdp2 over data."""
    sizes = {"data": 1, "tp": 1} | dict(ranks or {})
    groups, index = dict.fromkeys(sizes), dict.fromkeys(sizes, 0)
    if sizes["data"] * sizes["tp"] > 1:
        index = {"data": dist.get_rank() // sizes["tp"], "tp": dist.get_rank() % sizes["tp"]}
        for d in range(sizes["data"]):
            group = dist.new_group([d * sizes["tp"] + t for t in range(sizes["tp"])])
            groups["tp"] = group if d == index["data"] else groups["tp"]
        for t in range(sizes["tp"]):
            group = dist.new_group([d * sizes["tp"] + t for d in range(sizes["data"])])
            groups["data"] = group if t == index["tp"] else groups["data"]
    torch.manual_seed(1)
    model = Model(groups["tp"] if sizes["tp"] > 1 else None, wrong).double()
    for block in model.blocks if sizes["tp"] > 1 else ():
        block.cut(index["tp"], sizes["tp"])
    called: nn.Module = model
    if wrap == "ddp":
        called = DistributedDataParallel(model)
    elif wrap:
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2 if wrong == "rate" and index["tp"] else 1e-2)
    generator = torch.Generator().manual_seed(2)
    for step in range(steps):
        ids = torch.randint(0, VOCABULARY, (ROWS, POSITIONS + 1), generator=generator)
        own = ids.chunk(sizes["data"])[0 if wrong == "data" else index["data"]]
        for part in own.chunk(micro):
            loss = F.cross_entropy(called(ids=part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / micro
            loss.backward()
        for parameter in model.parameters() if sizes["data"] > 1 and not wrap else ():
            if not (wrong == "reduction" and parameter.ndim == 1):
                dist.all_reduce(parameter.grad, group=groups["data"])
                parameter.grad /= sizes["data"]
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}: {float(loss.detach()):.6f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", nargs="*", default=[])
    parser.add_argument("--wrong", default="")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro", type=int, default=1)
    words = parser.parse_args()
    sizes = {name: int(size) for name, size in (word.split("=") for word in words.ranks)}
    if sizes:
        dist.init_process_group("gloo")
    train(sizes, words.wrong, words.steps, words.micro)
    if sizes:
        dist.destroy_process_group()
