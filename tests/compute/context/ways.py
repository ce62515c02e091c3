"""Contexts for tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from meshwright.compute.bits.blocks import Blocks
from meshwright.compute.bits.heads import HeadParts
from meshwright.compute.bits.runs import GatheredRing, RunsOfQueries
from meshwright.compute.context.context import Context, Ulysses
from meshwright.compute.context.kernels import CpuKernel, Kernel
from meshwright.compute.context.ring import RingAttention
from meshwright.compute.context.widened import kernel_for
from meshwright.ranks.mesh import Mesh


class RingByKernel(RingAttention):
    """A ring with one kernel for all pieces, unless scores have a soft cap."""

    def __init__(self, mesh: Mesh, kernel: Kernel) -> None:
        super().__init__(mesh)
        self.kernel = kernel

    def kernel_for(self, query: Tensor, key: Tensor, value: Tensor, masked: bool, cap: float | None) -> Kernel:
        if cap is None:
            return self.kernel
        return kernel_for(query, key, value, masked, "cpu", cap=cap, widens=False)


@dataclass(frozen=True)
class Way:
    ranks: int = 1
    exact: bool = False
    """Whether the context has equal bits."""


WAYS = {
    "whole": Way(),
    "heads": Way(exact=True),
    "runs": Way(exact=True),
    "ulysses": Way(2),
    "ulysses 4": Way(4),
    "ring 2": Way(2),
    "ring 3": Way(3),
    "ring tiles": Way(4),
    "gathered": Way(2, exact=True),
}


def context_of(way: str, mesh: Mesh) -> Context:
    blocks = Blocks(head_parts=2, exact=True)
    match way.split():
        case ["whole"]:
            context = Context()
        case ["heads"]:
            context = Context()
            context.heads = HeadParts(blocks)
        case ["runs"]:
            context = Context()
            context.heads = RunsOfQueries(blocks, 4)
        case ["ulysses", *_]:
            context = Ulysses(mesh)
        case ["gathered"]:
            context = GatheredRing(mesh)
            context.heads = RunsOfQueries(blocks, 4)
        case ["ring", kernel]:
            context = RingByKernel(mesh, Kernel() if kernel == "tiles" else CpuKernel())
    return context
