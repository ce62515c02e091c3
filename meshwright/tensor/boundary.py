"""How activations cross into a pair of linears that is cut over an axis, and out of it again."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from meshwright.collectives import Moving


class Boundary(Protocol):
    """One of its forms: sequence.py for 1-D tensor parallelism, subgraph/segment.py for branches.

    `start_*` are for layers that write their own backward, `enter` and `leave` for others. `axis`: cuts the pair.
    `keeps`: the whole activation is kept for the backward pass, where it would have to travel again.
    `holds`: this rank holds activations outside of the pair, and what belongs to them: the bias behind the sum.
    """

    axis: str
    split_axes: tuple[str, ...]
    keeps: bool
    holds: bool

    def start_enter(self, x: Tensor) -> Moving:
        """The whole activation [B, T, H] of what a rank holds of it."""

    def start_leave(self, x: Tensor) -> Moving:
        """What a rank holds of the sum of every rank's x [B, T, H]; x is lost."""

    def enter(self, x: Tensor) -> Tensor:
        """As start_enter; differentiable."""

    def leave(self, x: Tensor) -> Tensor:
        """As start_leave; differentiable, and x is kept."""
