"""Collectives on tensors: parts gathered and sums scattered along a dim, under other work; and differentiable verbs.

A differentiable verb is always `verb(x, mesh, "axis")`, and its backward is the mirror verb.

| verb                | forward                    | backward       |
|---------------------|----------------------------|----------------|
| gather              | rows of all ranks to root  | scatter        |
| all_reduce_gradient | identity                   | all-reduce     |
| all_reduce          | all-reduce                 | identity       |
| all_gather          | all-gather along a dim     | reduce-scatter |
| reduce_scatter      | reduce-scatter along a dim | all-gather     |
| all_to_all          | all-to-all between dims    | all-to-all     |
| trade_rows          | all-to-all of rows         | the way back   |

(all_reduce_gradient and all_reduce are Megatron-LM's f and g, arXiv 1909.08053, figure 3.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.ranks.comm import DONE, Comm, PieceSizes, Work

if TYPE_CHECKING:
    from meshwright.ranks.mesh import Mesh


@dataclass(frozen=True)
class Moving:
    """A tensor still in a collective; `wait` returns the tensor."""

    work: Work
    result: Callable[[], Tensor]

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result()


Start = Callable[[Tensor], Moving]
"""Begins a collective of a tensor."""


def here(x: Tensor) -> Moving:
    """A `Moving` whose collective is already done."""
    return Moving(DONE, lambda: x)


def start_all_reduce(x: Tensor, comm: Comm) -> Moving:
    """Begin to sum every rank's x, in place."""
    return Moving(comm.all_reduce(x, wait=False), lambda: x)


def start_all_gather(x: Tensor, comm: Comm, dim: int) -> Moving:
    """Begin to concatenate every rank's x along `dim`."""
    dim %= x.dim()
    # An all-gather fills [n, ...]; the parts are concatenated after the wait.
    panels = x.new_empty(comm.size, *x.shape)
    work = comm.all_gather(panels, x.contiguous(), wait=False)
    return Moving(work, lambda: panels.movedim(0, dim).flatten(dim, dim + 1))


def start_reduce_scatter(x: Tensor, comm: Comm, dim: int) -> Moving:
    """Begin to sum every rank's x; each rank gets a part of the sum along `dim`."""
    panels = x.unflatten(dim, (comm.size, -1)).movedim(dim % x.dim(), 0).contiguous()
    shard = torch.empty_like(panels[0])
    return Moving(comm.reduce_scatter(shard, panels, wait=False), lambda: shard)


def start_all_to_all(x: Tensor, comm: Comm, gather_dim: int, scatter_dim: int) -> Moving:
    """Begin to split every rank's x along `scatter_dim`, and to concatenate this rank's parts along `gather_dim`."""
    gather_dim %= x.dim()
    panels = x.unflatten(scatter_dim, (comm.size, -1)).movedim(scatter_dim % x.dim(), 0).contiguous()
    received = torch.empty_like(panels)
    work = comm.all_to_all(received, panels, wait=False)
    return Moving(work, lambda: received.movedim(0, gather_dim).flatten(gather_dim, gather_dim + 1))


class _Cross(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Start, back: Start) -> Tensor:
        ctx.back = back
        return there(x).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient).wait(), None, None


_crosses: list[Callable[[Tensor, Start, Start], Tensor]] = [_Cross.apply]
"""The autograd function that crosses ranks; after `hide_from_compilers` also the form for compiled code."""


def hide_from_compilers(hidden: Callable[[Any], Any]) -> None:
    """Make compilers call collectives as opaque functions, from now on.

    Args:
        hidden: hidden(function) returns the function for use in compiled code.
    """
    if len(_crosses) == 1:
        _crosses.append(hidden(_crosses[0]))


def cross(x: Tensor, there: Start, back: Start) -> Tensor:
    """Apply the collective `there` to x; backward applies its adjoint, `back`, to the gradient."""
    return _crosses[-1](x, there, back)


def gather(x: Tensor, mesh: Mesh, axis: str, root: int = 0) -> Tensor:
    """Gather every rank's x [B, ...] in order: [n·B, ...] on the root, [0, ...] on other ranks. Backward: scatter."""
    comm, shape = mesh.comm(axis), x.shape

    def to_root(x: Tensor) -> Moving:
        # Other ranks continue with no rows, and an empty gradient.
        whole = x.new_empty(shape[0] * comm.size if comm.index == root else 0, *shape[1:])
        return Moving(comm.gather(whole, x.contiguous(), root), lambda: whole)

    def from_root(gradient: Tensor) -> Moving:
        shard = gradient.new_empty(shape)
        return Moving(comm.scatter(shard, gradient.contiguous(), root), lambda: shard)

    return cross(x, to_root, from_root)


def all_reduce_gradient(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Return x, for ranks that each compute a different part from x. Backward: all-reduce."""
    comm = mesh.comm(axis)
    # A view, since a Function that returns the input itself adds no node to the graph.
    return cross(x, lambda x: here(x.view_as(x)), lambda gradient: start_all_reduce(gradient.contiguous(), comm))


def all_reduce(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """Sum every rank's x. Backward: identity, since all ranks continue with equal values."""
    comm = mesh.comm(axis)
    # The sum is in place; the operation that produced x may need x in its backward pass.
    return cross(x, lambda x: start_all_reduce(x.clone(), comm), here)


def all_gather(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Concatenate every rank's x along `dim`. Backward: reduce-scatter."""
    where = mesh.comm(axis), dim
    return cross(x, lambda x: start_all_gather(x, *where), lambda gradient: start_reduce_scatter(gradient, *where))


def reduce_scatter(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Sum every rank's x, and return this rank's part along `dim`. Backward: all-gather."""
    where = mesh.comm(axis), dim
    return cross(x, lambda x: start_reduce_scatter(x, *where), lambda gradient: start_all_gather(gradient, *where))


def all_to_all(x: Tensor, mesh: Mesh, axis: str, gather_dim: int, scatter_dim: int) -> Tensor:
    """Split every rank's x along `scatter_dim`, and concatenate this rank's parts along `gather_dim`.

    Backward: all-to-all, the dims exchanged.
    """
    comm = mesh.comm(axis)
    return cross(
        x,
        lambda x: start_all_to_all(x, comm, gather_dim, scatter_dim),
        lambda gradient: start_all_to_all(gradient, comm, scatter_dim, gather_dim),
    )


def trade_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    """Send the first sent[0] rows of x [sum(sent), ...] to rank 0, the next sent[1] rows to rank 1, and so on.

    Returns the rows [sum(received), ...] from all ranks, in rank order. Backward: the reverse all-to-all.
    """
    comm = mesh.comm(axis)

    def trade(x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Moving:
        out, width = x.new_empty(sum(received), *x.shape[1:]), math.prod(x.shape[1:])
        # Comms count elements, not rows.
        by_rank = (tuple(count * width for count in counts) for counts in (received, sent))
        return Moving(comm.all_to_all(out, x, pieces=PieceSizes(*by_rank)), lambda: out)

    return cross(x, lambda x: trade(x, sent, received), lambda gradient: trade(gradient.contiguous(), received, sent))
