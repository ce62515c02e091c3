"""Dropout by blocks (blocks.py): each block's mask is drawn from a seed of the block's global index."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright.compute.bits.blocks import Blocks, Draw
from meshwright.compute.parameters.shard import seed_of
from meshwright.compute.tensor.products import side_by_side


class BlockDropout(nn.Module):
    """Dropout of activations [B, T, N] by blocks of grains, runs and parts.

    The mask of a block is drawn from a seed of (grain, run, part), global indices, and does not depend on the rank.
    """

    def __init__(self, rate: float, blocks: Blocks, draw: Draw) -> None:
        super().__init__()
        self.rate, self.blocks, self.draw = rate, blocks, draw

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.rate:
            return x
        blocks, masks = self.blocks, []
        for seed, grain in zip(self.draw(blocks.grains), x.detach().chunk(blocks.grains), strict=True):
            rows = []
            for run, tokens in enumerate(grain.chunk(blocks.runs, 1), blocks.first_run):
                parts = []
                for index, block in enumerate(tokens.chunk(blocks.parts, -1), blocks.first_part):
                    generator = torch.Generator(block.device).manual_seed(seed_of(f"{seed}/{run}/{index}"))
                    mask = torch.empty(block.shape, dtype=block.dtype, device=block.device)
                    parts.append(mask.bernoulli_(1 - self.rate, generator=generator).div_(1 - self.rate))
                rows.append(side_by_side(parts))
            masks.append(torch.cat(rows, 1))
        return x * (masks[0] if len(masks) == 1 else torch.cat(masks))
