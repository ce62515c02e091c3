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
    """A tensor under way: `wait` gives it."""

    work: Work
    result: Callable[[], Tensor]

    def wait(self) -> Tensor:
        self.work.wait()
        return self.result()


def here(x: Tensor) -> Moving:
    """A tensor that has arrived."""
    return Moving(DONE, lambda: x)


def start_all_reduce(x: Tensor, comm: Comm) -> Moving:
    """The sum of every rank's x, in place."""
    return Moving(comm.all_reduce(x, wait=False), lambda: x)


def start_all_gather(x: Tensor, comm: Comm, dim: int) -> Moving:
    """Every rank's x side by side along `dim`."""
    dim %= x.dim()
    # A gather fills [n, ...] whole; the parts come to stand side by side when the result is asked for, after the wait.
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


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axis: str, root: int) -> Tensor:
        comm = mesh.comm(axis)
        ctx.comm, ctx.root, ctx.shape = comm, root, x.shape
        # Other ranks go on with no rows, whose gradient is empty as well.
        rows = x.shape[0] * comm.size if comm.index == root else 0
        whole = x.new_empty(rows, *x.shape[1:])
        comm.gather(whole, x.contiguous(), root)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        part = gradient.new_empty(ctx.shape)
        ctx.comm.scatter(part, gradient.contiguous(), ctx.root)
        return part, None, None, None


class _AllReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm = comm
        # A view: a Function that returns its input itself is no node of the graph.
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return start_all_reduce(gradient.contiguous(), ctx.comm).wait(), None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        # The sum is in place, and what gave x may need it in its backward pass.
        return start_all_reduce(x.clone(), comm).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return start_all_gather(x, comm, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return start_reduce_scatter(gradient, ctx.comm, ctx.dim).wait(), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, dim: int) -> Tensor:
        ctx.comm, ctx.dim = comm, dim
        return start_reduce_scatter(x, comm, dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return start_all_gather(gradient, ctx.comm, ctx.dim).wait(), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm, gather_dim: int, scatter_dim: int) -> Tensor:
        ctx.comm, ctx.dims = comm, (scatter_dim, gather_dim)
        return start_all_to_all(x, comm, gather_dim, scatter_dim).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return start_all_to_all(gradient, ctx.comm, *ctx.dims).wait(), None, None, None


class _TradeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], comm: Comm) -> Tensor:
        ctx.comm, ctx.counts = comm, (sent, received)
        return _traded(x, sent, received, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        sent, received = ctx.counts
        return _traded(gradient.contiguous(), received, sent, ctx.comm), None, None, None


def _traded(x: Tensor, sent: Sequence[int], received: Sequence[int], comm: Comm) -> Tensor:
    out, width = x.new_empty(sum(received), *x.shape[1:]), math.prod(x.shape[1:])
    # Comms count elements, and know nothing of rows.
    by_rank = (tuple(count * width for count in counts) for counts in (received, sent))
    comm.all_to_all(out, x, pieces=PieceSizes(*by_rank))
    return out


def gather(x: Tensor, mesh: Mesh, axis: str, root: int = 0) -> Tensor:
    """The root's rows [n·B, ...], every rank's x [B, ...] in order; elsewhere [0, ...]. Backward: scatter."""
    result: Tensor = _Gather.apply(x, mesh, axis, root)
    return result


def all_reduce_gradient(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """x, of which every rank of the axis will use its own part of what follows. Backward: all-reduce."""
    result: Tensor = _AllReduceGradient.apply(x, mesh.comm(axis))
    return result


def all_reduce(x: Tensor, mesh: Mesh, axis: str) -> Tensor:
    """The sum of every rank's x. Backward: identity, as all ranks go on with the same."""
    result: Tensor = _AllReduce.apply(x, mesh.comm(axis))
    return result


def all_gather(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """Every rank's x side by side along `dim`. Backward: reduce-scatter."""
    result: Tensor = _AllGather.apply(x, mesh.comm(axis), dim)
    return result


def reduce_scatter(x: Tensor, mesh: Mesh, axis: str, dim: int) -> Tensor:
    """This rank's part along `dim` of the sum of every rank's x. Backward: all-gather."""
    result: Tensor = _ReduceScatter.apply(x, mesh.comm(axis), dim)
    return result


def trade_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], mesh: Mesh, axis: str) -> Tensor:
    """The rows [sum(received), ...] that every rank has for this one, in their order; of x [sum(sent), ...] the first
    sent[0] rows go to the first rank, and so on. Backward: all-to-all, back."""
    result: Tensor = _TradeRows.apply(x, sent, received, mesh.comm(axis))
    return result


def all_to_all(x: Tensor, mesh: Mesh, axis: str, gather_dim: int, scatter_dim: int) -> Tensor:
    """Every rank's x side by side along `gather_dim`, of which this rank gets its part along `scatter_dim`. Backward:
    all-to-all, the dims exchanged."""
    result: Tensor = _AllToAll.apply(x, mesh.comm(axis), gather_dim, scatter_dim)
    return result
