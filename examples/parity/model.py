"""The small Transformer that the examples make parallel, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, WIDTH, HEADS = 48, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        x = self.norm1(h)
        q, k, v = (f(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(y.transpose(1, 2).flatten(2))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Transformer(nn.Module):
    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = x if self.tokens is None else self.tokens(x)
        for block in self.blocks:
            h = block(h)
        return h if self.head is None else self.head(self.norm(h))


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the mean over labels that are not -100."""
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


def batch_of(generator: torch.Generator) -> dict[str, Tensor]:
    return {name: torch.randint(0, VOCABULARY, (8, 12), generator=generator) for name in ("tokens", "labels")}


def adamw(parameters: list[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
