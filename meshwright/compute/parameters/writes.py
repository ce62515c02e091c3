"""Gradients that are written later, whose form tells an accumulator a shorter way (`WriteGradient`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowGradient:
    """A `WriteGradient` of a table [V, H]: 0, but for rows that are added at `ids`."""

    ids: Tensor
    """[...], with repeats."""
    rows: Tensor
    """[..., H]"""
    device_type: str
    """The device of the table."""

    def __call__(self, out: Tensor, beta: int) -> None:
        """Compute out = beta · out, then out[ids] += rows, in a fixed order, so that the bits are reproducible.

        On GPUs `index_put_` sorts the ids and is deterministic, and `index_add_` adds atomically. On CPUs `index_add_`
        adds id by id and is deterministic, and `index_put_` adds atomically from several threads.
        """
        if not beta:
            out.zero_()
        ids, rows = self.ids.flatten(), self.rows.flatten(0, -2).to(out.dtype)
        if self.device_type == "cuda":
            out.index_put_((ids,), rows, accumulate=True)
        else:
            out.index_add_(0, ids, rows)

    def distinct(self) -> tuple[Tensor, Tensor]:
        """Return each id once, [U], and the gradients [U, H] of these rows, float32."""
        ids, index = self.ids.unique(return_inverse=True)
        sums = self.rows.new_empty(len(ids), self.rows.shape[-1], dtype=torch.float32)
        RowGradient(index, self.rows, self.device_type)(sums, 0)
        return ids, sums


@dataclass(frozen=True)
class ScaledGradient:
    """A `WriteGradient` of a computed gradient, times a scalar."""

    gradient: Tensor
    factor: Tensor
    """[]"""

    def __call__(self, out: Tensor, beta: int) -> None:
        """Compute out = beta · out + factor · gradient."""
        if beta:
            out.addcmul_(self.gradient, self.factor)
        else:
            torch.mul(self.gradient, self.factor, out=out)

    def in_place(self) -> Tensor:
        """Return factor · gradient in the memory of `gradient`."""
        if self.factor.device.type == "cpu" and float(self.factor) == 1:
            return self.gradient
        return self.gradient.mul_(self.factor)
