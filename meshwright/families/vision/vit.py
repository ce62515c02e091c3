"""Vision Transformer (Dosovitskiy et al., 2021, arXiv 2010.11929): norms at the input of each sub-layer, exact GELU.

Shapes: B batch, C channels, S image, P patch, T tokens = (S/P)^2 + 1, H hidden, A local heads, E head width.

| step      | output                                                                                      |
|-----------|---------------------------------------------------------------------------------------------|
| rows      | [B, T, C·P·P + 1]: a row of zeros for the class token, then each patch's pixels and a one   |
| patches   | [B, T, H]: the one multiplies the weight's last row, the bias of the patches alone          |
| positions | [B, T, H]: row 0 of the table is the class token together with its position                 |
| blocks    | [B, T, H]                                                                                   |
| head      | classes, of the first token                                                                 |
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import Batch, Chunk, Costs, Hidden, Scales
from meshwright.compute.models.attention import Block
from meshwright.compute.models.chain import Chain, blocks_of
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.kit import Kit
from meshwright.config import Config
from meshwright.families.vision.section import ImageNetwork, Vit

INITIAL = Initial(0.02)


class ImageChain(Chain):
    """The base of classifiers of images. Batch: `images` [B, C, S, S] uint8, `labels` [B, 1]."""

    @staticmethod
    def sample_shapes(config: Config) -> dict[str, tuple[int, ...]]:
        model = config.model
        assert isinstance(model, ImageNetwork), model
        return {"images": (model.channels, model.image, model.image), "labels": (1,)}


class ViT(ImageChain):
    """The Vision Transformer from images to a loss."""

    def __init__(self, model: Vit, kit: Kit, chunk: Chunk | None = None) -> None:
        chunk = chunk or Chunk.whole(model.layers)
        super().__init__(chunk)
        self.patch = model.patch
        self.num_tokens = model.positions
        if chunk.first:
            self.patches = kit.linear("patches", patch_inputs(model), model.hidden, INITIAL)
            self.positions = kit.embedding(model.padded(model.positions), model.hidden, INITIAL)
            self.dropout = nn.Dropout(model.dropout)
        self.blocks = blocks_of(chunk, lambda layer: Block(model, kit, layer, INITIAL))
        if chunk.last:
            self.norm = kit.norm(model.hidden, model.norm_epsilon)
            rows = model.padded(model.classes)
            self.head = kit.head_loss(HeadShape(model.hidden, model.classes, rows, INITIAL, bias=True))

    def embed(self, batch: Batch) -> Hidden:
        """Embed the class token and the patches: [B, T, H]."""
        images = batch["images"]
        # uint8 until here: batches are sent and stored with one byte a pixel.
        pixels = images.to(next(self.parameters()).dtype) / 127.5 - 1  # 0..255 -> -1..1
        positions = torch.arange(self.num_tokens, device=images.device)
        return (self.dropout(self.patches(patch_rows(pixels, self.patch)) + self.positions(positions)),)

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        return super().loss(h[:, :1], batch, scales)  # not h[:, 0]: labels are [B, 1], a token's each

    def num_correct(self, h: Tensor, batch: Batch) -> list[Tensor]:
        return super().num_correct(h[:, :1], batch)

    @staticmethod
    def products(config: Config) -> Costs:
        """Count multiplications; the classifier reads one token."""
        model = config.model
        assert isinstance(model, Vit), model
        tokens, hidden = model.positions, model.hidden
        layer = tokens * (12 * hidden**2 + 2 * tokens * hidden)
        begin, end = tokens * patch_inputs(model) * hidden, model.padded(model.classes) * hidden
        return Costs(begin, (layer,) * model.layers, end)

    @staticmethod
    def tokens_per_sample(config: Config) -> int:
        """Count the positions of an image."""
        assert isinstance(config.model, Vit), config.model
        return config.model.positions


def patch_inputs(model: Vit) -> int:
    """Return the width of a patch's row: the pixels and the one."""
    return model.channels * model.patch**2 + 1


def patch_rows(pixels: Tensor, patch: int) -> Tensor:
    """Cut images into rows of patches, after a row of zeros for the class token: [B, C, S, S] -> [B, T, C·P·P + 1]."""
    cut = pixels.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [B, C, S/P, P, S/P, P]
    rows = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, T - 1, C·P·P]
    # The one multiplies the weight's last row, the patches' bias; the class token's row has a zero, hence no bias.
    return F.pad(F.pad(rows, (0, 1), value=1.0), (0, 0, 1, 0))
