"""ResNeXt (Xie et al., 2017, arXiv 1611.05431), with group norm (Wu and He, 2018, arXiv 1803.08494) for batch norm.

With batch norm the loss would depend on the samples of a microbatch, and so on the layout. Group norm has the same
number of weights. Every norm has one group for each path of a block, so that a rank with some of the paths has whole
groups.

Shapes: B batch, C channels and K kernel of the stem, S the image's side at a block and s after its stride, P paths,
D = P · path width, local d; H and N the block's input and output channels. An image is a sequence of its positions.

| step     | output                                                                                             |
|----------|----------------------------------------------------------------------------------------------------|
| rows     | [B, S·S, C·K·K]: the pixels under the kernel                                                       |
| stem     | [B, S·S, hidden]: patches, norm, ReLU, and for `imagenet` the maximum of 3 x 3 with stride 2       |
| expand   | [B, S·S, d]: 1 x 1, norm, ReLU                                                                     |
| kernels  | [B, s·s, d]: 3 x 3 in each path separately, norm, ReLU; in a stage's first block, stride 2         |
| contract | [B, s·s, N]: 1 x 1, norm; ReLU of the sum with the block's input, or with its linear and norm      |
| end      | [B, 1, N]: the mean over positions                                                                 |
| head     | classes                                                                                            |
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.compute.model import Batch, Chunk, Costs, Hidden
from meshwright.compute.models.chain import blocks_of
from meshwright.compute.parameters.role import HIDDEN_MATRIX
from meshwright.compute.parameters.shard import Initial
from meshwright.compute.tensor.head import HeadShape
from meshwright.compute.tensor.kit import Kit
from meshwright.compute.tensor.products import PLAIN
from meshwright.config import Config
from meshwright.families.vision.section import ResNeXt
from meshwright.families.vision.vit import ImageChain

KERNEL = 3
"""The width and height of the paths' kernels."""


@dataclass(frozen=True)
class BlockShape:
    """The channels of a block, `inner` over all paths, and the sides of the images that the block reads and writes."""

    inputs: int
    inner: int
    outputs: int
    side: int
    reduced_side: int
    """The side of the block's output."""
    stride: int
    changes: bool
    """True if input and output differ in shape, so that the shortcut needs a linear."""


@dataclass(frozen=True)
class StemShape:
    """The stem's kernel, stride and sizes. `pools`: True if max pooling follows the convolution."""

    kernel: int
    stride: int
    pools: bool
    inputs: int
    """Pixels under the kernel, over all channels."""
    side: int
    """The side of the convolution's output."""


def stem_of(model: ResNeXt) -> StemShape:
    """Return the shape of the stem."""
    kernel, stride, pools = (7, 2, True) if model.stem == "imagenet" else (3, 1, False)
    return StemShape(kernel, stride, pools, model.channels * kernel**2, math.ceil(model.image / stride))


def block_shapes(model: ResNeXt) -> list[BlockShape]:
    """Return the shapes of all blocks, in order."""
    shapes = []
    channels, stem = model.hidden, stem_of(model)
    side = math.ceil(stem.side / 2) if stem.pools else stem.side
    for stage, num_blocks in enumerate(model.stage_blocks):
        inner, outputs = model.paths * model.path_width * 2**stage, 4 * model.hidden * 2**stage
        for index in range(num_blocks):
            # The first block of every stage but the first halves the side.
            stride = 2 if stage > 0 and index == 0 else 1
            reduced, changes = math.ceil(side / stride), stride > 1 or channels != outputs
            shapes.append(BlockShape(channels, inner, outputs, side, reduced, stride, changes))
            channels, side = outputs, reduced
    return shapes


def he(inputs: int) -> Initial:
    """Return initial values of a linear or convolution before a ReLU (He et al., 2015, arXiv 1502.01852, eq. 10)."""
    return Initial(math.sqrt(2 / inputs))


def image_of(h: Tensor) -> Tensor:
    """View a sequence of positions as an image: [B, S·S, C] -> [B, C, S, S]."""
    side = math.isqrt(h.shape[1])
    return h.transpose(1, 2).unflatten(2, (side, side))


def sequence_of(image: Tensor) -> Tensor:
    """Turn an image into a sequence of positions: [B, C, S, S] -> [B, S·S, C]. A view if the rows are contiguous."""
    return image.flatten(2).transpose(1, 2)


class Stem(nn.Module):
    """The layers from images to the first block's input."""

    def __init__(self, model: ResNeXt, kit: Kit) -> None:
        super().__init__()
        self.shape = stem_of(model)
        inputs = self.shape.inputs
        self.patches = kit.linear("patches", inputs, model.hidden, he(inputs))
        self.norm = kit.norm(model.hidden, model.norm_epsilon, kind="group", groups=model.paths)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.to(next(self.parameters()).dtype) / 127.5 - 1  # 0..255 -> -1..1
        kernel = self.shape.kernel
        rows = F.unfold(pixels, kernel, padding=kernel // 2, stride=self.shape.stride).transpose(1, 2)
        # unfold and a linear are a convolution, made of a layer that every kit has.
        h = F.relu(self.norm(self.patches(rows))).to(pixels.dtype)  # [B, S·S, H]
        return sequence_of(F.max_pool2d(image_of(h), 3, 2, 1)) if self.shape.pools else h


class Shortcut(nn.Module):
    """A linear of every stride-th row and column, and a norm."""

    def __init__(self, model: ResNeXt, kit: Kit, shape: BlockShape) -> None:
        super().__init__()
        self.stride = shape.stride
        self.transform = kit.linear("transform", shape.inputs, shape.outputs, he(shape.inputs), bias=False)
        self.norm = kit.norm(shape.outputs, model.norm_epsilon, kind="group", groups=model.paths)

    def forward(self, h: Tensor) -> Tensor:
        if self.stride > 1:
            h = sequence_of(image_of(h)[:, :, :: self.stride, :: self.stride])
        normed: Tensor = self.norm(self.transform(h))
        return normed.to(h.dtype)  # also under autocast, the residual sum has the dtype of the hidden states


class ResNeXtBlock(nn.Module):
    """ReLU of the paths' sum and the shortcut; this rank computes some of the paths."""

    def __init__(self, model: ResNeXt, kit: Kit, shape: BlockShape) -> None:
        super().__init__()
        inner, epsilon = shape.inner, model.norm_epsilon
        width = inner // model.paths
        self.stride, self.paths = shape.stride, kit.local_heads(model.paths)
        self.products = PLAIN if kit.inner is None else kit.inner.products
        self.expand = kit.branches.expand(shape.inputs, inner, he(shape.inputs), bias=False)
        self.expand_norm = kit.norm(inner, epsilon, kind="group", groups=model.paths, inside=True)
        # Sharded along the paths, so that a rank has whole paths; `local`, since no other rank reads these kernels.
        self.kernels = kit.local((inner, width, KERNEL, KERNEL), 0, he(width * KERNEL**2), HIDDEN_MATRIX)
        self.kernels_norm = kit.norm(inner, epsilon, kind="group", groups=model.paths, inside=True)
        self.contract = kit.branches.contract(inner, shape.outputs, he(inner), bias=False)
        self.contract_norm = kit.norm(shape.outputs, epsilon, kind="group", groups=model.paths)
        self.shortcut = Shortcut(model, kit, shape) if shape.changes else nn.Identity()

    def forward(self, h: Tensor) -> Tensor:
        inside = F.relu(self.expand_norm(self.expand(h)))  # [B, S·S, d]
        convolved = self.products.convolve(image_of(inside), self.kernels(), self.stride, KERNEL // 2, self.paths)
        inside = F.relu(self.kernels_norm(sequence_of(convolved)))  # [B, s·s, d]
        return F.relu(self.contract_norm(self.contract(inside)) + self.shortcut(h))  # [B, s·s, N]


class ResNeXtModel(ImageChain):
    """ResNeXt from images to a loss, with dropout before the classifier."""

    def __init__(self, model: ResNeXt, kit: Kit, chunk: Chunk | None = None) -> None:
        chunk = chunk or Chunk.whole(model.num_blocks)
        super().__init__(chunk)
        shapes = block_shapes(model)
        if chunk.first:
            self.stem = Stem(model, kit)
        self.blocks = blocks_of(chunk, lambda index: ResNeXtBlock(model, kit, shapes[index]))
        if chunk.last:
            self.dropout = nn.Dropout(model.dropout)
            channels, rows = shapes[-1].outputs, model.padded(model.classes)
            self.head = kit.head_loss(HeadShape(channels, model.classes, rows, Initial(0.01), bias=True))

    def embed(self, batch: Batch) -> Hidden:
        """Run the stem: [B, S·S, H]."""
        return (self.stem(batch["images"]),)

    def final_states(self, hidden: Hidden) -> Tensor:
        """Average over positions: [B, 1, N]."""
        (h,) = hidden
        pooled: Tensor = self.dropout(h.mean(1, keepdim=True))
        return pooled

    @staticmethod
    def products(config: Config) -> Costs:
        """Count the multiplications with weights in an image's forward pass."""
        model = config.model
        assert isinstance(model, ResNeXt), model
        shapes, stem = block_shapes(model), stem_of(model)
        begin = stem.side**2 * stem.inputs * model.hidden
        layers = []
        for shape in shapes:
            kernels = shape.inner * shape.inner // model.paths * KERNEL**2  # a path reads only its own channels
            shortcut = shape.inputs * shape.outputs * shape.changes
            behind = kernels + shape.inner * shape.outputs + shortcut  # after the stride
            layers.append(shape.side**2 * shape.inputs * shape.inner + shape.reduced_side**2 * behind)
        return Costs(begin, tuple(layers), shapes[-1].outputs * model.padded(model.classes))

    @staticmethod
    def tokens_per_sample(config: Config) -> int:
        """Count the positions of an image at the first block's input."""
        assert isinstance(config.model, ResNeXt), config.model
        return block_shapes(config.model)[0].side ** 2
