"""States: where the masters and moments of the slots live, and how they are stepped.

The optimizer decides (rate, divisor, whether a step is applied at all); states do it. `in_place.py` keeps them on the
device beside the slots; meshwright/memory/offload.py elsewhere. Both do torch's own steps, and leave the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from torch import Tensor

from meshwright.bucket import Slot
from meshwright.config import Config


class States(Protocol):
    """The masters and moments of some slots. Half-precision slots have float32 masters; others are their own."""

    streams: bool
    """Whether a slot is best stepped as soon as its gradient is there, while others' are still under way."""

    @property
    def coming_bytes(self) -> int:
        """Device memory that the first step will take for good."""

    def step(self, indices: Iterable[int], rate: float, divisor: float, steps_taken: int) -> None:
        """Step each slot once, in the order of `indices`, with its gradient divided; then the weights are new.

        `steps_taken`: how many steps were applied before this one.
        """

    def tensors(self, index: int) -> dict[str, Tensor]:
        """The weights and the state tensors of slot `index`, each [n] like the slot, by name. Views, not copies."""

    def prepare(self, steps_taken: int) -> None:
        """Make zero states as torch would at its first step, so that a checkpoint's can be copied in."""

    def refresh(self) -> None:
        """Copy the masters into the half-precision weights."""

    def adopt(self) -> None:
        """A master whose rounding is no longer the weight was left behind when the weight was mended: it takes it."""


StatesFactory = Callable[[Config, Sequence[Slot]], States]
