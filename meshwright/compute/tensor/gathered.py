"""The form of 2-D products, and the lifetime of gathered weights.

| `memory.summa` | operands are sent | a gathered weight          | extra memory of a rank             |
|----------------|-------------------|----------------------------|------------------------------------|
| gather         | whole             | is kept until the step end | q times the weights, and an operand|
| whole          | whole             | is gathered for each use   | an operand                         |
| stream         | in q panels       | does not exist             | two panels of an operand           |

auto is decided by the free memory, before a rank is built (decisions.py).
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

    def __init__(self, mesh: Mesh, policy: str, gathered: dict[Any, Tensor], products: Products = PLAIN) -> None:
        """Make the store.

        Args:
            mesh: the ranks.
            policy: `memory.summa`.
            gathered: the kit's dict of gathered weights, by layer, stationary matrix and dtype.
            products: multiplies two panels.
        """
        self.gathered = gathered
        # auto, in a config that is not resolved, keeps and streams nothing.
        self.form = Form(streams=policy == "stream", keeps=policy == "gather")
        self.blocks: list[Tensor] = []
        """This rank's blocks of all weights in 2-D products."""
        self.summa = Summa(mesh, streams=self.form.streams, products=products)

    def panels(self, layer: ShardedModule, stays: str, block: Tensor) -> Panels:
        """Return the panels of a layer's weight for a product with the stationary matrix `stays`."""
        if not self.form.keeps:
            return self.summa.panels("W", stays, block)
        key = (layer, stays, block.dtype)
        if key not in self.gathered:
            self.gathered[key] = self.summa.gather("W", stays, block)
        return self.gathered[key]
