"""The collectives of a segment: splits and joins between common layers and branches (SUPER, IPDPS 2021, section IV).

A segment: the g ranks of one axis, `branch` in a run's grid, one rank of each sub-grid. Inside of branches each rank
has all B rows of the replica's batch. Outside of branches either each rank has B/g rows and all compute the common
layers (D&SP), or the first rank has all rows and computes the common layers alone (D&SP-cSub).

| step   | result                                           | D&SP           | D&SP-cSub | backward |
|--------|--------------------------------------------------|----------------|-----------|----------|
| enter  | all rows, on each rank                           | all-gather     | broadcast | leave    |
| leave  | the sum over ranks, each row on one rank         | reduce-scatter | reduce    | enter    |
| slice  | a rank's part of a dim, of all rows              | all-to-all     | scatter   | concat   |
| concat | all parts of a dim, each row on one rank         | all-to-all     | gather    | slice    |
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
    """A boundary with slices.

    Attributes:
        owner: Axis and index of the rank with the common layers; None: all ranks.
        holds: Whether this rank has rows outside of branches.
    """

    # As in the paper, the gathered input of a pair is kept for the backward pass: g times the activation's memory, a
    # third of the sent bytes.
    keeps = True

    def __init__(
        self, mesh: Mesh, axis: str = "branch", *, num_rows: int | None = None, in_order: bool = False
    ) -> None:
        """Make the segment of a rank.

        Args:
            mesh: The rank's mesh.
            axis: The segment's axis.
            num_rows: B, if the first rank computes the common layers alone (batches of other ranks have no rows); None
                if all ranks compute the common layers.
            in_order: Whether sums have the order of a balanced tree (ranks/trees.py).
        """
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
        # On a rank without rows x gives dims and dtype of the result, num_rows the number of rows.
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
        """Start to get this rank's part along `dim`, of all rows: [b, ..., N] -> [B, ..., N/g]."""
        comm = self.mesh.comm(self.axis)
        if self.num_rows is None:
            return start_all_to_all(x, comm, ROWS, dim)
        panels = x.unflatten(dim, (comm.size, -1)).movedim(dim % x.dim(), 0).contiguous()  # [g, B or 0, ..., N/g]
        panel = x.new_empty(self.num_rows, *panels.shape[2:])
        return Moving(comm.scatter(panel, panels, 0, wait=False), lambda: panel)

    def start_concat(self, x: Tensor, dim: int) -> Moving:
        """Start to concatenate all ranks' x along `dim`, each row on its holder: [B, ..., N/g] -> [b, ..., N]."""
        comm = self.mesh.comm(self.axis)
        if self.num_rows is None:
            return start_all_to_all(x, comm, dim, ROWS)
        at, x = dim % x.dim(), x.contiguous()
        panels = x.new_empty(comm.size, *self.rows(x).shape)
        work = comm.gather(panels, x, 0, wait=False)
        # After the wait, which fills the panels.
        return Moving(work, lambda: panels.movedim(0, at).flatten(at, at + 1))

    def rows(self, x: Tensor) -> Tensor:
        """Return this rank's rows."""
        if self.num_rows is None:
            return x.chunk(self.mesh.size(self.axis))[self.mesh.index(self.axis)]
        return x if self.holds else x[:0]

    def enter(self, x: Tensor) -> Tensor:
        return cross(x, self.start_enter, self._start_sum)

    def leave(self, x: Tensor) -> Tensor:
        return cross(x, self._start_sum, self.start_enter)

    def slice(self, x: Tensor, dim: int) -> Tensor:
        """Run `start_slice` to its end, differentiably."""
        return cross(x, partial(self.start_slice, dim=dim), partial(self.start_concat, dim=dim))

    def concat(self, x: Tensor, dim: int) -> Tensor:
        return cross(x, partial(self.start_concat, dim=dim), partial(self.start_slice, dim=dim))

    def _start_sum(self, x: Tensor) -> Moving:
        """Start to sum a copy of x."""
        # A reduction writes into its operand, which autograd may pass to other functions.
        return self.start_leave(x.clone(memory_format=torch.contiguous_format))
