"""Experts with products of shapes and addresses that do not depend on the layout.

The rows of each sending rank are a separate product, as on a rank that has all experts. Operands are aligned as if
allocated separately: some libraries choose kernels by address, and the address of a part depends on the preceding
parts.

With cuts (`ExpertsByParts`; blocks.py) a row exists once for each of a rank's parts of the experts' inner width, and
the rows of each run of tokens are a separate product too:

| sum over                     | order                                                                             |
|------------------------------|-----------------------------------------------------------------------------------|
| parts of the inner width     | a tree in float32; a leaf of the ranks' tree                                       |
| the k experts of a token     | from the first choice to the last, for each part by itself                        |
| runs, senders                | none: each is an addend of the weights' gradients in fixed point (fixed.py)       |
| tokens, of a router's losses | none: each run's loss is rounded to a multiple of one power of two (fixed.py)     |

Rows are sorted by (rank of the expert, run, part, expert, sequence, token). Sent over the expert axis: the rows of the
usual mode, times the parts of a rank. With a capacity, pairs beyond the capacity have no rows; numbers of rows are sent
as without one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.compute.bits.blocks import Blocks, apart, widened
from meshwright.compute.bits.products import ExactProducts
from meshwright.compute.parameters.fixed import REST_DIGITS, SUMMED_LOSS, rounded_loss
from meshwright.compute.parameters.shard import Initial, WriteGradient
from meshwright.compute.tensor.boundary import Boundary
from meshwright.compute.tensor.experts import (
    CountDropped,
    Dispatch,
    Dispatched,
    Experts,
    GroupedLinear,
    Runs,
    Trade,
    gather_rows,
    rows_of_experts,
)
from meshwright.compute.tensor.products import Products, write_part
from meshwright.compute.tensor.router import ExpertsShape, Router
from meshwright.ranks.comm import Comm
from meshwright.ranks.grid import EXPERT
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.trees import tree_sum

ALIGNED_BYTES = 64
"""Bytes of a cache line and of the widest vector; torch aligns allocations to this size."""


class AlignedLinear(GroupedLinear):
    """A linear of experts with aligned operands."""

    def operand(self, x: Tensor) -> Tensor:
        return x.clone() if not x.is_contiguous() or x.data_ptr() % ALIGNED_BYTES else x

    def write_run(self, rows: Sequence[int], x: Tensor, dy: Tensor, out: Tensor, beta: int) -> None:
        for inputs, gradient, target in zip(x.split(rows), dy.split(rows), out, strict=True):
            a, b = self.operand(inputs).t(), self.operand(gradient)
            if beta or target.dtype != b.dtype or target.data_ptr() % ALIGNED_BYTES:
                write_part(self.products.multiply(a, b), target, beta)
            else:
                self.products.multiply(a, b, out=target)


class SeparateExperts(Experts):
    """Experts that compute the rows of each sending rank separately."""

    linear: ClassVar[type[GroupedLinear]] = AlignedLinear

    def grouped(self, x: Tensor) -> bool:
        return False  # a grouped kernel chooses tile shapes by the number of rows of all experts

    def outputs(self, x: Tensor, runs: Runs) -> Tensor:
        # Each part is a separate tensor, so that vectors begin at its first row: elements of an incomplete last vector
        # may be rounded differently.
        assert not isinstance(runs, Tensor), "rows that the host does not know"
        parts = [self.shape.activated(rows.clone()) for rows in self.expand(x, runs).split([*chain(*runs)])]
        y: Tensor = self.contract(torch.cat(parts), runs)
        return y

    def outputs_here(self, x: Tensor, trade: Trade) -> Tensor:
        return self.outputs(x, trade.coming.tolist())


class _Copies(torch.autograd.Function):
    """x [B, t, ...] enters a pair, once for each part: [P, B, T, ...]. The gradient is summed over parts by a tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary, parts: int) -> Tensor:
        ctx.boundary, ctx.dtype = boundary, x.dtype
        whole = boundary.start_enter(x).wait()
        return whole.unsqueeze(0).repeat(parts, *[1] * whole.dim())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _left(gradient, ctx.boundary, ctx.dtype), None, None


class _Rows(torch.autograd.Function):
    """x [B, t, H] enters a pair, and is gathered by rows: [R, H]. The gradient is summed over a token's experts, then
    over parts by a tree."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, slots: Tensor, boundary: Boundary) -> Tensor:
        """Gather rows. `index` [R]: the token of each row; `slots` [P, B, T, k]: the rows of each token."""
        ctx.save_for_backward(slots)
        ctx.boundary, ctx.dtype = boundary, x.dtype
        return boundary.start_enter(x).wait().flatten(0, 1)[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (slots,) = ctx.saved_tensors
        if len(gradient) < slots.numel():
            gradient = F.pad(gradient, (0, 0, 0, 1))  # the slot of pairs beyond a capacity
        first, *others = (widened(gradient[rows]) for rows in slots.unbind(-1))
        for addend in others:
            first += addend
        return _left(first, ctx.boundary, ctx.dtype), None, None, None


class _Left(torch.autograd.Function):
    """x [P, B, T, H], summed over parts by a tree, leaves a pair: [B, t, H]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, boundary: Boundary) -> Tensor:
        ctx.boundary, ctx.parts = boundary, len(x)
        return _left(x, boundary, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        whole = ctx.boundary.start_enter(gradient.contiguous()).wait()
        return whole.unsqueeze(0).expand(ctx.parts, *whole.shape), None


def _left(x: Tensor, boundary: Boundary, dtype: torch.dtype) -> Tensor:
    """Sum x [P, B, T, ...] over all ranks' parts by a tree, widened, and return this rank's tokens in `dtype`."""
    total = tree_sum(addend.to(torch.promote_types(x.dtype, torch.float32), copy=True) for addend in x)
    return boundary.start_leave(total).wait().to(dtype)


class _SumOfRuns(torch.autograd.Function):
    """The sum of losses [B, t] over the tokens of all ranks of `comm`, [B], by runs that are each rounded. Ranks that
    do not count the sum return zeros."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, blocks: Blocks, comm: Comm, counts: bool) -> Tensor:
        ctx.shape = losses.shape
        sums = torch.zeros(2, len(losses), dtype=torch.float64, device=losses.device)
        for run in blocks.cut(losses):
            rounded = rounded_loss(of_run := apart(run).sum(1), SUMMED_LOSS)
            sums[0] += rounded
            if losses.dtype == torch.float64:
                sums[1] += rounded_loss(of_run - rounded, SUMMED_LOSS * 2.0**-REST_DIGITS)
        comm.all_reduce(sums)
        total = sums.sum(0)
        return (total if counts else torch.zeros_like(total)).to(losses.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.unsqueeze(1).expand(ctx.shape), None, None, None


class RouterByRuns(Router):
    """A router that scores the tokens of each run separately."""

    products: ExactProducts

    @property
    def blocks(self) -> Blocks:
        """The blocks between pairs."""
        return self.products.blocks

    def chosen(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        runs = [super(RouterByRuns, self).chosen(apart(run)) for run in self.blocks.cut(logits)]
        wide, scores, weights, ids = (torch.cat(parts, 1) for parts in zip(*runs, strict=True))
        return wide, scores, weights, ids

    def summed(self, logits: Tensor, scores: Tensor, counts: Tensor, tokens: int) -> Tensor:
        runs = zip(self.blocks.cut(logits), self.blocks.cut(scores), strict=True)
        losses = torch.cat([self.loss_of(apart(wide), apart(score), counts, tokens) for wide, score in runs], 1)
        # Each rank of the context axis returns a part of the loss, and the first one the whole.
        counts_here = "context" not in self.mesh.grid.names or self.mesh.index("context") == 0
        total: Tensor = _SumOfRuns.apply(losses, self.blocks, self.mesh.comm(*self.cut_over), counts_here)
        return total


class LinearByParts(AlignedLinear):
    """A linear of experts that multiplies by parts of the inner width; the part of a run i is i modulo their number."""

    parts: int = 1
    """Parts of the inner width on this rank."""
    inner: int = -1
    """The dim of the inner width: of [in, groups, N] the last, of [N, out] the first."""

    def cut(self, parts: int, inner: int, products: Products) -> None:
        """Set the number of parts, the dim of the inner width, and the products of one part."""
        self.parts, self.inner, self.products = parts, inner, products

    def part(self, weight: Tensor, index: int) -> Tensor:
        """Return a part of an expert's flattened weight [in, out], as a view with the dims of the weight."""
        return weight.view(self.weight.shape[1:]).chunk(self.parts, self.inner)[index]

    def multiply(self, x: Tensor, weight: Tensor, runs: Runs, *, turned: bool = False) -> Tensor:
        assert not isinstance(runs, Tensor), "rows that the host does not know"
        weights = [[apart(self.part(matrix, index)).flatten(1) for matrix in weight] for index in range(self.parts)]
        products = []
        for index, (rows, run) in enumerate(zip(x.split([sum(run) for run in runs]), runs, strict=True)):
            for inputs, matrix in zip(rows.split([*run]), weights[index % self.parts], strict=True):
                products.append(self.products.multiply(self.operand(inputs), matrix.t() if turned else matrix))
        return torch.cat(products)

    def addends(self, x: Tensor, dy: Tensor, runs: Runs) -> Iterable[WriteGradient]:
        assert not isinstance(runs, Tensor), "rows that the host does not know"
        of_all = [*chain(*runs)]
        rows, gradients = iter(x.split(of_all)), iter(dy.split(of_all))
        for _ in range(len(runs) // self.parts):
            yield partial(
                self.write_parts, [[(next(rows), next(gradients)) for _ in run] for run in runs[: self.parts]]
            )

    def add_bias(self, y: Tensor, bias: Tensor, runs: Runs) -> None:
        assert not isinstance(runs, Tensor), "rows that the host does not know"
        for run_index, (rows, run) in enumerate(zip(y.split([sum(run) for run in runs]), runs, strict=True)):
            if (addends := self.biases(bias, run_index % self.parts)) is not None:
                for rows_of_expert, addend in zip(rows.split([*run]), addends.flatten(1), strict=True):
                    rows_of_expert.add_(addend)

    def bias_addends(self, dy: Tensor, bias: Tensor, runs: Runs) -> Iterable[WriteGradient]:
        if not self.adds_bias:
            return super().bias_addends(dy, bias, runs)
        assert not isinstance(runs, Tensor), "rows that the host does not know"
        every = enumerate(zip(runs, dy.split([sum(run) for run in runs]), strict=True))
        return (partial(self.write_biases, run_index % self.parts, run, rows) for run_index, (run, rows) in every)

    def biases(self, bias: Tensor, part_index: int) -> Tensor | None:
        """Return the biases of a part as a view of [n, N]; None: the part's rows get none, as the first part's do."""
        if self.inner == 0:
            return None if part_index else bias
        return bias.view(len(bias), *self.weight.shape[2:]).chunk(self.parts, -1)[part_index]

    def write_biases(self, part_index: int, rows: Sequence[int], dy: Tensor, out: Tensor, beta: int) -> None:
        """Write a run's sums of dy by expert + beta · out to the biases [n, N]. `part_index`: the part of dy's rows."""
        if not beta:
            out.zero_()
        if (targets := self.biases(out, part_index)) is not None:
            for gradient, target in zip(dy.split(rows), targets, strict=True):
                target.add_(self.operand(gradient).sum(0).view(target.shape))

    def write_parts(self, parts: Sequence[Sequence[tuple[Tensor, Tensor]]], out: Tensor, beta: int) -> None:
        """Write one run's xᵀ dy + beta · out [n, in, out]. `parts`: by part and expert, the rows x and dy."""
        for index, experts in enumerate(parts):
            for (x, dy), expert_out in zip(experts, out, strict=True):
                target = self.part(expert_out, index)
                gradient = self.products.multiply(self.operand(x).t(), self.operand(dy))
                write_part(gradient.view(target.shape), target, beta)


class ExpertsByParts(SeparateExperts):
    """Experts that compute the rows of each run of tokens and part of the inner width separately."""

    linear: ClassVar[type[GroupedLinear]] = LinearByParts
    scorer: ClassVar[type[Router]] = RouterByRuns

    def __init__(
        self, mesh: Mesh, shape: ExpertsShape, boundary: Boundary, products: ExactProducts, blocks: Blocks
    ) -> None:  # fmt: skip
        """Make the layer. `products`: of the router, by runs; `blocks`: the blocks inside of pairs."""
        super().__init__(mesh, shape, boundary, products)
        self.blocks = blocks
        for layer, inner in ((self.expand, -1), (self.contract, 0)):
            assert isinstance(layer, LinearByParts)
            layer.cut(blocks.parts, inner, products.products)

    def low_rank(self, name: str, rank: int, first: Initial, last: Initial) -> tuple[nn.Module, nn.Module]:
        a, b = super().low_rank(name, rank, first, last)
        # The whole factor has one addend for each part's rows.
        layer, inner = (b, -1) if name == "expand" else (a, 0)
        assert isinstance(layer, LinearByParts)
        layer.cut(self.blocks.parts, inner, layer.products)
        return a, b

    def dispatch(self, h: Tensor, places: Tensor | None) -> tuple[Dispatched, Dispatch]:
        routed = self.router.route(self.router(h))
        ids, parts = self.boundary.start_enter(routed.ids).wait(), self.blocks.parts
        (_, length, copies), senders = ids.shape, self.mesh.size(EXPERT) if self.travels else 1
        here = self.shape.count // senders
        runs = self.blocks.runs if length > 1 else 1
        run = torch.arange(length, device=ids.device).div(length // runs, rounding_mode="floor").view(1, -1, 1)
        first = (ids // here * runs + run) * parts * here + ids % here
        keys, total = torch.stack([first + index * here for index in range(parts)]), self.shape.count * runs * parts
        if bounded := self.shape.capacity is not None and self.training:
            taken, _ = self.within_capacity(ids, places)
            keys, h = keys.masked_fill(~taken, total), CountDropped.apply(h, taken, self)
        experts, order = keys.flatten().sort(stable=True)
        slots = order.argsort()
        if bounded and not ids.is_meta:  # in a plan, experts take all pairs
            order = order[: int(taken.sum()) * parts]
            slots = slots.clamp(max=len(order))
        plan = Dispatch(order, slots, copies, rows_of_experts(experts, total))
        rows: Tensor = _Rows.apply(h, order % ids.numel() // copies, slots.view(parts, *ids.shape), self.boundary)
        weights: Tensor = _Copies.apply(routed.weights.to(h.dtype), self.boundary, parts)
        return Dispatched(rows, weights, routed.losses), plan

    def combine(self, y: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        drops = len(plan.pairs) < len(plan.slots)
        chosen = gather_rows(y, plan.slots, plan.pairs.unsqueeze(1), zeros=drops).view(*weights.shape, -1)
        first, *others = (chosen * weights.unsqueeze(-1)).unbind(-2)
        for addend in others:
            first = first + addend
        left: Tensor = _Left.apply(first, self.boundary)
        return left

    def runs_of(self, x: Tensor, counts: Tensor | None) -> Runs:
        assert counts is not None, "each number of rows is counted"
        return counts.view(-1, self.shape.count).tolist()

    def outputs_here(self, x: Tensor, trade: Trade) -> Tensor:
        return self.outputs(x, trade.coming.view(-1, self.expand.weight.shape[0]).tolist())
