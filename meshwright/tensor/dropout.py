"""Dropout where a rank holds a part: of a pair's inner width, or of what blocks decide (bits/blocks.py).

| layer | activations | masks |
|-------|-------------|-------|
| inner | [B, T, N/p], between the two linears of a pair | each rank draws for its own columns |
| block | [B, T, N], anywhere | each block's are drawn from a seed of its number in the whole |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.bits.blocks import Blocks, common_draw
from meshwright.parameters.shard import seed_of
from meshwright.tensor.kit import Kit


class BlockDropout(nn.Module):
    """Dropout of activations [B, T, N] by blocks of runs and parts, each with a mask that its numbers in the whole
    decide, whichever rank holds it."""

    def __init__(self, rate: float, blocks: Blocks, *, inside: bool) -> None:
        """`inside`: between the two linears of a pair, where the width is cut."""
        super().__init__()
        self.rate, self.blocks, self.inside = rate, blocks, inside

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        blocks, seed = self.blocks, common_draw()
        count, first = (blocks.runs, blocks.first_run) if self.inside else (blocks.outer_runs, blocks.first_outer_run)
        parts, first_part = (blocks.parts, blocks.first_part) if self.inside else (1, 0)
        masks = []
        for run, tokens in enumerate(x.detach().chunk(count, 1), first):
            for part, block in enumerate(tokens.chunk(parts, -1), first_part):
                generator = torch.Generator(x.device).manual_seed(seed_of(f"{seed}/{run}/{part}"))
                mask = torch.empty(block.shape, dtype=x.dtype, device=x.device)
                masks.append(mask.bernoulli_(1 - self.rate, generator=generator).div_(1 - self.rate))
        rows = [torch.cat(masks[start : start + parts], -1) for start in range(0, len(masks), parts)]
        return x * torch.cat(rows, 1)


class InnerDropout(nn.Module):
    """Dropout between the two linears of a pair, where each rank draws for its own part of the width."""

    def __init__(self, kit: Kit, rate: float) -> None:
        super().__init__()
        self.rate, self.own_randomness = rate, kit.own_randomness
        self.by_block: BlockDropout | None = None
        """Draws instead, where masks are free of the layout."""

    def forward(self, x: Tensor) -> Tensor:
        if self.by_block is not None:
            dropped: Tensor = self.by_block(x)
            return dropped
        rate = self.rate if self.training else 0.0
        with self.own_randomness(rate):
            return F.dropout(x, rate)
