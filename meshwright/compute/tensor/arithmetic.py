"""The arithmetic of a kit's layers: the products of each linear, and the forms of norms, look-ups, heads and experts.

A kit decides the placements of weights and the collectives of activations. `Arithmetic` decides the computation on each
rank: here each product, norm or head is one call over this rank's part. Subclasses compute in pieces of a fixed shape
(bits/arithmetic.py), in lower precision, or with adapters next to the weights.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from meshwright.compute.parameters.shard import Placements, Shard, ShardedModule
from meshwright.compute.tensor.boundary import Boundary
from meshwright.compute.tensor.copies import ColumnProducts, HeadGroups, columns_of
from meshwright.compute.tensor.experts import Experts
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.kit import LinearRole
from meshwright.compute.tensor.linear import Addends, at_once
from meshwright.compute.tensor.norms import CutRmsNorm, Norm, OneWidth
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.compute.tensor.router import ExpertsShape
from meshwright.ranks.collectives import Moving
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import PlannedMesh


class Arithmetic:
    """Arithmetic with one call over everything that a rank holds."""

    products: Products
    """The products of matrices."""
    in_order: ClassVar[bool] = False
    """Whether sums over ranks have the order of a tree (ranks/trees.py)."""
    free_of_layout: ClassVar[bool] = False
    """Whether results have equal bits on any ranks."""
    draws_masks: ClassVar[bool] = False
    """True: the arithmetic draws dropout masks, independent of the rank. False: the kit draws masks for each rank."""
    sample_runs: int = 1
    """Equal runs of samples inside of pairs, each with a separate addend of what samples share."""
    query_runs: int = 1
    """Runs of queries in attention, each with a separate addend of sinks' gradients."""
    parts: int = 1
    """Parts of a pair's inner width that are multiplied one by one, each with a separate key-value head."""

    def __init__(self, products: Products = PLAIN) -> None:
        self.products = products

    @property
    def common(self) -> Arithmetic:
        """The arithmetic between pairs of layers that each rank holds whole."""
        return self

    def expand(
        self, outputs: tuple[int, ...], heads: HeadGroups | None, ranks: int, rank: int
    ) -> tuple[Products, int]:  # fmt: skip
        """Return (products of the first linear of a pair, number of ranks that hold the same columns).

        Args:
            outputs: the linear's outputs, (N,) or (groups, N/groups).
            heads: as in `columns_of`.
            ranks: size of the axis that shards the outputs.
            rank: this rank's index on the axis.
        """
        (columns,) = columns_of(outputs, heads, ranks, rank)
        products = self.products
        return (products if columns.held is None else ColumnProducts(columns, products)), columns.copies

    def contract(self, outputs: int) -> Products:
        """Return the products of the second linear of a pair, with this number of outputs."""
        return self.products

    def between(self, role: LinearRole, outputs: int) -> Products:
        """Return the products of a linear outside of pairs. `outputs`: the number of outputs on this rank."""
        return self.products

    def lookup(self, *, inside: bool = False, shares: int = 1) -> Addends:
        """Return the addends of a table's gradient. `inside`: ids are held as inside of a pair; `shares`: number of
        ranks with ids that are looked up together."""
        return at_once

    def norm(
        self, mesh: Mesh, width: int, epsilon: float, norm_kind: OneWidth, *, bias: bool, placements: Placements,
        heads_over: tuple[str, ...] = (), inside: bool = False, over_heads: bool = False,
    ) -> ShardedModule:  # fmt: skip
        """Make a norm.

        Args:
            mesh: the ranks.
            width: the normed width.
            epsilon: the addend to the variance.
            norm_kind: the kind of norm.
            bias: whether a layer norm adds a bias.
            placements: of the width.
            heads_over: the axes that shard the heads, for a norm over a head's width.
            inside: True inside of branches.
            over_heads: True for an rms over the numbers of all heads, inside of branches.
        """
        if over_heads and mesh.size(*placements) > 1:
            (axis,) = placements
            return CutRmsNorm(mesh, width, epsilon, axis, norm_kind)
        return Norm(mesh, width, epsilon, norm_kind, bias=bias, heads_over=heads_over)

    def head(
        self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, boundary: Boundary, make: type[TableHead]
    ) -> TableHead:  # fmt: skip
        """Make a head with a loss. The boundary's axis shards the classes. `make`: the kit's class of heads."""
        classes = boundary.inner(0) or {axis: Shard(0) for axis in shape.over}
        return make(mesh, shape, tied, classes, classes, boundary, self.products)

    def experts(self, mesh: Mesh, shape: ExpertsShape, boundary: Boundary) -> Experts:
        """Make a feed-forward of experts."""
        if isinstance(mesh, PlannedMesh) and mesh.make_experts is not None:
            planned: Experts = mesh.make_experts(mesh, shape, boundary, self.products)
            return planned
        return Experts(mesh, shape, boundary, self.products)

    def start_sum_of_heads(self, x: Tensor, boundary: Boundary) -> Moving:
        """Begin to sum x [B, T, heads, N] over all ranks' heads, held as between pairs."""
        return boundary.start_leave(x.sum(2))

    def heads_of(self, heads: int, ranks: int) -> int:
        """Return the number of heads that a rank computes; 0 if several parts share a head."""
        return heads // ranks


AT_ONCE = Arithmetic()
