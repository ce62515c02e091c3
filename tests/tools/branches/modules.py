"""Small modules with known branches, on the meta device: no numbers, no threads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.tools.branches.graph import OperatorGraph
from meshwright.tools.branches.trace import trace

ROWS = 6
WIDTH = 8


def linear(inputs: int, outputs: int) -> nn.Linear:
    return nn.Linear(inputs, outputs, bias=False, device="meta")


def cost(inputs: int, outputs: int, rows: int = ROWS) -> int:
    """Return the flops of a linear."""
    return 2 * rows * inputs * outputs


def graph_of(module: nn.Module, *shapes: tuple[int, ...]) -> OperatorGraph:
    return trace(module, *(torch.empty(*shape, device="meta") for shape in shapes or ((ROWS, WIDTH),)))


class Parts(nn.Module):
    """Linears a, b, c, ... of the given outputs, each with WIDTH inputs, after a linear `stem`."""

    def __init__(self, *outputs: int) -> None:
        super().__init__()
        self.stem = linear(WIDTH, WIDTH)
        for name, count in zip("abcdef", outputs, strict=False):
            self.add_module(name, linear(WIDTH, count))


class Diamond(Parts):
    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.a(h) * torch.relu(self.b(h))


class ThreeUnequal(Parts):
    """c is two linears deep; the sum adds two terms at a time."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        return self.a(h) + self.b(h) + self.d(F.layer_norm(self.c(h), (WIDTH,)))


class Nested(Parts):
    """a splits again after the linear."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        inner = self.a(h)
        return torch.cat([self.b(inner) * self.c(inner), self.d(h)], -1)


class Residuals(Parts):
    """A residual; then places of attention and feed-forward side by side, after one norm, next to a residual."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.stem(x)
        h = h + self.a(h)
        normed = F.layer_norm(h, (WIDTH,))
        return h + self.b(normed) + self.c(normed)


class Sliced(Parts):
    """Two halves with a linear each."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = linear(WIDTH // 2, WIDTH), linear(WIDTH // 2, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.stem(x).chunk(2, -1)
        return torch.cat([self.left(left), self.right(right)], -1)


class TwoInputs(Parts):
    """An encoder next to the decoder's start, until the decoder reads the memory; afterwards no branches."""

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory = self.stem(source)
        h = torch.relu(self.a(target)) * self.b(memory)
        return h + torch.relu(self.c(h)) * self.b(memory)


class GroupedConvolution(nn.Module):
    """1 x 1, norm, 3 x 3 in 4 groups, ReLU, 1 x 1; `groups`: of the norm."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.expand = nn.Conv2d(6, 16, 1, bias=False, device="meta")
        self.norm = nn.GroupNorm(groups, 16, device="meta")
        self.core = nn.Conv2d(16, 16, 3, padding=1, groups=4, bias=False, device="meta")
        self.contract = nn.Conv2d(16, 6, 1, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.contract(torch.relu(self.core(self.norm(self.expand(x)))))


class Heads(nn.Module):
    """Attention of 4 heads over [2, 5, WIDTH]; with `shows`, the values are an output too."""

    def __init__(self, *, shows: bool) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH, device="meta")
        self.shows = shows

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        query, key, value = (layer(h).unflatten(-1, (4, -1)) for layer in (self.query, self.key, self.value))
        heads = F.scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        out: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return torch.cat([out, value.flatten(2)], -1) if self.shows else out


class FeedForward(nn.Module):
    """Two linears with a GELU between; `normed`: also a norm of the whole inner width."""

    def __init__(self, *, normed: bool) -> None:
        super().__init__()
        self.expand, self.contract = linear(WIDTH, 32), linear(32, WIDTH)
        self.normed = normed

    def forward(self, x: Tensor) -> Tensor:
        inside = F.gelu(self.expand(x))
        return self.contract(F.layer_norm(inside, (32,)) if self.normed else inside)
