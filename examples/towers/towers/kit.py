"""The kit: layers of a tower cut over the `tensor` axis, each tower's weights on one index of the `tower` axis."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.shard import ShardedModule, own_stream
from meshwright.compute.tensor.arithmetic import AT_ONCE, Arithmetic
from meshwright.compute.tensor.kit import Where
from meshwright.compute.tensor.megatron import MegatronKit
from meshwright.ranks.collectives import all_gather, cross, here, start_all_gather
from meshwright.ranks.mesh import Mesh

TOWERS = ("image", "text")
"""The towers, in the order of the `tower` axis."""
TOWER, ROWS, TENSOR = "tower", "rows", "tensor"


class TowersKit(MegatronKit):
    """Megatron-LM's layers inside of a sub-grid.

    Attributes:
        held: The towers that this rank computes.
    """

    def __init__(self, mesh: Mesh, arithmetic: Arithmetic = AT_ONCE) -> None:
        super().__init__(mesh, arithmetic=arithmetic)
        self.split_axes = (TOWER, ROWS)
        self.held = TOWERS if mesh.size(TOWER) == 1 else (TOWERS[mesh.index(TOWER)],)

    def place(self, tower: str, module: nn.Module) -> None:
        """Give a tower's parameters to the tower's sub-grid; other ranks declare the parameters without rows."""
        for layer in module.modules():
            if isinstance(layer, ShardedModule) and self.mesh.size(TOWER) > 1:
                layer.set_owner((TOWER, TOWERS.index(tower)))

    def meet(self, vectors: Tensor) -> Tensor:
        """Exchange the towers' vectors: [held, b, E] -> [2, b, E] on every rank.

        All ranks of the axis then compute the same loss. So the backward pass takes this rank's part of the gradient,
        and sends nothing.
        """
        if self.held == TOWERS:
            return vectors
        comm, mine = self.mesh.comm(TOWER), self.mesh.index(TOWER)
        return cross(
            vectors, lambda x: start_all_gather(x, comm, 0), lambda dx: here(dx[mine : mine + 1].contiguous())
        )  # fmt: skip

    def all_rows(self, vectors: Tensor) -> Tensor:
        """Gather all rows of the batch, [2, b, E] -> [2, B, E]; the backward pass sums gradients over the ranks."""
        return vectors if self.mesh.size(ROWS) == 1 else all_gather(vectors, self.mesh, ROWS, 1)

    def slice(self, x: Tensor, where: Where) -> Tensor:
        if where == "hidden":
            return super().slice(x, where)
        return x.chunk(self.mesh.size(ROWS))[self.mesh.index(ROWS)]

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        if rate == 0 or self.mesh.size(TENSOR) == 1:
            return nullcontext()
        drawn = int(torch.randint(2**62, ()))  # equal on all ranks that cut a layer
        return own_stream(f"{drawn}/{self.mesh.index(TENSOR)}", self.mesh.device)
