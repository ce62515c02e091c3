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
    """The sum of every rank's x, in place."""
    return Moving(comm.all_reduce(x, wait=False), lambda: x)


def start_all_gather(x: Tensor, comm: Comm, dim: int) -> Moving:
    """Every rank's x side by side along `dim`."""
    dim %= x.dim()
    # A gather fills [n, ...]; the parts are placed side by side after the wait, when the result is asked for.
    panels = x.new_empty(comm.size, *x.shape)
    work = comm.all_gather(panels, x.contiguous(), wait=False)
    return Moving(work, lambda: panels.movedim(0, dim).flatten(dim, dim + 1))


def start_reduce_scatter(x: Tensor, comm: Comm, dim: int) -> Moving:
    """This rank's part along `dim` of the sum of every rank's x."""
    panels = x.unflatten(dim, (comm.size, -1)).movedim(dim % x.dim(), 0).contiguous()
    part = torch.empty_like(panels[0])
    return Moving(comm.reduce_scatter(part, panels, wait=False), lambda: part)


def start_all_to_all(x: Tensor, comm: Comm, gather_dim: int, scatter_dim: int) -> Moving:
    """Every rank's x side by side along `gather_dim`, of which this rank gets its part along `scatter_dim`."""
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
"""The function that crosses ranks, and as compilers see it."""


def hide_from_compilers(hidden: Callable[[Any], Any]) -> None:
    """Let compilers run collectives as they are, from now on.

    Args:
        hidden: hidden(function) returns the function for use in what is compiled.
    """
    if len(_crosses) == 1:
        _crosses.append(hidden(_crosses[0]))


def cross(x: Tensor, there: Start, back: Start) -> Tensor:
    """Apply the collective `there` to x; backward applies its adjoint, `back`, to the gradient."""
    return _crosses[-1](x, there, back)


def gather(x: Tensor, mesh: Mesh, axis: str, root: int = 0) -> Tensor:
    """The root's rows [n·B, ...], every rank's x [B, ...] in order; elsewhere [0, ...]. Backward: scatter."""
    comm, shape = mesh.comm(axis), x.shape

    def to_root(x: Tensor) -> Moving:
        # Other ranks go on with no rows, whose gradient is empty as well.
        whole = x.new_empty(shape[0] * comm.size if comm.index == root else 0, *shape[1:])
        return Moving(comm.gather(whole, x.contiguous(), root), lambda: whole)

    def from_root(gradient: Tensor) -> Moving:
        part = gradient.new_empty(shape)
        return Moving(comm.scatter(part, gradient.contiguous(), root), lambda: part)

    return cross(x, to_root, from_root)


def all_reduce_gradient(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """x itself, for ranks that each compute a different part from it. Backward: all-reduce."""
    comm = mesh.comm(axis)
    # A view: a Function that returns its input itself is no node of the graph.
    return cross(x, lambda x: here(x.view_as(x)), lambda gradient: start_all_reduce(gradient.contiguous(), comm))


def all_reduce(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """The sum of every rank's x. Backward: identity, as all ranks go on with the same."""
    comm = mesh.comm(axis)
    # The sum is in place; the operation that produced x may need x in its backward pass.
    return cross(x, lambda x: start_all_reduce(x.clone(), comm), here)


def all_gather(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Every rank's x side by side along `dim`. Backward: reduce-scatter."""
    where = mesh.comm(axis), dim
    return cross(x, lambda x: start_all_gather(x, *where), lambda gradient: start_reduce_scatter(gradient, *where))


def reduce_scatter(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of every rank's x. Backward: all-gather."""
    where = mesh.comm(axis), dim
    return cross(x, lambda x: start_reduce_scatter(x, *where), lambda gradient: start_all_gather(gradient, *where))


def all_to_all(x: Tensor, mesh: Mesh, axis: str, gather_dim: int, scatter_dim: int) -> Tensor:
    """Every rank's x side by side along `gather_dim`, of which this rank gets its part along `scatter_dim`. Backward:
    all-to-all, the dims exchanged."""
    comm = mesh.comm(axis)
    return cross(
        x,
        lambda x: start_all_to_all(x, comm, gather_dim, scatter_dim),
        lambda gradient: start_all_to_all(gradient, comm, scatter_dim, gather_dim),
    )


def trade_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    """Rows [sum(received), ...] from all ranks, in rank order. The first sent[0] rows of x [sum(sent), ...] go to rank
    0, the next sent[1] to rank 1, and so on. Backward: the reverse all-to-all."""
    comm = mesh.comm(axis)

    def trade(x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Moving:
        out, width = x.new_empty(sum(received), *x.shape[1:]), math.prod(x.shape[1:])
        # Comms count elements, and know nothing of rows.
        by_rank = (tuple(count * width for count in counts) for counts in (received, sent))
        return Moving(comm.all_to_all(out, x, pieces=PieceSizes(*by_rank)), lambda: out)

    return cross(x, lambda x: trade(x, sent, received), lambda gradient: trade(gradient.contiguous(), received, sent))
