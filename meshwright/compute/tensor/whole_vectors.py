"""Element-wise functions over whole vectors: each element's bits then do not depend on the shape around it.

Kernels compute the elements of an incomplete last vector with other code than those of whole vectors, and a function
with an exponential then rounds in another way. Operations that IEEE 754 rounds exactly (+, -, ·, /) need no padding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ROW = 1024
"""Elements of a row that functions get: whole vectors on any processor, in any precision."""


def in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor, groups: int = 1) -> Tensor:
    """Apply an element-wise function to rows of `ROW` elements, the last one padded with zeros.

    Args:
        function: [..., N] -> [..., N], or with groups [..., groups, N] -> [..., N].
        x: its input.
        groups: inputs for each element of the output.
    """
    parts = x.unbind(-2) if groups > 1 else (x,)
    size = parts[0].numel()
    rows = [F.pad(operand.reshape(-1), (0, -size % ROW)).view(-1, ROW) for operand in parts]
    y = function(torch.stack(rows, 1) if groups > 1 else rows[0])
    return y.reshape(-1)[:size].view(parts[0].shape)


class InWholeVectors:
    """Mixin of layers with an element-wise function between two linears."""

    padded = False
    """Whether the function gets whole vectors (`in_whole_vectors`)."""

    def pad(self) -> None:
        """Compute the function over whole vectors from now on."""
        self.padded = True
