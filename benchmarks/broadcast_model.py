"""The plain model on the papers' broadcast loop (broadcast_loop.py), as a contender of 2-D and 2.5-D."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import broadcast_loop as loop
from benchmarks.baselines import fused_adamw
from benchmarks.broadcast_loop import Shape
from benchmarks.contender import Contender, Place, Step
from benchmarks.plain_model import PlainBlock, PlainGPT
from benchmarks.reference import REFERENCE, global_batch
from meshwright.ranks.environment import read_environment, rendezvous
from meshwright.ranks.grid import Grid
from meshwright.ranks.mesh import open_mesh


def contender(q: int, depth: int, transport: str) -> Contender:
    """Return the broadcast loop on [q, q, depth] ranks."""
    launcher: Any = "mpi" if transport == "mpi" else "torch"
    options: dict[str, Any] = {"q": q, "depth": depth, "transport": transport}
    name = f"broadcast loop {transport}"
    return Contender(name, "benchmarks.broadcast_model:train", options, q * q * depth, launcher)


@contextmanager
def train(place: Place, q: int, depth: int, transport: str) -> Iterator[Step]:
    """Yield steps of the reference model."""
    grid = Grid((("depth", depth), ("row", q), ("col", q)))
    with open_mesh(grid, read_environment(), transport, torch.device("cpu"), rendezvous()) as mesh:
        torch.manual_seed(0)
        model = BroadcastGPT(PlainGPT(REFERENCE), Shape.of(mesh))
        optimizer = fused_adamw(model.parameters())  # vectors of another row have no gradient here: no step
        count = 0

        def step() -> float:
            nonlocal count
            loss = model(*global_batch(count))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            count += 1
            return loss.item()

        yield step


class Linear(nn.Module):
    """[N, H/q] -> [N, O/q]. The outputs are `groups` equal groups, each cut separately."""

    def __init__(self, plain: nn.Linear, shape: Shape, groups: int = 1) -> None:
        super().__init__()
        self.shape = shape
        whole = plain.weight.t().unflatten(1, (groups, -1))  # [H, G, O/G]
        self.weight = nn.Parameter(shape.block(whole).flatten(1))
        bias = None if plain.bias is None else shape.cut(plain.bias.unflatten(0, (groups, -1))).flatten()
        self.bias = None if bias is None else nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        y = loop.Linear.apply(x, self.weight, self.shape)
        return y if self.bias is None else y + loop.OfRowZero.apply(self.bias, self.shape)


class Norm(nn.Module):
    """Layer norm of [N, H/q]."""

    def __init__(self, plain: nn.LayerNorm, shape: Shape) -> None:
        super().__init__()
        self.shape, self.epsilon = shape, plain.eps
        self.weight = nn.Parameter(shape.cut(plain.weight))
        self.bias = nn.Parameter(shape.cut(plain.bias))

    def forward(self, x: Tensor) -> Tensor:
        scale, offset = (loop.OfRowZero.apply(vector, self.shape) for vector in (self.weight, self.bias))
        return loop.Normalised.apply(x, self.epsilon, self.shape) * scale + offset


class BroadcastBlock(nn.Module):
    """The plain block on [B/(dq)·T, H/q]: the attention core is local, over A/q heads."""

    def __init__(self, plain: PlainBlock, shape: Shape) -> None:
        super().__init__()
        self.heads = plain.heads // shape.q
        self.attention_norm = Norm(plain.attention_norm, shape)
        self.query_key_value = Linear(plain.query_key_value, shape, groups=3)
        self.output = Linear(plain.output, shape)
        self.feed_forward_norm = Norm(plain.feed_forward_norm, shape)
        self.expand = Linear(plain.expand, shape)
        self.contract = Linear(plain.contract, shape)

    def forward(self, h: Tensor, sequences: int) -> Tensor:
        split = self.query_key_value(self.attention_norm(h)).view(
            sequences, -1, 3, self.heads, h.shape[1] // self.heads
        )
        query, key, value = (each.transpose(1, 2) for each in split.unbind(2))  # [B/(dq), A/q, T, E]
        core = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        h = h + self.output(core.transpose(1, 2).reshape(h.shape))
        return h + self.contract(F.gelu(self.expand(self.feed_forward_norm(h)), approximate="tanh"))


class BroadcastGPT(nn.Module):
    """Tokens and labels [B, T] of the global batch to this rank's share of the mean loss, equal along a row.

    The parameters are blocks of the parameters of `plain`.
    """

    def __init__(self, plain: PlainGPT, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Parameter(shape.block(plain.tokens.weight))
        self.positions = nn.Parameter(shape.cut(plain.positions.weight))
        self.blocks = nn.ModuleList(BroadcastBlock(block, shape) for block in plain.blocks)  # type: ignore[arg-type]
        self.norm = Norm(plain.norm, shape)
        self.head = Linear(plain.head, shape)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        mine, wanted = self.shape.rows(tokens), self.shape.rows(labels)
        embedded = loop.Lookup.apply(self.tokens, mine.flatten(), self.shape).view(*mine.shape, -1)
        h = (embedded + loop.OfRowZero.apply(self.positions, self.shape)[: mine.shape[1]]).flatten(0, 1)
        for block in self.blocks:
            h = block(h, len(mine))
        loss: Tensor = loop.CrossEntropy.apply(self.head(self.norm(h)), wanted.flatten(), labels.numel(), self.shape)
        return loss
