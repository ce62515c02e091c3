"""Experts with the row exchange of other programs, on meta tensors, for plans only.

T tokens of a rank, k experts a token, n ranks with experts, R = T k rows on average, U = T times the ranks of a token.

| dispatcher | message there       | messages back  | copies there                       | copies back         |
|------------|---------------------|----------------|------------------------------------|---------------------|
| alltoall   | R rows, all-to-all  | R rows         | T to R rows; R to R, by expert     | R to R; R to T rows |
| deepep,    | U rows, all-to-all  | U rows         | U to R rows                        | R to U rows         |
| hybridep   |                     |                |                                    |                     |
| allgather  | n T rows, gathered  | n T, summed    | n T to R rows                      | R to n T rows       |

Megatron-Core, core/transformer/moe/token_dispatcher.py and moe_utils.py. DeepEP and Hybrid-EP send a token once to each
rank that has an expert of the token, so no rank copies a token k times before. A copy is one kernel, and so is the
backward pass of a copy. The weight of an expert multiplies inside of the activation (moe_utils.py, core_v0.12.0).

**Ranks of experts.** Experts are dealt over the expert axis and, by `ExpertRanks`, over the tensor axis and the context
axis. An expert cut by m ranks (Megatron's expert_tensor_parallel_size) is m experts of 1/m of the inner width, and a
token takes all m. An all-to-all over n m ranks sends equally many bytes as one over n ranks with a gather over m.
"""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import chain, repeat
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.compute.model import Run, at_once
from meshwright.compute.tensor.boundary import UNCUT, Boundary
from meshwright.compute.tensor.experts import Experts, GroupedLinear, Runs
from meshwright.compute.tensor.products import Products
from meshwright.compute.tensor.router import ExpertsShape, Router
from meshwright.planner.plan.expert_ranks import SENT_ONCE, Choice, ExpertRanks, units_of
from meshwright.ranks.collectives import Moving, cross, start_all_gather, start_reduce_scatter
from meshwright.ranks.errors import ConfigError
from meshwright.ranks.planned import PlannedMesh


class OwnLinear(GroupedLinear):
    """Grouped linear with one product per expert; the products write into slices of one result."""

    def multiply(self, x: Tensor, weight: Tensor, runs: Runs, *, turned: bool = False) -> Tensor:
        if isinstance(runs, Tensor):
            return super().multiply(x, weight, runs, turned=turned)
        lengths = [*chain(*runs)]
        y = x.new_empty(len(x), weight.shape[1 if turned else 2])
        for rows, matrix, out in zip(
            x.split(lengths), chain(*repeat(weight, len(runs))), y.split(lengths), strict=True
        ):
            torch.mm(rows, matrix.t() if turned else matrix, out=out)
        return y


class Weighted(torch.autograd.Function):
    """An activation times weights, by a kernel that keeps its operands alone (core/fusions/fused_bias_swiglu.py,
    WeightedSwiGLUFunction)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, shape: ExpertsShape) -> Tensor:
        ctx.save_for_backward(x, weights)
        ctx.shape = shape
        return shape.activated(x) * weights

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weights = (operand.detach().requires_grad_() for operand in ctx.saved_tensors)
        with torch.enable_grad():
            y = ctx.shape.activated(x) * weights
        dx, dweights = torch.autograd.grad(y, (x, weights), dy)
        return dx, dweights, None


class DispatchedExperts(Experts):
    """Router and experts of a planned program."""

    linear: ClassVar[type[GroupedLinear]] = OwnLinear

    def __init__(
        self, how: ExpertRanks, mesh: PlannedMesh, shape: ExpertsShape, boundary: Boundary, products: Products,
        *, fuses: bool,
    ) -> None:  # fmt: skip
        axes = how.axes(mesh.grid)
        parts, ranks = how.parts(mesh.grid), mesh.size(*axes) if axes else 1
        if shape.count * parts % ranks or shape.inner % parts or ranks % parts:
            rule = f"does not deal {shape.count} experts of {parts} parts over {ranks} ranks"
            raise ConfigError.of("expert_tensor", parts, rule, "parts and ranks that divide each other and the experts")
        split_shape = replace(shape, count=shape.count * parts, inner=shape.inner // parts, chosen=shape.chosen * parts)
        super().__init__(mesh, split_shape, UNCUT, products, over=axes)
        self.router = Router(mesh, shape, boundary, products)
        self._run: Run = at_once
        self.fuses = fuses and shape.expand_groups > 1  # these kernels are of gated activations alone
        self.how, self.axes, self.parts, self.ranks = how, axes, parts, ranks
        self.imbalance = mesh.imbalance

    def forward(self, h: Tensor, places: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run router and experts; arguments and result as in Experts."""
        routed = self.router.route(self.router(h))
        x = h.flatten(0, 1)
        tokens, shape, ranks = len(x), self.shape, self.ranks
        rows = tokens * shape.chosen
        received = math.ceil(rows * (shape.capacity or (self.imbalance if ranks > 1 else 1.0)))
        once = ranks > 1 and self.how.dispatcher in SENT_ONCE
        if once or (ranks > 1 and self.how.dispatcher == "allgather"):
            count = float(ranks)
            if once:
                router = self.router.shape
                choice = Choice(router.count, router.chosen, router.groups, router.groups_chosen)
                count = self.parts * units_of(choice, ranks // self.parts)
            x = copied(self.sent(x, math.ceil(tokens * count)), received)
        else:
            x = copied(x, rows)
            if ranks > 1:
                x = self.sent(x, received)
            if shape.count > ranks:  # by sender, then by expert
                x = copied(x, received)
        weights = copied(routed.weights.to(h.dtype).view(-1, 1), received)
        each, more = divmod(received, shape.count // ranks)
        lengths = [each + (index < more) for index in range(shape.count // ranks)]
        runs: Runs = [lengths]
        if self.grouped(x):
            runs = torch.empty(len(lengths), dtype=torch.int32, device=x.device)
        y: Tensor = self.contract(self._run(self.weighted, self.expand(x, runs), weights), runs)
        if once or (ranks > 1 and self.how.dispatcher == "allgather"):
            y = self.sent(copied(y, math.ceil(tokens * count)), tokens)
        else:
            if shape.count > ranks:
                y = copied(y, received)
            y = copied(self.sent(y, rows) if ranks > 1 else y, tokens)
        return y.view_as(h), *routed.losses

    def weigh_by(self, run: Run) -> None:
        """Have the activation and its weights run by `run`."""
        self._run = run

    def weighted(self, x: Tensor, weights: Tensor) -> Tensor:
        """Return the activation of x [R, groups, N], times the weights [R, 1]: [R, N]."""
        if self.fuses:
            y: Tensor = Weighted.apply(x, weights, self.shape)
            return y
        return self.shape.activated(x) * weights

    def sent(self, x: Tensor, rows: int) -> Tensor:
        """Send rows x [R, H] between the ranks of experts; returns [rows, H]. Backward: the reverse exchange."""
        comm, before = self.mesh.comm(*self.axes), len(x)
        if self.how.dispatcher == "allgather":
            there, back = (start_all_gather, start_reduce_scatter)[:: 1 if rows > before else -1]
            return cross(x, lambda x: there(x, comm, 0), lambda gradient: back(gradient.contiguous(), comm, 0))

        def start(x: Tensor, rows: int) -> Moving:
            out = x.new_empty(rows, *x.shape[1:])
            return Moving(comm.all_to_all(out, x), lambda: out)

        return cross(x, lambda x: start(x, rows), lambda gradient: start(gradient.contiguous(), before))


def copied(x: Tensor, rows: int) -> Tensor:
    """Copy rows x [R, ...] to [rows, ...] by one kernel that reads all R and writes all `rows`. The backward pass is
    such a kernel, too."""
    # Meta tensors have no values, so a padding can replace a permutation: both move equally many bytes.
    return F.pad(x, (0, 0, 0, rows - len(x)))


def experts_of_program(
    how: ExpertRanks, mesh: PlannedMesh, shape: ExpertsShape, boundary: Boundary, products: Products,
    *, fuses: bool = False,
) -> Experts:  # fmt: skip
    """Make a layer's experts. Tokens held by all ranks of an axis are sent as in a run of this package. `fuses`:
    whether a gated activation and the weights of experts are one kernel.

    Raises:
        ConfigError: Tensor ranks with different experts have the same tokens.
    """
    if boundary.split_axes or not boundary.axis:
        return DispatchedExperts(how, mesh, shape, boundary, products, fuses=fuses)
    if how.parts(mesh.grid) != mesh.size(boundary.axis) or how.context:
        rule = "needs tensor ranks with different tokens (layout.tensor.sequence_parallel)"
        raise ConfigError.of("expert_tensor", how.tensor, rule, "0")
    return Experts(mesh, shape, boundary, products)
