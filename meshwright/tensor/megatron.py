"""The 1-D kit (Megatron-LM, arXiv 1909.08053, section 3): heads, inner widths, vocabulary cut over the `tensor` axis.

| layer     | input     | weight              | output             | forward sends         | backward sends        |
|-----------|-----------|---------------------|--------------------|-----------------------|-----------------------|
| embedding | [B, T]    | [V/tensor, H]       | [B, T, H]          | all-reduce of output  | -                     |
| norm      | [B, T, H] | [H], [H]            | [B, T, H]          | -                     | -                     |
| expand    | [B, T, H] | [H, G, N/G/tensor]  | [B, T, G, N/G/tensor] | -                  | all-reduce of input   |
| contract  | [B, T, N/tensor] | [N/tensor, H] | [B, T, H]          | all-reduce of output  | -                     |
| transform | [B, T, H] | [H, H]              | [B, T, H]          | -                     | -                     |
| patches   | [B, T, P] | [P, H]              | [B, T, H]          | -                     | -                     |
| scores    | [B, T, H] | [H, n]              | [B, T, n]          | (cut: all-reduce)     | -                     |
| head      | [B, T, H] | [V/tensor, H]       | loss               | [C, 3] a chunk        | all-reduce of input   |

With sequence parallelism an activation of [B, T, H] outside of a pair is [B, T/tensor, H], and an all-reduce becomes an
all-gather on one side and a reduce-scatter on the other (sequence.py).
A transform is computed by every rank for its tokens, as Megatron-LM does with BERT's: it is one in 12 L of the work.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.bits.blocks import WHOLE, Blocks, common_draw, own_stream
from meshwright.parameters.shard import Initial, Shard, ShardedModule, ShardSpec
from meshwright.ranks.collectives import all_reduce
from meshwright.ranks.mesh import Mesh
from meshwright.tensor.boundary import CutSequence, Sequence, WholeSequence
from meshwright.tensor.copies import HeadGroups, part_columns
from meshwright.tensor.experts import Experts, ExpertsShape
from meshwright.tensor.head import HeadShape, TableHead
from meshwright.tensor.kit import LinearPair
from meshwright.tensor.linear import Local, linear, lookup
from meshwright.tensor.norms import GroupNorm, RmsNorm
from meshwright.tensor.pair import CutContract, CutExpand
from meshwright.tensor.part_loss import PartHead
from meshwright.tensor.serial import SerialLinear, SerialNorm


class MegatronEmbedding(ShardedModule):
    """Rows of a table that is cut by rows: each rank looks up its own, the others add nothing."""

    def __init__(
        self, mesh: Mesh, num_rows: int, hidden: int, initial: Initial, sequence: Sequence, blocks: Blocks = WHOLE
    ) -> None:
        super().__init__(mesh)
        self.sequence, self.blocks = sequence, blocks
        spec = ShardSpec((num_rows, hidden), {"tensor": Shard(0)}, initial, table=True)
        self.weight = self.declare("weight", spec)

    def forward(self, ids: Tensor) -> Tensor:
        rows = ids - self.mesh.index("tensor") * self.weight.shape[0]
        mine = (rows >= 0) & (rows < self.weight.shape[0])
        part = lookup(torch.where(mine, rows, 0), self, self.blocks.runs) * mine.unsqueeze(-1)
        return self.sequence.leave(part)  # [B, T, H]


class MegatronPatches(ShardedModule):
    """Every rank computes the patches that it holds."""

    def __init__(
        self, mesh: Mesh, inputs: int, hidden: int, initial: Initial, sequence: Sequence, blocks: Blocks = WHOLE
    ) -> None:
        super().__init__(mesh)
        self.sequence, self.blocks = sequence, blocks
        self.weight = self.declare("weight", ShardSpec((inputs, hidden), initial=initial))

    def forward(self, x: Tensor) -> Tensor:
        return linear(self.sequence.part(x), self.weight, None, self, self.blocks)


class MegatronScores(SerialLinear):
    """Every rank has all tokens' scores: where the sequence is cut, each puts its own among zeros, and they are summed.
    The gradient of the sum is whole on every rank, which takes its own part of it."""

    def __init__(
        self, mesh: Mesh, hidden: int, outputs: int, initial: Initial, sequence: Sequence, blocks: Blocks = WHOLE
    ) -> None:
        super().__init__(mesh, hidden, (outputs,), initial, bias=False, blocks=blocks)
        self.sequence = sequence

    def forward(self, h: Tensor) -> Tensor:
        own = super().forward(h)
        if not self.sequence.split_axes:
            return own
        size, index, count = self.mesh.size("tensor"), self.mesh.index("tensor"), own.shape[1]
        return all_reduce(F.pad(own, (0, 0, index * count, (size - 1 - index) * count)), self.mesh, "tensor")


class MegatronHead(TableHead):
    """Classes over the tensor axis."""

    def __init__(
        self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, sequence: Sequence, blocks: Blocks = WHOLE
    ) -> None:
        super().__init__(mesh, shape, tied, {"tensor": Shard(0)}, {"tensor": Shard(0)})
        self.sequence, self.blocks = sequence, blocks

    def operands(self, h: Tensor) -> tuple[Tensor, Tensor]:
        return self.sequence.enter(h), self.block


class MegatronKit:
    """1-D tensor parallelism over the `tensor` axis. `blocks`: what a rank multiplies at a time, and in which order
    sums over parts are made."""

    def __init__(self, mesh: Mesh, *, sequence_parallel: bool, blocks: Blocks = WHOLE) -> None:
        self.mesh, self.blocks = mesh, blocks
        form = CutSequence if sequence_parallel else WholeSequence
        self.sequence: Sequence = form(mesh, by_tree=blocks.exact)
        self.split_axes = self.sequence.split_axes
        self.parts = blocks.parts

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        return MegatronEmbedding(self.mesh, num_rows, hidden, initial, self.sequence, self.blocks)

    @property
    def branches(self) -> LinearPair:
        return self

    def norm(self, hidden: int, epsilon: float, *, bias: bool = True) -> nn.Module:
        return SerialNorm(self.mesh, hidden, epsilon, bias=bias, blocks=self.blocks)

    def rms_norm(self, hidden: int, epsilon: float) -> nn.Module:
        return RmsNorm(self.mesh, hidden, epsilon, blocks=self.blocks)

    def group_norm(self, channels: int, groups: int, epsilon: float) -> nn.Module:
        return GroupNorm(self.mesh, channels, groups, epsilon, {})

    def head_norm(self, width: int, epsilon: float) -> nn.Module:
        return RmsNorm(self.mesh, width, epsilon, ("tensor",), self.blocks)

    def local_group_norm(self, channels: int, groups: int, epsilon: float) -> nn.Module:
        return GroupNorm(self.mesh, channels, groups, epsilon, {"tensor": Shard(0)})

    def local(self, shape: tuple[int, ...], dim: int, initial: Initial, *, matrix: bool) -> nn.Module:
        return Local(self.mesh, ShardSpec(shape, {"tensor": Shard(dim)}, initial, matrix=matrix))

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True) -> nn.Module:
        outputs = (inner,) if groups == 1 else (groups, inner // groups)
        columns = part_columns(groups, outputs[-1] // self.mesh.size("tensor"), self.blocks.parts)
        return CutExpand(
            self.mesh, hidden, outputs, initial, self.sequence, bias=bias, columns=columns, groups=groups,
            blocks=self.blocks,
        )  # fmt: skip

    def shared_heads(self, hidden: int, groups: HeadGroups, initial: Initial, *, bias: bool) -> nn.Module:
        ranks, rank, parts = self.mesh.size("tensor"), self.mesh.index("tensor"), self.blocks.parts
        columns = [groups.shared_by(ranks, rank, parts, part) for part in range(parts)]
        width = (groups.columns,)
        return CutExpand(
            self.mesh, hidden, width, initial, self.sequence, bias=bias, columns=columns, blocks=self.blocks
        )

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        spec = ShardSpec((hidden,), matrix=False) if bias else None
        return CutContract(self.mesh, inner, hidden, initial, self.sequence, bias=spec, blocks=self.blocks)

    def transform(self, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return SerialLinear(self.mesh, inputs, (outputs,), initial, bias=bias, blocks=self.blocks)

    def patches(self, inputs: int, hidden: int, initial: Initial) -> nn.Module:
        return MegatronPatches(self.mesh, inputs, hidden, initial, self.sequence, self.blocks)

    def scores(self, hidden: int, outputs: int, initial: Initial) -> nn.Module:
        return MegatronScores(self.mesh, hidden, outputs, initial, self.sequence, self.blocks)

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        head = PartHead if self.blocks.exact else MegatronHead
        return head(self.mesh, shape, tied, self.sequence, self.blocks)

    def experts(self, shape: ExpertsShape) -> nn.Module:
        return Experts(self.mesh, shape, self.sequence)

    def local_heads(self, heads: int) -> int:
        return heads // self.mesh.size("tensor") if heads >= self.blocks.all_parts else 0

    def slice_batch(self, x: Tensor) -> Tensor:
        return x

    def slice_inside(self, x: Tensor) -> Tensor:
        return x

    def slice_hidden(self, x: Tensor) -> Tensor:
        return self.sequence.part(x)

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        if rate == 0 or self.split_axes or self.blocks.exact:  # blocks have masks of their own
            return nullcontext()
        return own_stream(f"{common_draw()}/{self.mesh.index('tensor')}", self.mesh.device)

    def end_step(self) -> None:
        return None
