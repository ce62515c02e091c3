"""Gathered weights: which form 2-D products take, and how long a gathered weight is kept.

| `memory.summa` | operands travel | a gathered weight              | a rank holds besides its blocks |
|----------------|-----------------|--------------------------------|---------------------------------|
| gather         | whole           | is kept until the step's end   | q times its weights, an operand |
| whole          | whole           | is gathered anew each time     | an operand                      |
| stream         | in q panels     | never exists                   | two panels of an operand        |

auto: as gather if the kept weights take at most a quarter of the free memory; else as whole, if the largest weight
takes at most an eighth; else as stream. Of all ranks, the one with the least memory decides, once (decisions.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from meshwright.parameters.shard import ShardedModule
from meshwright.ranks.comm import size_bytes
from meshwright.ranks.mesh import Mesh
from meshwright.tensor.summa import Form, Panels, Summa


def choose_form(policy: str, weight_bytes: list[int], q: int, free_bytes: int) -> Form:
    """`weight_bytes`: of a rank's block of each weight."""
    if policy != "auto":
        return Form(streams=policy == "stream", keeps=policy == "gather")
    keeps = q * sum(weight_bytes) <= free_bytes // 4
    return Form(streams=not keeps and q * max(weight_bytes, default=0) > free_bytes // 8, keeps=keeps)


@dataclass
class Weights:
    """The weights of a rank's 2-D layers: gathered when asked for, kept as the form says. `forget` at a step's end."""

    mesh: Mesh
    policy: str
    blocks: list[Tensor] = field(default_factory=list)
    """This rank's blocks of all weights that take part in 2-D products."""
    _kept: dict[tuple[ShardedModule, str, torch.dtype], Tensor] = field(default_factory=dict)

    @cached_property
    def form(self) -> Form:
        """How operands travel. Where nobody has decided what auto is (decisions.py), as whole."""
        return choose_form("whole" if self.policy == "auto" else self.policy, [], self.mesh.size("row"), 0)

    @property
    def block_bytes(self) -> list[int]:
        """This rank's block of each weight."""
        return [size_bytes(block) for block in self.blocks]

    @cached_property
    def summa(self) -> Summa:
        return Summa(self.mesh, streams=self.form.streams)

    def panels(self, layer: ShardedModule, stays: str, block: Tensor) -> Panels:
        """The panels of a layer's weight for a product in which `stays` stays."""
        if not self.form.keeps:
            return self.summa.panels("W", stays, block)
        key = (layer, stays, block.dtype)
        if key not in self._kept:
            self._kept[key] = self.summa.gather("W", stays, block)
        return self._kept[key]

    def forget(self) -> None:
        """The weights have changed."""
        self._kept.clear()
