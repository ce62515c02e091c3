"""The collectives of a segment: splits and joins between common layers and branches (SUPER, IPDPS 2021, section IV).

A segment is the ranks of one axis, `branch` in a run's grid; its g ranks are one of each sub-grid. Inside of branches
every rank sees all B rows of the replica's batch. Outside, a rank holds B/g of them, and all compute the common layers
(D&SP); or the first holds all of them and the others none, and it alone computes these layers (D&SP-cSub).

| step   | meaning                                         | all            | the first | backward |
|--------|-------------------------------------------------|----------------|-----------|----------|
| enter  | split: every rank gets all rows                 | all-gather     | broadcast | leave    |
| leave  | sum of the ranks' parts, rows where they belong | reduce-scatter | reduce    | enter    |
| slice  | every rank gets its part of a dim, of all rows  | all-to-all     | scatter   | concat   |
| concat | the parts side by side, rows where they belong  | all-to-all     | gather    | slice    |
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from meshwright.compute.tensor.boundary import Boundary
from meshwright.ranks.collectives import Moving, cross, start_all_gather, start_all_to_all, start_reduce_scatter
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.trees import start_tree_reduce, start_tree_reduce_scatter

ROWS = 0
"""The dim of B."""


class Segment(Boundary):
    """A boundary with slices. `owner`: where the common layers live; None: on all ranks."""

    # The gathered input of a pair is kept for the backward pass, as in the paper: g times the activation at that place,
    # for a third of the bytes.
    keeps = True

    def __init__(
        self, mesh: Mesh, axis: str = "branch", *, num_rows: int | None = None, in_order: bool = False
    ) -> None:
        """`num_rows`: B where the first rank alone computes the common layers, since the others cannot see it from the
        batches of no rows that they carry; None: all ranks do. `in_order`: sums have the order of a balanced tree
        (ranks/trees.py)."""
        self.mesh = mesh
        self.axis = axis
        self.num_rows, self.in_order = num_rows, in_order
        self.split_axes = (axis,)
        self.owner = None if num_rows is None else (axis, 0)
        self.holds = num_rows is None or mesh.index(axis) == 0

    def start_enter(self, x: Tensor) -> Moving:
        comm = self.mesh.comm(self.axis)
        if self.num_rows is None:
            return start_all_gather(x, comm, ROWS)
        # Who holds no rows sees dims and dtype of what comes from its own x, and the number of rows from num_rows.
        whole = x.contiguous() if self.holds else x.new_empty(self.num_rows, *x.shape[1:])
        return Moving(comm.broadcast(whole, 0, wait=False), lambda: whole)

    def start_leave(self, x: Tensor) -> Moving:
        comm = self.mesh.comm(self.axis)
        if self.num_rows is None:
            start_sum = start_tree_reduce_scatter if self.in_order else start_reduce_scatter
            return start_sum(x, comm, ROWS)
        total = start_tree_reduce(x, comm) if self.in_order else Moving(comm.reduce(x, 0, wait=False), lambda: x)
        return Moving(total.work, lambda: self.rows(total.result()))

    def start_slice(self, x: Tensor, dim: int) -> Moving:
        """This rank's part along `dim`, of all rows: [b, ..., N] -> [B, ..., N/g]."""
        comm = self.mesh.comm(self.axis)
        if self.num_rows is None:
            return start_all_to_all(x, comm, ROWS, dim)
        panels = x.unflatten(dim, (comm.size, -1)).movedim(dim % x.dim(), 0).contiguous()  # [g, B or 0, ..., N/g]
        part = x.new_empty(self.num_rows, *panels.shape[2:])
        return Moving(comm.scatter(part, panels, 0, wait=False), lambda: part)

    def start_concat(self, x: Tensor, dim: int) -> Moving:
        """Every rank's x side by side along `dim`, rows where they belong: [B, ..., N/g] -> [b, ..., N]."""
        comm = self.mesh.comm(self.axis)
        if self.num_rows is None:
            return start_all_to_all(x, comm, dim, ROWS)
        at, x = dim % x.dim(), x.contiguous()
        panels = x.new_empty(comm.size, *self.rows(x).shape)
        work = comm.gather(panels, x, 0, wait=False)
        # Behind the wait: before it the panels hold nothing.
        return Moving(work, lambda: panels.movedim(0, at).flatten(at, at + 1))

    def rows(self, x: Tensor) -> Tensor:
        """The rows that this rank holds."""
        if self.num_rows is None:
            return x.chunk(self.mesh.size(self.axis))[self.mesh.index(self.axis)]
        return x if self.holds else x[:0]

    def enter(self, x: Tensor) -> Tensor:
        return cross(x, self.start_enter, self._start_sum)

    def leave(self, x: Tensor) -> Tensor:
        return cross(x, self._start_sum, self.start_enter)

    def slice(self, x: Tensor, dim: int) -> Tensor:
        """start_slice, waited for and differentiable, as is `concat`."""
        return cross(x, partial(self.start_slice, dim=dim), partial(self.start_concat, dim=dim))

    def concat(self, x: Tensor, dim: int) -> Tensor:
        return cross(x, partial(self.start_concat, dim=dim), partial(self.start_slice, dim=dim))

    def _start_sum(self, x: Tensor) -> Moving:
        """start_leave on a copy of x, which keeps x."""
        # A reduction writes into its operand, and autograd may hand this very tensor to others.
        return self.start_leave(x.clone(memory_format=torch.contiguous_format))
