"""Small models that the styles cut: a Llama, a convolution with batch norm, a routed block, a linear-only network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, HIDDEN, HEAD, HEADS, TOKENS, ROWS = 32, 16, 4, 4, 8, 8
IGNORED = -100


class RMSNorm(nn.Module):
    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Apply rotary positions to [B, heads, T, HEAD]."""
    angles = positions[..., None].to(x.dtype) / 10.0 ** torch.arange(0, 2, dtype=x.dtype)
    cos, sin = angles.cos(), angles.sin()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
    """Attend causally, and inside documents if `documents` is given. [B, heads, T, HEAD]."""
    mask = positions[..., :, None] >= positions[..., None, :]
    if documents is not None:
        mask = (mask & (documents[:, :, None] == documents[:, None, :]))[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Attention(nn.Module):
    """Attention with two hooks: the input passes `entered`, and the sum of the heads passes `reduced`."""

    def __init__(self, kv_heads: int = HEADS) -> None:
        super().__init__()
        self.wq = nn.Linear(HIDDEN, HEADS * HEAD, bias=False)
        self.wk = nn.Linear(HIDDEN, kv_heads * HEAD, bias=False)
        self.wv = nn.Linear(HIDDEN, kv_heads * HEAD, bias=False)
        self.wo = nn.Linear(HEADS * HEAD, HIDDEN, bias=False)
        self.scale = 1.0
        self.shift = 0
        self.entered: Callable[[Tensor], Tensor] = lambda x: x
        self.reduced: Callable[[Tensor], Tensor] = lambda x: x
        self.core: Callable[..., Tensor] = plain_attention

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        x = self.entered(x)
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, positions + self.shift) * self.scale, rotate(k, positions)
        k, v = (y.repeat_interleave(q.shape[1] // y.shape[1], 1) for y in (k, v))
        y = self.core(q, k, v, positions, documents)
        return self.reduced(self.wo(y.transpose(1, 2).flatten(2)))


class SwiGLU(nn.Module):
    def __init__(self, inner: int = 32) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(HIDDEN, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, HIDDEN, bias=False)
        self.entered: Callable[[Tensor], Tensor] = lambda x: x
        self.reduced: Callable[[Tensor], Tensor] = lambda x: x
        self.activation: Callable[[Tensor], Tensor] = F.silu

    def forward(self, x: Tensor) -> Tensor:
        x = self.entered(x)
        return self.reduced(self.down(self.activation(self.gate(x)) * self.up(x)))


class Layer(nn.Module):
    def __init__(self, kv_heads: int, dropout: float, feed_forward: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(), Attention(kv_heads)
        self.ffn_norm, self.feed_forward = RMSNorm(), feed_forward()
        self.drop = nn.Dropout(dropout)

    def forward(self, h: Tensor, positions: Tensor, documents: Tensor | None = None) -> Tensor:
        h = h + self.drop(self.attention(self.attention_norm(h), positions, documents))
        return h + self.drop(self.feed_forward(self.ffn_norm(h)))


class Llama(nn.Module):
    """A Llama. `positions`: the positions of this rank's tokens, if the rank has a part of the sequence."""

    def __init__(
        self, layers: int = 2, kv_heads: int = HEADS, dropout: float = 0.0, tied: bool = False,
        feed_forward: Callable[[], nn.Module] = SwiGLU,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList(Layer(kv_heads, dropout, feed_forward) for _ in range(layers))
        self.norm, self.output = RMSNorm(), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if tied:
            self.output.weight = self.tok_embeddings.weight
        self.positions: Tensor | None = None

    def forward(self, ids: Tensor, documents: Tensor | None = None) -> Tensor:
        h = self.tok_embeddings(ids)
        positions = torch.arange(ids.shape[1]) if self.positions is None else self.positions
        for layer in self.layers:
            h = layer(h, positions, documents)
        return self.output(self.norm(h))


def sum_of_losses(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def valid(labels: Tensor) -> Tensor:
    return (labels != IGNORED).sum()


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over the labels."""
    return sum_of_losses(model(batch["input_ids"]), batch["labels"]) / valid(batch["labels"])


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    draw = lambda: torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)  # noqa: E731
    return {"input_ids": draw(), "labels": draw()}


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def momentum(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
