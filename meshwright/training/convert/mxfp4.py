"""Weights of experts stored in MXFP4 (OCP Microscaling Formats 1.0), as in the published folders of gpt-oss.

| tensor        | shape                     | has                                                              |
|---------------|---------------------------|------------------------------------------------------------------|
| NAME_blocks   | [n, out, in / 32, 16]     | two numbers of 4 bits in a byte, the lower bits first            |
| NAME_scales   | [n, out, in / 32]         | the exponent, plus 127, of a block's factor                      |
| NAME          | [n, in, out]              | the numbers in bfloat16, without a rounding                      |

A number has a sign, two bits of exponent and one of mantissa: 0, 0.5, 1, 1.5, 2, 3, 4 or 6.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from meshwright.ranks.errors import CheckpointError
from meshwright.training.convert.folder import Place, Source

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 4 bits with a sign bit of 0."""
BLOCKS, SCALES = "_blocks", "_scales"
SIZE = 32
"""Numbers of a block."""
OFFSET = 127
"""The stored exponent of the factor 1."""


class PackedSource(Source):
    """The tensors of a folder, with each pair of blocks and scales as one tensor."""

    def __init__(self, folder: Path, places: Mapping[str, Place]) -> None:
        super().__init__(folder, places)
        names = (name.removesuffix(BLOCKS) for name in self.names if name.endswith(BLOCKS))
        self.packed = {name for name in names if f"{name}{SCALES}" in self.names}
        parts = {f"{name}{end}" for name in self.packed for end in (BLOCKS, SCALES)}
        self.names = (self.names - parts) | self.packed

    def weight(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Read a tensor by its full name; packed ones in bfloat16. Raises CheckpointError as Source."""
        if name not in self.packed:
            return super().weight(name, shape)
        blocks, scales = (self.read(f"{name}{end}") for end in (BLOCKS, SCALES))
        count, inputs, outputs = shape
        wanted = (count, outputs, inputs // SIZE, SIZE // 2)
        for end, tensor, sizes in ((BLOCKS, blocks, wanted), (SCALES, scales, wanted[:3])):
            if tuple(tensor.shape) != sizes or tensor.dtype != torch.uint8 or inputs % SIZE:
                has = f"{name}{end} is {list(tensor.shape)} of {str(tensor.dtype).removeprefix('torch.')}"
                raise CheckpointError(f"{self.folder}: {has}, and config.json makes it {list(sizes)} of uint8")
        whole = torch.empty(shape, dtype=torch.bfloat16)
        # The numbers of one expert at a time are in float32.
        for expert, block, scale in zip(whole, blocks, scales, strict=True):
            expert.copy_(unpacked(block, scale).t())
        return self.checked(name, whole)


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers [..., in] in float32.

    Args:
        blocks: Bytes [..., in / 32, 16].
        scales: Stored exponents [..., in / 32]; 255 is not a number.
    """
    values = torch.tensor([*VALUES, *(-value for value in VALUES)])
    pairs = torch.stack((blocks & 15, blocks >> 4), -1)  # [..., in / 32, 16, 2]
    factors = torch.exp2(scales.double() - OFFSET).masked_fill(scales == 2 * OFFSET + 1, torch.nan)
    numbers = values[pairs.flatten(-2).int()].double() * factors.unsqueeze(-1)
    return numbers.float().flatten(-2)
