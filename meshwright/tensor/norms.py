"""Norms besides layer norm, of activations whose hidden dim a rank holds whole. In float32 or better, as layer norm.

| norm  | of             | over                        | weights   |
|-------|----------------|-----------------------------|-----------|
| rms   | [B, T, H]      | H; no mean (arXiv 1910.07467) | [H]     |
| group | [B, T, H]      | T and the channels of a group (arXiv 1803.08494) | [H], [H] |
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from meshwright.mesh import Mesh
from meshwright.shard import ONES, ZEROS, ShardedModule, ShardSpec
from meshwright.tensor.head import Cuts


class RmsNorm(ShardedModule):
    """x / sqrt(mean(x^2) + epsilon) · weight."""

    def __init__(self, mesh: Mesh, hidden: int, epsilon: float) -> None:
        super().__init__(mesh)
        self.epsilon = epsilon
        self.weight = self.declare("weight", ShardSpec((hidden,), initial=ONES, matrix=False, full_precision=True))

    def forward(self, h: Tensor) -> Tensor:
        x = h.to(self.weight.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.epsilon).to(h.dtype)


class GroupNorm(ShardedModule):
    """The channels of `groups` groups, each group with its own mean and variance over all positions.

    `cuts`: of the channels, which a rank holds whole groups of.
    """

    def __init__(self, mesh: Mesh, channels: int, groups: int, epsilon: float, cuts: Cuts = ()) -> None:
        super().__init__(mesh)
        self.groups, self.epsilon = groups // mesh.size(*(axis for _, axis in cuts)), epsilon
        self.weight = self.declare("weight", ShardSpec((channels,), cuts, ONES, matrix=False, full_precision=True))
        self.bias = self.declare("bias", ShardSpec((channels,), cuts, ZEROS, matrix=False, full_precision=True))

    def forward(self, h: Tensor) -> Tensor:
        x = h.to(self.weight.dtype).transpose(1, 2)  # [B, H, T]
        return F.group_norm(x, self.groups, self.weight, self.bias, self.epsilon).transpose(1, 2).to(h.dtype)
