"""Gathered weights: the form of 2-D products, and the lifetime of gathered weights.

| `memory.summa` | operands travel | a gathered weight              | a rank holds besides its blocks |
|----------------|-----------------|--------------------------------|---------------------------------|
| gather         | whole           | is kept until the step's end   | q times its weights, an operand |
| whole          | whole           | is gathered anew each time     | an operand                      |
| stream         | in q panels     | never exists                   | two panels of an operand        |

auto is decided before a rank is built, by the memory that is free (decisions.py).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from meshwright.compute.parameters.shard import ShardedModule
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.compute.tensor.summa import Form, Panels, Summa
from meshwright.ranks.mesh import Mesh


class Weights:
    """The weights of a rank's 2-D layers, gathered on demand and kept as `form` says."""

    def __init__(self, mesh: Mesh, policy: str, kept: dict[Any, Tensor], products: Products = PLAIN) -> None:
        """`kept`: the kit's, for gathered weights by layer, what stays, and dtype."""
        self.kept = kept
        # A config that nobody has resolved (auto) takes no memory for it.
        self.form = Form(streams=policy == "stream", keeps=policy == "gather")
        """How operands travel."""
        self.blocks: list[Tensor] = []
        """This rank's blocks of all weights that take part in 2-D products."""
        self.summa = Summa(mesh, streams=self.form.streams, products=products)

    def panels(self, layer: ShardedModule, stays: str, block: Tensor) -> Panels:
        """The panels of a layer's weight for a product in which `stays` stays."""
        if not self.form.keeps:
            return self.summa.panels("W", stays, block)
        key = (layer, stays, block.dtype)
        if key not in self.kept:
            self.kept[key] = self.summa.gather("W", stays, block)
        return self.kept[key]
