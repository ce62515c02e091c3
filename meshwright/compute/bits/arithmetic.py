"""The arithmetic of a kit's layers under `bits: layout-free`: results are bit-equal in every layout (blocks.py).

| `bits:`      | norms                                | products, look-ups, heads | experts                           |
|--------------|--------------------------------------|---------------------------|-----------------------------------|
| layout-free  | weight and bias as separate ops      | one call for all          | one product per expert and sender |
| with cuts    | gradients are sums by block of rows  | by runs and parts         | the same, by runs and parts       |

With cuts: `bits.tensor`, `bits.hidden` or `bits.sequence` is greater than 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.compute.bits.blocks import Blocks, apart
from meshwright.compute.bits.experts import ExpertsByParts, SeparateExperts
from meshwright.compute.bits.head import PartHead
from meshwright.compute.bits.norms import AffineNorm, BlockNorm, PartNorm
from meshwright.compute.bits.products import ExactProducts
from meshwright.compute.parameters.shard import Placements, ShardedModule
from meshwright.compute.tensor.arithmetic import Arithmetic
from meshwright.compute.tensor.boundary import Boundary
from meshwright.compute.tensor.copies import ALL_COLUMNS, HeadGroups, columns_of, part_columns
from meshwright.compute.tensor.experts import Experts
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.kit import LinearRole
from meshwright.compute.tensor.linear import Addends
from meshwright.compute.tensor.norms import Norm, OneWidth
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.compute.tensor.router import ExpertsShape
from meshwright.ranks.collectives import Moving
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.trees import tree_sum


class SeparateArithmetic(Arithmetic):
    """Arithmetic for layouts that cut neither layers nor sequences.

    Replaces the operations with results that depend on the number of threads (the affine part of layer norm) or on the
    number of ranks that send rows (experts).
    """

    free_of_layout: ClassVar[bool] = True

    def norm(
        self, mesh: Mesh, width: int, epsilon: float, norm_kind: OneWidth, *, bias: bool, placements: Placements,
        heads_over: tuple[str, ...] = (), inside: bool = False, over_heads: bool = False,
    ) -> ShardedModule:  # fmt: skip
        make = AffineNorm if norm_kind == "layer" else Norm
        return make(mesh, width, epsilon, norm_kind, bias=bias, heads_over=heads_over)

    def experts(self, mesh: Mesh, shape: ExpertsShape, boundary: Boundary) -> Experts:
        return SeparateExperts(mesh, shape, boundary, self.products)


@dataclass(frozen=True)
class ExactArithmetic(SeparateArithmetic):
    """Arithmetic by runs of tokens and parts of widths: each product has the same shape in every layout."""

    blocks: Blocks
    """The blocks inside of pairs of linears."""
    products: Products = PLAIN

    in_order: ClassVar[bool] = True
    draws_masks: ClassVar[bool] = True

    @property
    def parts(self) -> int:  # type: ignore[override]
        return self.blocks.parts

    @property
    def sample_runs(self) -> int:  # type: ignore[override]
        return self.blocks.grains

    @property
    def query_runs(self) -> int:  # type: ignore[override]
        return self.blocks.query_runs

    @property
    def common(self) -> ExactArithmetic:
        return replace(self, blocks=self.blocks.uncut)

    def exact(self, blocks: Blocks, **cuts: Any) -> ExactProducts:
        """Return products by blocks.

        Args:
            blocks: runs of tokens.
            cuts: parts of widths, as further fields of `ExactProducts`.
        """
        return ExactProducts(blocks, products=self.products, **cuts)

    def expand(
        self, outputs: tuple[int, ...], heads: HeadGroups | None, ranks: int, rank: int
    ) -> tuple[Products, int]:  # fmt: skip
        blocks = self.blocks
        columns = columns_of(outputs, heads, ranks, rank, blocks.parts, blocks.all_parts)
        groups = 1 if len(outputs) == 1 else outputs[0]
        products = self.exact(blocks, inputs=blocks.hidden, columns=columns, groups=groups)
        return products, columns[0].copies

    def contract(self, outputs: int) -> Products:
        blocks = self.blocks
        columns = part_columns(1, outputs, blocks.hidden)
        return self.exact(blocks, inputs=blocks.parts, columns=columns, contracts=True)

    def between(self, role: LinearRole, outputs: int) -> Products:
        blocks = self.blocks
        if blocks.hidden == 1:
            return self.exact(blocks.outer)
        blocks = blocks.between
        columns = (ALL_COLUMNS,) if role == "scores" else part_columns(1, outputs, blocks.parts)
        return self.exact(blocks, inputs=1 if role == "patches" else blocks.hidden, columns=columns)

    def lookup(self, *, inside: bool = False, shares: int = 1) -> Addends:
        runs = self.blocks.runs if inside else self.blocks.outer_runs

        def addends(ids: Tensor, dy: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
            cut = [run for grain in ids.chunk(shares) for run in grain.chunk(runs, -1)]
            incoming = [run for grain in dy.chunk(shares) for run in grain.chunk(runs, -2)]
            return zip(cut, incoming, strict=True)

        return addends

    def norm(
        self, mesh: Mesh, width: int, epsilon: float, norm_kind: OneWidth, *, bias: bool, placements: Placements,
        heads_over: tuple[str, ...] = (), inside: bool = False, over_heads: bool = False,
    ) -> ShardedModule:  # fmt: skip
        if over_heads:
            return PartNorm(mesh, width, epsilon, norm_kind, placements, bias=bias, blocks=self.blocks)
        if self.blocks.hidden > 1 and not inside:
            return PartNorm(mesh, width, epsilon, norm_kind, placements, bias=bias, blocks=self.blocks.between)
        return BlockNorm(mesh, width, epsilon, norm_kind, bias=bias, heads_over=heads_over, blocks=self.blocks)

    def head(
        self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, boundary: Boundary, make: type[TableHead]
    ) -> TableHead:  # fmt: skip
        blocks = self.blocks if boundary.axis else self.blocks.uncut
        return PartHead(mesh, shape, tied, boundary, blocks, self.products)

    def experts(self, mesh: Mesh, shape: ExpertsShape, boundary: Boundary) -> Experts:
        return ExpertsByParts(mesh, shape, boundary, self.exact(self.blocks.outer), self.blocks)

    def start_sum_of_heads(self, x: Tensor, boundary: Boundary) -> Moving:
        # Each part is summed over its heads in separate memory, so that the sum's shape does not depend on the rank.
        wide = torch.promote_types(x.dtype, torch.float32)
        runs = [
            tree_sum(apart(heads).flatten(0, 1).sum(1, dtype=wide) for heads in run.chunk(self.parts, 2))
            for run in self.blocks.cut(x)
        ]
        leaving = boundary.start_leave(self.blocks.joined(runs, x.shape[0]))
        return Moving(leaving.work, lambda: leaving.result().to(x.dtype))

    def heads_of(self, heads: int, ranks: int) -> int:
        return heads // ranks if heads >= self.blocks.all_parts else 0
