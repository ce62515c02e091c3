"""Experts: a feed-forward of n SwiGLUs, of which each token takes k (Mixtral, arXiv 2401.04088; Qwen3-MoE).

    p = softmax(x R)        y = Σ over the k likeliest experts e of  w_e · contract_e(swiglu(expand_e(x)))
                            w_e = p_e, or p_e over the sum of the k

| layer    | input        | weight                  | output          | forward sends | backward sends |
|----------|--------------|-------------------------|-----------------|---------------|----------------|
| router   | [B, T, H]    | [H, n]                  | [B, T, n]       | -             | -              |
| expand   | [R, H]       | [n, H, 2, N/tensor]     | [R, 2, N/tensor]| enter         | leave          |
| contract | [R, N/tensor]| [n, N/tensor, H]        | [R, H]          | leave         | enter          |

R = B T k rows: a token's row is there once for each expert that it takes, rows are sorted by expert, and an expert's
rows are one product. None is left out (dropless). `enter` and `leave` are a pair's (boundary.py), where the inner width
is cut; weights w_e enter as the rows do, since each rank has a part of every expert's output.

Over the expert axis (GShard, arXiv 2006.16668) ranks have different tokens and n/expert experts each, so a row travels
to the rank that holds its expert, and its output back: two all-to-alls of rows forward, two backward, as many rows as
the router gives each rank, of which an all-to-all of counts tells beforehand. An expert's gradient is then that of all
the group's tokens; the spec's cut says that it is summed over the other axes alone.

The balance of a sequence (Switch Transformer, arXiv 2101.03961, equation 4; Mixtral's has no 1/k):

    balance = n Σ_e f_e P_e        f_e: pairs of a token and one of its k experts that are e's, over the sequence's T
                                   P_e: the mean of its tokens' p_e

Statistics are one sequence's, so the value is the same however sequences are dealt to replicas and microbatches; where
ranks hold parts of a sequence, counts are summed over them (one all-reduce of [B, n], forward), and a rank's own
tokens give its part of the sum. A gradient goes through P alone: f counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.parameters.shard import Initial, Placements, Shard, ShardedModule, ShardSpec
from meshwright.ranks.collectives import all_reduce, start_all_reduce, trade_rows
from meshwright.ranks.grid import EXPERT
from meshwright.ranks.mesh import Mesh
from meshwright.tensor.boundary import Boundary
from meshwright.tensor.linear import cast, linear, write_product
from meshwright.tensor.swiglu import swiglu


@dataclass(frozen=True)
class ExpertsShape:
    """Experts as the model asks for them: `count` of width `inner`, `chosen` a token.

    `renormalises`: the chosen experts' weights add up to 1. `balances`: the balance is computed, too.
    """

    hidden: int
    inner: int
    count: int
    chosen: int
    renormalises: bool
    balances: bool
    initial: Initial
    last: Initial
    """The first values of the linear that ends in the residual stream."""


class _Grouped(torch.autograd.Function):
    """y = x W of an expert's rows, expert by expert."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, rows: Sequence[int], layer: ShardedModule) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.layer = rows, layer
        return torch.cat([part @ own for part, own in zip(x.split(rows), weight, strict=True)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors

        def write(out: Tensor, beta: int) -> None:
            for part, gradient, own in zip(x.split(ctx.rows), dy.split(ctx.rows), out, strict=True):
                write_product(own, part.t(), gradient, beta)

        dweight = ctx.layer.add_gradient("weight", weight, write)
        return (
            torch.cat([part @ own.t() for part, own in zip(dy.split(ctx.rows), weight, strict=True)]),
            dweight,
            None,
            None,
        )


class GroupedLinear(ShardedModule):
    """x W of the expert that each row is sorted to; W [n, in, ..., out]."""

    def __init__(self, mesh: Mesh, shape: tuple[int, ...], placements: Placements, initial: Initial) -> None:
        super().__init__(mesh)
        self.weight = self.declare("weight", ShardSpec(shape, placements, initial))

    def forward(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """x [R, in], of which each expert has so many rows; [R, ..., out]."""
        x, weight, _ = cast(x, self.weight.flatten(2), None)
        y: Tensor = _Grouped.apply(x, weight, rows, self)
        return y.unflatten(-1, self.weight.shape[2:])


class Router(ShardedModule):
    """Scores of experts, x R; R [H, n]."""

    def __init__(self, mesh: Mesh, hidden: int, count: int, initial: Initial) -> None:
        super().__init__(mesh)
        self.weight = self.declare("weight", ShardSpec((hidden, count), initial=initial))

    def forward(self, h: Tensor) -> Tensor:
        return linear(h, self.weight, None, self)


class _Sort(torch.autograd.Function):
    """Row `order[i] // copies` of x as row i: each row is there `copies` times. Backward, copies are added up in their
    order, so that the sum's bits are the same each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies if copies > 1 else order]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (inverse,) = ctx.saved_tensors
        dx = dy[inverse]
        return dx.unflatten(0, (-1, ctx.copies)).sum(1) if ctx.copies > 1 else dx, None, None, None


def sort_rows(x: Tensor, order: Tensor, inverse: Tensor, copies: int = 1) -> Tensor:
    """x [R/copies, H] -> [R, H]."""
    y: Tensor = _Sort.apply(x, order, inverse, copies)
    return y


class Experts(nn.Module):
    """The router and its experts. `boundary`: cuts their inner width, and how activations cross it; None: whole."""

    def __init__(self, mesh: Mesh, shape: ExpertsShape, boundary: Boundary | None = None) -> None:
        super().__init__()
        self.mesh, self.shape, self.boundary = mesh, shape, boundary
        self.router = Router(mesh, shape.hidden, shape.count, shape.initial)
        self.travels = EXPERT in mesh.grid.names and mesh.size(EXPERT) > 1

        def cuts(dim: int) -> Placements:
            whose = {EXPERT: Shard(0)} if self.travels else {}
            return whose | ({boundary.axis: Shard(dim)} if boundary else {})

        self.expand = GroupedLinear(mesh, (shape.count, shape.hidden, 2, shape.inner), cuts(3), shape.initial)
        self.contract = GroupedLinear(mesh, (shape.count, shape.inner, shape.hidden), cuts(1), shape.last)

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        """[B, T, H] -> ([B, T, H],), and where they are balanced each sequence's balance [B], or this rank's part of it
        where the context axis cuts sequences."""
        logits = self.router(h)
        shares = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        weights, ids = shares.topk(self.shape.chosen, -1)
        if self.shape.renormalises:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(h.dtype)
        balance = (self._balance(shares, ids),) if self.shape.balances else ()
        if self.boundary is None:
            return self._computed(h, weights, ids), *balance
        whole = self._computed(
            self.boundary.enter(h), self.boundary.enter(weights), self.boundary.start_enter(ids).wait()
        )
        return self.boundary.leave(whole), *balance

    def _computed(self, h: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The chosen experts' outputs [B, T, H], each times its weight; weights and ids [B, T, k]."""
        copies = self.shape.chosen
        order = ids.flatten().argsort(stable=True)
        inverse = order.argsort()
        rows = rows_of_experts(ids, self.shape.count)
        x = sort_rows(h.flatten(0, 1), order, inverse, copies)
        y = sort_rows((self._elsewhere if self.travels else self._outputs)(x, rows), inverse, order)
        return (y.view(*ids.shape, -1) * weights.unsqueeze(-1)).sum(2)

    def _outputs(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """The outputs of this rank's experts, each for so many rows of x [R, H], in order."""
        return self.contract(swiglu(self.expand(x, rows)), rows)

    def _elsewhere(self, x: Tensor, rows: Sequence[int]) -> Tensor:
        """The outputs of all experts for so many rows each, by the ranks that hold them."""
        size, here = self.mesh.size(EXPERT), self.shape.count // self.mesh.size(EXPERT)
        sent = torch.tensor(rows).view(size, here)
        if x.device.type == "meta":  # all ranks have as many rows
            coming = sent[self.mesh.index(EXPERT)].expand(size, here)
        else:
            coming = torch.empty_like(sent)
            self.mesh.comm(EXPERT).all_to_all(coming, sent)
        given, taken = sent.sum(1).tolist(), coming.sum(1).tolist()
        # Rows come by rank and in it by expert; an expert's are brought together.
        order = torch.arange(here).repeat(size).repeat_interleave(coming.flatten()).argsort(stable=True)
        order, inverse = order.to(x.device), order.argsort().to(x.device)
        own = sort_rows(trade_rows(x, given, taken, self.mesh, EXPERT), order, inverse)
        y = sort_rows(self._outputs(own, coming.sum(0).tolist()), inverse, order)
        return trade_rows(y, taken, given, self.mesh, EXPERT)

    def _balance(self, shares: Tensor, ids: Tensor) -> Tensor:
        """n Σ_e f_e P_e by sequence; shares [B, T, n], ids [B, T, k]."""
        inside = self.boundary.split_axes if self.boundary else ()
        cut = tuple(axis for axis in self.mesh.grid.names if axis in (*inside, "context"))
        tokens = shares.shape[1] * self.mesh.size(*cut)
        counts = shares.new_zeros(shares.shape[0], self.shape.count)
        counts.scatter_add_(1, ids.flatten(1), torch.ones_like(ids, dtype=counts.dtype).flatten(1))
        counts = start_all_reduce(counts, self.mesh.comm(*cut)).wait() if cut else counts
        balance = (counts.unsqueeze(1) * shares).sum((1, 2)) * (self.shape.count / tokens**2)
        for axis in inside:  # whose ranks go on with one loss
            balance = all_reduce(balance, self.mesh, axis)
        return balance


def rows_of_experts(ids: Tensor, count: int) -> list[int]:
    """How many rows each expert has. Of a plan, whose tensors have no values: as many as any other."""
    total = ids.numel()
    if ids.device.type == "meta":
        return [total * (index + 1) // count - total * index // count for index in range(count)]
    rows: list[int] = torch.bincount(ids.flatten(), minlength=count).tolist()
    return rows
