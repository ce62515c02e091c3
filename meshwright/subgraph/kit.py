"""The sub-graph kit (SUPER, IPDPS 2021): branches assigned along the `branch` axis, the rest data-parallel along it.

g: the axis's size; B: rows of a replica's microbatch; b: those that a rank holds outside of branches: B/g, or with
`common: one` B on the first rank of a segment and 0 on the others (segment.py).

| `branch`       | attention                                             | feed-forward                   |
|----------------|-------------------------------------------------------|--------------------------------|
| attention-core | linears [b, T, H] whole; slice; A/g heads of B; concat | whole, [b, T, H]               |
| attention      | enter; [H, N/g]; A/g heads of B; [N/g, H]; leave      | whole, [b, T, H]               |
| block          | the same                                              | enter; [H, N/g] [N/g, H]; leave |

Embeddings, norms, heads of the model are common: whole weights, [b, T, H]. A common parameter's gradient is summed over
data and branch, a branch's over data: the branch axis splits the tokens, and cuts the branches.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from meshwright.parameters.shard import Initial, Shard, ShardedModule, ShardSpec
from meshwright.ranks.mesh import Mesh
from meshwright.subgraph.common import (
    Absent,
    AbsentHead,
    AbsentNorm,
    AbsentTable,
    CommonLinear,
    JoinedLinear,
    SlicedLinear,
)
from meshwright.subgraph.section import Subgraph
from meshwright.subgraph.segment import AllCommon, OneCommon, Segment
from meshwright.tensor.copies import HeadGroups
from meshwright.tensor.experts import ExpertsShape
from meshwright.tensor.head import HeadShape
from meshwright.tensor.kit import LinearPair
from meshwright.tensor.linear import Local
from meshwright.tensor.norms import GroupNorm, RmsNorm
from meshwright.tensor.pair import CutContract, CutExpand
from meshwright.tensor.serial import SerialEmbedding, SerialHead, SerialNorm, SerialPatches


class CommonPair:
    """A pair of common linears. `core`: the layers between them are branches; else they are common, too."""

    def __init__(self, segment: Segment, *, core: bool) -> None:
        self.segment = segment
        self._first, self._second = (SlicedLinear, JoinedLinear) if core else (CommonLinear, CommonLinear)

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True) -> nn.Module:
        return self._first(self.segment, hidden, _grouped(inner, groups), initial, bias=bias)

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return self._second(self.segment, inner, (hidden,), initial, bias=bias)


class BranchPair:
    """The linears belong to the branches: each rank has its columns of the first, its rows of the second."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True) -> nn.Module:
        return CutExpand(self.segment.mesh, hidden, _grouped(inner, groups), initial, self.segment, bias=bias)

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        # Added after the branches' outputs are summed, so the bias is a common layer's: its owner computes it.
        spec = ShardSpec((hidden,), matrix=False, owner=self.segment.owner) if bias else None
        return CutContract(self.segment.mesh, inner, hidden, initial, self.segment, bias=spec)


def _grouped(inner: int, groups: int) -> tuple[int, ...]:
    return (inner,) if groups == 1 else (groups, inner // groups)


class SubgraphKit:
    """Branches over the `branch` axis."""

    split_axes: tuple[str, ...] = ("branch",)
    parts = 1

    def __init__(self, mesh: Mesh, settings: Subgraph, num_rows: int) -> None:
        """`num_rows`: of a replica's microbatch."""
        self.mesh = mesh
        self.segment: Segment = AllCommon(mesh) if settings.common == "all" else OneCommon(mesh, num_rows)
        branches, common = BranchPair(self.segment), CommonPair(self.segment, core=False)
        core = settings.branch == "attention-core"
        self.branches: LinearPair = CommonPair(self.segment, core=True) if core else branches
        # Attention takes `branches`, every other pair of linears the kit's own words: only `block` cuts these.
        self._slices: LinearPair = branches if settings.branch == "block" else common

    def _common(self, layer: ShardedModule, absent: Callable[[ShardedModule], Absent]) -> ShardedModule:
        """A common layer, or what stands for it where it does not live."""
        # Declared also where it does not live, with no rows: names, buckets and checkpoints are the same on all ranks.
        layer.set_owner(self.segment.owner)
        return layer if self.segment.holds else absent(layer)

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        layer = SerialEmbedding(self.mesh, num_rows, hidden, initial)
        return self._common(layer, lambda layer: AbsentTable(layer, 2))

    def patches(self, inputs: int, hidden: int, initial: Initial) -> nn.Module:
        return self._common(SerialPatches(self.mesh, inputs, hidden, initial), lambda layer: AbsentTable(layer, 2))

    def norm(self, hidden: int, epsilon: float, *, bias: bool = True) -> nn.Module:
        return self._common(SerialNorm(self.mesh, hidden, epsilon, bias=bias), AbsentNorm)

    def rms_norm(self, hidden: int, epsilon: float) -> nn.Module:
        return self._common(RmsNorm(self.mesh, hidden, epsilon), AbsentNorm)

    def group_norm(self, channels: int, groups: int, epsilon: float) -> nn.Module:
        return self._common(GroupNorm(self.mesh, channels, groups, epsilon, {}), AbsentNorm)

    def head_norm(self, width: int, epsilon: float) -> nn.Module:
        # One weight for the heads of all branches: each rank's gradient is of its heads alone, hence summed over the
        # axis.
        return RmsNorm(self.mesh, width, epsilon, ("branch",))

    def local_group_norm(self, channels: int, groups: int, epsilon: float) -> nn.Module:
        return GroupNorm(self.mesh, channels, groups, epsilon, {"branch": Shard(0)})

    def local(self, shape: tuple[int, ...], dim: int, initial: Initial, *, matrix: bool) -> nn.Module:
        return Local(self.mesh, ShardSpec(shape, {"branch": Shard(dim)}, initial, matrix=matrix))

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True) -> nn.Module:
        return self._slices.expand(hidden, inner, initial, groups=groups, bias=bias)

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return self._slices.contract(inner, hidden, initial, bias=bias)

    def transform(self, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return CommonLinear(self.segment, inputs, (outputs,), initial, bias=bias)

    def scores(self, hidden: int, outputs: int, initial: Initial) -> nn.Module:
        return CommonLinear(self.segment, hidden, (outputs,), initial, bias=False)

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        return self._common(SerialHead(self.mesh, shape, tied, {}, {}), AbsentHead)

    def experts(self, shape: ExpertsShape) -> nn.Module:
        raise AssertionError("a rule refuses experts here")

    def shared_heads(self, hidden: int, groups: HeadGroups, initial: Initial, *, bias: bool) -> nn.Module:
        raise AssertionError("a rule refuses more ranks than heads")

    def local_heads(self, heads: int) -> int:
        # Divisible: Subgraph.cuts has seen to it.
        return heads // self.mesh.size("branch")

    def slice_batch(self, x: Tensor) -> Tensor:
        return self.segment.rows(x)

    def slice_inside(self, x: Tensor) -> Tensor:
        return x

    def slice_hidden(self, x: Tensor) -> Tensor:
        return x

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        return nullcontext()  # every rank's stream is its own already

    def end_step(self) -> None:
        return None
