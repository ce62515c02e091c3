"""The plain loop's model: GPT-2 in careful, plain torch, with SDPA and whole logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.reference import Reference


class PlainBlock(nn.Module):
    """h + attention(norm(h)), then h + feed_forward(norm(h))."""

    def __init__(self, sizes: Reference) -> None:
        super().__init__()
        hidden = sizes.hidden
        self.heads = sizes.heads
        self.attention_norm = nn.LayerNorm(hidden)
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.output = nn.Linear(hidden, hidden)
        self.feed_forward_norm = nn.LayerNorm(hidden)
        self.expand = nn.Linear(hidden, 4 * hidden)
        self.contract = nn.Linear(4 * hidden, hidden)

    def forward(self, h: Tensor) -> Tensor:
        batch, sequence, hidden = h.shape
        parts = self.query_key_value(self.attention_norm(h)).split(hidden, dim=2)
        query, key, value = (
            each.view(batch, sequence, self.heads, hidden // self.heads).transpose(1, 2) for each in parts
        )  # [B, A, T, E]
        core = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        h = h + self.output(core.transpose(1, 2).contiguous().view(batch, sequence, hidden))
        inner = F.gelu(self.expand(self.feed_forward_norm(h)), approximate="tanh")
        return h + self.contract(inner)


class PlainGPT(nn.Module):
    """Tokens and labels [B, T] to the mean cross entropy. `block`: the class of the blocks."""

    def __init__(self, sizes: Reference, block: type[PlainBlock] = PlainBlock) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.sequence, sizes.hidden)
        self.blocks = nn.ModuleList(block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden)
        self.head = nn.Linear(sizes.hidden, sizes.vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))  # [B, T, V]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
