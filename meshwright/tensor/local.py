"""A parameter that stands inside of a pair: called without arguments, it gives this rank's part."""

from __future__ import annotations

from torch import Tensor

from meshwright.mesh import Mesh
from meshwright.shard import ShardedModule, ShardSpec


class Local(ShardedModule):
    """`weight`, as its spec cuts it: a table of attention's biases by head, the kernels of a grouped convolution."""

    def __init__(self, mesh: Mesh, spec: ShardSpec) -> None:
        super().__init__(mesh)
        self.weight = self.declare("weight", spec)

    def forward(self) -> Tensor:
        return self.weight
