"""The sub-graph kit (SUPER, IPDPS 2021): branches on the ranks of the `branch` axis, other layers data-parallel.

g: the axis's size; B: rows of a replica's microbatch; b: a rank's rows outside of branches: B/g, or with `common: one`
B on the first rank of a segment and 0 on the others (segment.py).

| `branch`       | attention                                             | feed-forward                   |
|----------------|-------------------------------------------------------|--------------------------------|
| attention-core | linears [b, T, H] whole; slice; A/g heads of B; concat | whole, [b, T, H]               |
| attention      | enter; [H, N/g]; A/g heads of B; [N/g, H]; leave      | whole, [b, T, H]               |
| block          | the same                                              | enter; [H, N/g] [N/g, H]; leave |

Embeddings, norms and the model's head are common: whole weights, [b, T, H]. Gradients of common parameters are summed
over data and branch, gradients of branches over data: the branch axis splits tokens for the former, weights for the
latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from meshwright.compute.parameters.role import BIAS
from meshwright.compute.parameters.shard import Initial, ShardedModule, ShardSpec
from meshwright.compute.subgraph.common import (
    AbsentHead,
    AbsentNorm,
    AbsentTable,
    CommonLinear,
)
from meshwright.compute.subgraph.section import Subgraph
from meshwright.compute.subgraph.segment import Segment
from meshwright.compute.tensor.arithmetic import AT_ONCE, Arithmetic
from meshwright.compute.tensor.copies import HeadGroups
from meshwright.compute.tensor.head import TableHead
from meshwright.compute.tensor.kit import LinearPair, LinearRole, Where
from meshwright.compute.tensor.pair import CutContract, CutExpand
from meshwright.compute.tensor.serial import Embedding, KitBase, SerialLinear, grouped
from meshwright.ranks.mesh import Mesh


@dataclass(frozen=True)
class CommonPair:
    """A pair of common linears. `core`: whether the layers between the two linears are branches."""

    segment: Segment
    arithmetic: Arithmetic
    core: bool
    inner: Arithmetic

    def expand(
        self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
        heads: HeadGroups | None = None,
    ) -> nn.Module:  # fmt: skip
        outputs = grouped(inner, groups)
        products, _ = self.arithmetic.expand(outputs, heads, 1, 0)
        return CommonLinear(
            self.segment, hidden, outputs, initial, bias=bias, products=products, slices=self.core
        )  # fmt: skip

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        products = self.arithmetic.contract(hidden)
        return CommonLinear(
            self.segment, inner, (hidden,), initial, bias=bias, products=products, joins=self.core
        )  # fmt: skip


@dataclass(frozen=True)
class BranchPair:
    """A pair of linears inside of branches: each rank has columns of the first and rows of the second."""

    segment: Segment
    arithmetic: Arithmetic

    @property
    def inner(self) -> Arithmetic:
        return self.arithmetic

    def expand(
        self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
        heads: HeadGroups | None = None,
    ) -> nn.Module:  # fmt: skip
        mesh, axis, outputs = self.segment.mesh, self.segment.axis, grouped(inner, groups)
        products, copies = self.arithmetic.expand(outputs, heads, mesh.size(axis), mesh.index(axis))
        return CutExpand(mesh, hidden, outputs, initial, self.segment, bias=bias, products=products, copies=copies)

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        # The bias is added after the sum over branches, so it belongs to the common layers' owner.
        spec = ShardSpec((hidden,), role=BIAS, owner=self.segment.owner) if bias else None
        products = self.arithmetic.contract(hidden)
        return CutContract(self.segment.mesh, inner, hidden, initial, self.segment, bias=spec, products=products)


class SubgraphKit(KitBase):
    """Branches over the `branch` axis."""

    def __init__(
        self, mesh: Mesh, settings: Subgraph, num_rows: int, arithmetic: Arithmetic = AT_ONCE
    ) -> None:  # fmt: skip
        """Make the kit of a rank; `num_rows`: rows of a replica's microbatch, or rows computed at a time."""
        alone = num_rows if settings.common == "one" else None
        self.segment = Segment(mesh, num_rows=alone, in_order=arithmetic.in_order)
        super().__init__(mesh, self.segment, arithmetic)
        branches = BranchPair(self.segment, arithmetic)
        core, common = (
            CommonPair(self.segment, arithmetic.common, core, arithmetic if core else arithmetic.common)
            for core in (True, False)
        )
        self._branches: LinearPair = core if settings.branch == "attention-core" else branches
        # Attention asks for `branches`, other pairs of linears for `expand` and `contract`, which only `block` cuts.
        self._slices: LinearPair = branches if settings.branch == "block" else common
        self.inner = arithmetic if settings.branch == "block" else arithmetic.common

    @property
    def branches(self) -> LinearPair:
        return self._branches

    def outside(self, layer: ShardedModule) -> nn.Module:
        # Ranks without rows declare the layer too: names, buckets and checkpoints are equal on all ranks.
        layer.set_owner(self.segment.owner)
        if self.segment.holds:
            return layer
        match layer:
            case TableHead():
                return AbsentHead(layer)
            case Embedding() | SerialLinear():
                return AbsentTable(layer)
            case _:
                return AbsentNorm(layer)

    def linear(self, role: LinearRole, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        products = self.arithmetic.between(role, outputs)
        if role == "patches":
            return self.outside(SerialLinear(self.mesh, inputs, (outputs,), initial, bias=False, products=products))
        biased = bias and role == "transform"
        return CommonLinear(self.segment, inputs, (outputs,), initial, bias=biased, products=products)

    def expand(self, *sizes: Any, **options: Any) -> nn.Module:
        return self._slices.expand(*sizes, **options)

    def contract(self, *sizes: Any, **options: Any) -> nn.Module:
        return self._slices.contract(*sizes, **options)

    def slice(self, x: Tensor, where: Where) -> Tensor:
        return self.segment.rows(x) if where == "batch" else x
