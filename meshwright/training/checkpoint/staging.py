"""Staging of a checkpoint: copies in host memory, which a thread writes while later steps change the weights.

On a CPU the copies are made at once. A GPU copies into pinned memory, between two steps, while the host continues: only
the writing thread waits for the copies. Pinning takes longer than a copy, so the memory is kept for the next
checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshwright.ranks.comm import size_bytes
from meshwright.strategies.memory.store import ELEMENT_BYTES, HostStore

ALIGNED_BYTES = 64
"""Copies begin at multiples of this number of bytes, which suit views of every dtype."""


class Staging:
    """Copies of a rank's pieces, one checkpoint at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._store: HostStore | None = None

    def copy(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
        """Begin to copy tensors; returns contiguous copies, and a function that waits until all values are copied.
        On a GPU the copies of an earlier call are overwritten."""
        if self.device.type != "cuda":
            return [x.detach().to("cpu", copy=True).contiguous() for x in tensors], lambda: None
        starts = [0]
        for x in tensors:
            starts.append(starts[-1] + -(-size_bytes(x) // ALIGNED_BYTES) * ALIGNED_BYTES)
        needed = starts[-1] // ELEMENT_BYTES
        if self._store is None or self._store.values.numel() < needed:
            self._store = None  # before the larger one
            self._store = HostStore(needed, self.device, available=starts[-1])
        room, copies = self._store.values.view(torch.uint8), list[Tensor]()
        for start, x in zip(starts, tensors, strict=False):
            copies.append(room[start : start + size_bytes(x)].view(x.dtype).view(x.shape))
            copies[-1].copy_(x.detach(), non_blocking=True)
        return copies, torch.cuda.current_stream(self.device).record_event().synchronize
