"""x W + b with weights stored [in, out], so that the weight gradient xᵀ dy is written in the weight's own layout."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """[..., in] x [in, out] + [out] -> [..., out]; under autocast in its dtype."""
    y = torch.addmm(bias, x.flatten(0, -2), weight)
    return y.view(*x.shape[:-1], weight.shape[1])
