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
all-gather on one side and a reduce-scatter on the other (boundary.py).
A transform is computed whole by every rank for the rank's tokens, as in Megatron-LM's BERT: 1 / (12 L) of the work.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from meshwright.compute.parameters.role import BIAS
from meshwright.compute.parameters.shard import Initial, Shard, ShardSpec, own_stream
from meshwright.compute.tensor.arithmetic import AT_ONCE, Arithmetic
from meshwright.compute.tensor.boundary import SEQUENCE, CutActivations, WholeActivations
from meshwright.compute.tensor.copies import HeadGroups
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.pair import CutContract, CutExpand
from meshwright.compute.tensor.serial import Embedding, SerialKit, grouped
from meshwright.ranks.mesh import Mesh


class MegatronKit(SerialKit):
    """1-D tensor parallelism over the `tensor` axis; layers that the axis does not shard are as on one device."""

    def __init__(
        self, mesh: Mesh, *, sequence_parallel: bool = False, arithmetic: Arithmetic = AT_ONCE
    ) -> None:  # fmt: skip
        boundary = (
            CutActivations(mesh, "tensor", SEQUENCE, in_order=arithmetic.in_order)
            if sequence_parallel
            else WholeActivations(mesh, "tensor", in_order=arithmetic.in_order)
        )
        super().__init__(mesh, boundary, arithmetic)

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        addends = self.arithmetic.lookup(inside=True)
        return Embedding(
            self.mesh, num_rows, hidden, initial, {"tensor": Shard(0)}, after=self.boundary.leave, addends=addends
        )

    def expand(
        self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
        heads: HeadGroups | None = None,
    ) -> nn.Module:  # fmt: skip
        outputs = grouped(inner, groups)
        ranks, rank = self.mesh.size("tensor"), self.mesh.index("tensor")
        products, copies = self.arithmetic.expand(outputs, heads, ranks, rank)
        return CutExpand(
            self.mesh, hidden, outputs, initial, self.boundary, bias=bias, products=products, copies=copies
        )  # fmt: skip

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        spec, products = ShardSpec((hidden,), role=BIAS) if bias else None, self.arithmetic.contract(hidden)
        return CutContract(self.mesh, inner, hidden, initial, self.boundary, bias=spec, products=products)

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        return self.arithmetic.head(self.mesh, shape, tied, self.boundary, TableHead)

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        if rate == 0 or self.split_axes or self.arithmetic.draws_masks:
            return nullcontext()
        drawn = int(torch.randint(2**62, ()))  # equal on all ranks of a replica
        return own_stream(f"{drawn}/{self.mesh.index('tensor')}", self.mesh.device)
