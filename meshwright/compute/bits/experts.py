"""Experts with products of shapes and addresses that do not depend on the layout.

The rows of each sending rank are a separate product, as on a rank that has all experts. Operands are aligned as if
allocated separately: some libraries choose kernels by address, and the address of a part depends on the preceding
parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import torch
from torch import Tensor

from meshwright.compute.tensor.experts import Experts, GroupedLinear, Runs, Trade
from meshwright.compute.tensor.products import write_part

ALIGNED_BYTES = 64
"""Bytes of a cache line and of the widest vector; torch aligns allocations to this size."""


class AlignedLinear(GroupedLinear):
    """A linear of experts with aligned operands."""

    def operand(self, x: Tensor) -> Tensor:
        return x.clone() if not x.is_contiguous() or x.data_ptr() % ALIGNED_BYTES else x

    def write_run(self, rows: Sequence[int], x: Tensor, dy: Tensor, out: Tensor, beta: int) -> None:
        for part, gradient, own in zip(x.split(rows), dy.split(rows), out, strict=True):
            write_part(self.products.multiply(self.operand(part).t(), self.operand(gradient)), own, beta)


class SeparateExperts(Experts):
    """Experts that compute the rows of each sending rank separately."""

    linear: ClassVar[type[GroupedLinear]] = AlignedLinear

    def grouped(self, x: Tensor) -> bool:
        return False  # a grouped kernel chooses tile shapes by the number of rows of all experts

    def outputs(self, x: Tensor, runs: Runs) -> Tensor:
        # Each part is a separate tensor, so that vectors begin at its first row: elements of an incomplete last vector
        # may be rounded differently.
        assert not isinstance(runs, Tensor), "rows that the host does not know"
        parts = [self.shape.activated(part.clone()) for part in self.expand(x, runs).split([*chain(*runs)])]
        y: Tensor = self.contract(torch.cat(parts), runs)
        return y

    def outputs_here(self, x: Tensor, trade: Trade) -> Tensor:
        return self.outputs(x, trade.coming.tolist())
