"""The arithmetic of a kit's layers: the products of each linear, and the forms of norms, look-ups, heads and experts.

A kit says how weights are cut and how activations cross ranks; its `Arithmetic` says what each rank computes of its
part. `Arithmetic` computes all that a rank holds at once. A subclass computes otherwise: in pieces of one shape
(bits/arithmetic.py), in narrower numbers, or with adapters next to the weights.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from torch import Tensor, nn

from meshwright.compute.parameters.shard import Placements, Shard, ShardedModule
from meshwright.compute.tensor.boundary import Boundary
from meshwright.compute.tensor.copies import ColumnProducts, HeadGroups, columns_of
from meshwright.compute.tensor.experts import Experts
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.kit import LinearRole
from meshwright.compute.tensor.linear import Addends, at_once
from meshwright.compute.tensor.norms import Norm
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.compute.tensor.router import ExpertsShape
from meshwright.ranks.collectives import Moving
from meshwright.ranks.mesh import Mesh


class Arithmetic:
    """All that a rank holds at once."""

    products: Products
    """The products of matrices."""
    in_order: ClassVar[bool] = False
    """Whether sums over ranks have the order of a tree (ranks/trees.py)."""
    draws_masks: ClassVar[bool] = False
    """Whether masks of dropout are drawn by the arithmetic, equal on whichever rank; else a kit draws each rank's."""
    parts: int = 1
    """Parts of a pair's inner width that are multiplied one by one, each with a key-value head of its own."""

    def __init__(self, products: Products = PLAIN) -> None:
        self.products = products

    @property
    def common(self) -> Arithmetic:
        """The arithmetic between pairs of layers that each rank holds whole."""
        return self

    def expand(
        self, outputs: tuple[int, ...], heads: HeadGroups | None, ranks: int, rank: int
    ) -> tuple[Products, int]:  # fmt: skip
        """Return (products of the first linear of a pair, ranks that hold the same columns). `heads`: as in columns_of;
        `ranks`, `rank`: of the axis that cuts the outputs."""
        (columns,) = columns_of(outputs, heads, ranks, rank)
        own = self.products
        return (own if columns.held is None else ColumnProducts(columns, own)), columns.copies

    def contract(self, outputs: int) -> Products:
        """Return the products of the second linear of a pair, with this number of outputs."""
        return self.products

    def between(self, role: LinearRole, outputs: int) -> Products:
        """Return the products of a linear outside of pairs, of which a rank has this number of outputs."""
        return self.products

    def lookup(self, *, inside: bool = False, shares: int = 1) -> Addends:
        """Return the addends of a table's gradient. `inside`: the ids are as inside of a pair; `shares`: the number of
        ranks whose ids are looked up together."""
        return at_once

    def norm(
        self, mesh: Mesh, width: int, epsilon: float, kind: Literal["layer", "rms"], *, bias: bool,
        placements: Placements, heads_over: tuple[str, ...] = (), inside: bool = False,
    ) -> ShardedModule:  # fmt: skip
        """Make a norm. `placements`: of the width; `heads_over`: the axes that cut the heads, of a norm over a head's
        width; `inside`: of branches."""
        return Norm(mesh, width, epsilon, kind, bias=bias, heads_over=heads_over)

    def head(
        self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, boundary: Boundary, make: type[TableHead]
    ) -> TableHead:  # fmt: skip
        """Make a head with its loss, of classes that the boundary's axis cuts. `make`: the kit's own class."""
        classes = boundary.inner(0) or {axis: Shard(0) for axis in shape.over}
        return make(mesh, shape, tied, classes, classes, boundary, self.products)

    def experts(self, mesh: Mesh, shape: ExpertsShape, boundary: Boundary) -> Experts:
        """Make a feed-forward of experts."""
        return Experts(mesh, shape, boundary, self.products)

    def start_sum_of_heads(self, x: Tensor, boundary: Boundary) -> Moving:
        """Begin to sum x [B, T, heads, N] over all ranks' heads, held as between pairs."""
        return boundary.start_leave(x.sum(2))

    def heads_of(self, heads: int, ranks: int) -> int:
        """Return the number of heads that a rank computes; 0 if several parts share a head."""
        return heads // ranks


AT_ONCE = Arithmetic()
