"""Scoring of tokens: windows over a text, and the summed loss of labels."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from meshwright.tools.evaluate.load import LoadedText


def windows(num_targets: int, context: int, stride: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return (starts [w], counted [w], length) of w windows over the targets 0 ... num_targets - 1.

    Window i has the targets starts[i] ... starts[i] + length - 1, and scores the targets from counted[i] on.
    """
    length = min(context, num_targets)
    num = 1 + math.ceil((num_targets - length) / stride)
    starts = np.minimum(np.arange(num, dtype=np.int64) * stride, num_targets - length)
    counted = np.concatenate([np.zeros(1, dtype=np.int64), starts[:-1] + length])
    return starts, counted, length


def summed_loss(loaded: LoadedText, h: Tensor, labels: Tensor, mask: Tensor) -> tuple[float, int]:
    """Return the summed loss in nats and the number of the labels [B, T] in the mask [B, T]; h [B, T, H]."""
    losses = loaded.head.token_losses(h[mask].unsqueeze(0), labels[mask].unsqueeze(0))  # logits of these tokens only
    return float(losses.double().sum()), losses.numel()
