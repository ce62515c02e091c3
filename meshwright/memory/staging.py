"""Staging: the two half-buckets on the device through which the states pass, and the count of its bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GRADIENT = "gradient"


@dataclass
class Tier:
    """What the optimizer holds on the device: every byte of it is allocated here, also where the device is a CPU."""

    device: torch.device
    live_bytes: int = 0
    peak_bytes: int = 0

    def empty(self, num_elements: int) -> Tensor:
        """Float32 memory that is counted until `free`."""
        self.live_bytes += 4 * num_elements
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return torch.empty(num_elements, device=self.device)

    def free(self, x: Tensor) -> None:
        """`x` is not used any more."""
        self.live_bytes -= 4 * x.numel()


class Staging:
    """Two halves, each with room for `length` elements of every state and of the float32 gradient.

    AdamW: 4 (weight) + 8 (two moments) + 4 (gradient) = 16 bytes an element, in two halves: 16 · bucket.
    """

    def __init__(self, kinds: Sequence[str], length: int, tier: Tier) -> None:
        self.length = length
        self._halves = tuple({kind: tier.empty(length) for kind in (*kinds, GRADIENT)} for _ in range(2))

    def room(self, number: int, kind: str, num_elements: int) -> Tensor:
        """The room of one kind for piece `number` of the walk: every second piece shares a half."""
        return self._halves[number % 2][kind][:num_elements]
