"""Flips single bits of tensors."""

from __future__ import annotations

import torch
from torch import Tensor

WORDS = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}


def flip(x: Tensor, element: int, bit: int) -> None:
    """Flip one bit of an element of a contiguous tensor."""
    word = x.detach().view(-1).view(WORDS[x.dtype])
    word[element] ^= 1 << bit if bit < 8 * x.element_size() - 1 else torch.iinfo(word.dtype).min
