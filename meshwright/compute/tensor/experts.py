"""Experts: n feed-forwards; each token uses k experts (Mixtral, arXiv 2401.04088; Qwen3-MoE).

    y = Σ over a token's k experts e of  w_e · contract_e(swiglu(expand_e(x)))        experts and w_e: router.py

| layer    | input        | weight                  | output          | forward sends | backward sends |
|----------|--------------|-------------------------|-----------------|---------------|----------------|
| router   | [B, T, H]    | [H, n]                  | [B, T, n]       | -             | -              |
| expand   | [R, H]       | [n, H, 2, N/tensor]     | [R, 2, N/tensor]| enter         | leave          |
| contract | [R, N/tensor]| [n, N/tensor, H]        | [R, H]          | leave         | enter          |

R = B T k rows: a token has one row for each chosen expert. Rows are sorted by expert, and an expert's rows are one
product. `enter` and `leave` are a pair's (boundary.py), if the inner width is cut; weights w_e enter as rows do, since
each rank has a part of every expert's output. With `linear_biases` (gpt-oss) the three linears have biases: [n],
[n, 2, N/tensor] and [n, H]; the first tensor rank alone adds the last one to its part of the output.

**Capacity.** Without a capacity no token is dropped. With a capacity, in training, an expert takes the first C tokens
of a sequence that choose the expert, C = ceil(capacity k T / n), and adds nothing to later tokens (Switch Transformer;
Megatron's policy `position`). Tokens are counted by sequence, so the result is independent of replicas and
microbatches, and by position, so no output depends on later tokens. Shapes are fixed: R = n B C, and unused rows are
zeros. If the context axis cuts sequences, ranks exchange their tokens' experts first (one all-reduce of [B, T, k],
forward); a rank has room for min(C, T/context) rows.

**Kernels.** A CPU multiplies the experts' rows one expert after another. A GPU with a grouped kernel
(`Experts.grouped`) gets the ends of experts' rows as a tensor on the device: one launch a product, and the host needs
no number of rows. The weights' gradient is then rounded to bfloat16 once a microbatch, before the sum in the bucket.

**Expert axis** (GShard, arXiv 2006.16668). Ranks have different tokens and n/expert experts each. A row is sent to the
rank of the row's expert, and the output is sent back: two all-to-alls of rows forward, two backward. Without a capacity
an all-to-all of counts between devices gives the number of rows first, and the host waits only for two sums a rank, the
sizes of the all-to-alls of rows. With a capacity all numbers are equal, and no counts are sent. An expert's gradient is
that of all tokens of the group, so the gradient is summed only over the other axes (the spec's cut).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.compute.parameters.role import BIAS
from meshwright.compute.parameters.shard import (
    ZEROS,
    Initial,
    Placements,
    Shard,
    ShardedModule,
    ShardSpec,
    WriteGradient,
)
from meshwright.compute.tensor.boundary import UNCUT, Boundary
from meshwright.compute.tensor.linear import autocast_dtype, cast
from meshwright.compute.tensor.products import PLAIN, Products, add_gradients, write_part, write_sum
from meshwright.compute.tensor.router import ExpertsShape, Router
from meshwright.ranks.collectives import start_all_reduce, trade_rows
from meshwright.ranks.grid import EXPERT
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import PlannedMesh

Runs = Sequence[Sequence[int]] | Tensor
"""Rows of each expert, by run: one run, or one of each sending rank (bits/experts.py). Or the ends of experts' rows,
int32 [n] on the device, if one kernel multiplies all of them (`Experts.grouped`)."""
GROUPED = (9, 10)
"""Major compute capabilities of GPUs with this kernel in torch, for bfloat16."""
ALIGNED_BYTES = 16
"""The alignment in bytes of rows and weights for this kernel."""


class _Grouped(torch.autograd.Function):
    """y = x W + b by expert."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, runs: Runs, layer: GroupedLinear
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.bias, ctx.runs, ctx.layer = bias, runs, layer
        y = layer.multiply(x, weight, runs)
        if bias is not None and layer.adds_bias:
            layer.add_bias(y, bias, runs)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        layer, dy = ctx.layer, dy.contiguous()
        dweight = dbias = None
        if ctx.needs_input_grad[1]:
            dweight = add_gradients(layer, "weight", weight, layer.addends(x, dy, ctx.runs))
        if ctx.bias is not None:
            dbias = add_gradients(layer, "bias", ctx.bias, layer.bias_addends(dy, ctx.bias, ctx.runs))
        return layer.multiply(dy, weight, ctx.runs, turned=True), dweight, dbias, None, None


class GroupedLinear(ShardedModule):
    """x W + b of the expert that each row is sorted to; W [n, in, ..., out], b [n, ..., out] or none."""

    def __init__(
        self, mesh: Mesh, shape: tuple[int, ...], placements: Placements, initial: Initial, products: Products = PLAIN,
        *, partial_over: tuple[str, ...] = (), biased: bool = False,
    ) -> None:  # fmt: skip
        """Make the layer.

        Args:
            partial_over: Axes over which the weight is whole, and each rank computes a part of the gradient.
            biased: Whether there is a bias. If an axis cuts the inputs, its first rank alone adds the bias.
        """
        super().__init__(mesh)
        self.products = products
        self.weight = self.declare("weight", ShardSpec(shape, placements, initial, partial_over=partial_over))
        summed = tuple(axis for axis, shard in placements.items() if shard.dim == 1)
        self.adds_bias = not any(mesh.index(axis) for axis in summed)
        bias_cuts = {axis: Shard(max(0, shard.dim - 1)) for axis, shard in placements.items() if axis not in summed}
        spec = ShardSpec((shape[0], *shape[2:]), bias_cuts, ZEROS, BIAS, partial_over=summed)
        self.bias = self.declare("bias", spec) if biased else None

    def forward(self, x: Tensor, runs: Runs) -> Tensor:
        """x [R, in], sorted by run and expert; [R, ..., out]."""
        x, weight, bias = cast(x, self.weight.flatten(2), None if self.bias is None else self.bias.flatten(1))
        y: Tensor = _Grouped.apply(x, weight, bias, runs, self)
        return y.unflatten(-1, (*self.weight.shape[2:-1], -1))

    def add_bias(self, y: Tensor, bias: Tensor, runs: Runs) -> None:
        """Add each expert's bias of [n, N] to the expert's rows of y [R, N]."""
        if isinstance(runs, Tensor):
            y.add_(bias[torch.searchsorted(runs, torch.arange(len(y), device=y.device), right=True)])
            return
        for rows, expert_bias in zip(y.split([*chain(*runs)]), chain(*repeat(bias, len(runs))), strict=True):
            rows.add_(expert_bias)

    def bias_addends(self, dy: Tensor, bias: Tensor, runs: Runs) -> Iterable[WriteGradient]:
        """Yield functions that each write an addend of the gradient of a bias [n, N]: sums of dy [R, N] by expert, or
        zeros on ranks that do not add the bias."""
        if not self.adds_bias:
            return (partial(write_part, torch.zeros_like(bias)),)
        if isinstance(runs, Tensor):
            # The kernel of the weights' gradients, since atomic sums have other bits in each run.
            ones = dy.new_ones(len(dy), ALIGNED_BYTES // dy.element_size())
            sums = torch._grouped_mm(ones.t(), dy, offs=runs)[:, 0] if len(dy) else torch.zeros_like(bias)
            return (partial(write_part, sums),)
        lengths = [sum(run) for run in runs]
        return (partial(self.write_sums, run, rows) for run, rows in zip(runs, dy.split(lengths), strict=True))

    def write_sums(self, rows: Sequence[int], dy: Tensor, out: Tensor, beta: int) -> None:
        """Write a run's sums of dy by expert + beta · out to `out`."""
        for gradient, target in zip(dy.split(rows), out, strict=True):
            write_sum(gradient, target, beta)

    def operand(self, x: Tensor) -> Tensor:
        """Return x, a part of a larger tensor, as a product reads it."""
        return x

    def multiply(self, x: Tensor, weight: Tensor, runs: Runs, *, turned: bool = False) -> Tensor:
        """Multiply each expert's rows of x [R, K] by the expert's weight of [n, K, N]; `turned`: the weights are
        [n, N, K], and each is transposed."""
        if isinstance(runs, Tensor):
            factor = weight.transpose(1, 2) if turned else weight
            # A rank may receive no rows.
            return torch._grouped_mm(x, factor, offs=runs) if len(x) else x.new_empty(0, factor.shape[2])
        parts = zip(x.split([*chain(*runs)]), chain(*repeat(weight, len(runs))), strict=True)
        operands = ((self.operand(rows), self.operand(factor)) for rows, factor in parts)
        return torch.cat([self.products.multiply(rows, factor.t() if turned else factor) for rows, factor in operands])

    def addends(self, x: Tensor, dy: Tensor, runs: Runs) -> Iterable[WriteGradient]:
        """Yield functions that each write an addend of the weight's gradient."""
        if isinstance(runs, Tensor):

            def write(out: Tensor, beta: int) -> None:
                write_part(torch._grouped_mm(x.t(), dy, offs=runs) if len(x) else out.new_zeros(()), out, beta)

            return (write,)
        lengths = [sum(run) for run in runs]
        # One addend a run: sums of integers round each addend separately.
        parts = zip(runs, x.split(lengths), dy.split(lengths), strict=True)
        return (partial(self.write_run, run, rows, gradients) for run, rows, gradients in parts)

    def write_run(self, rows: Sequence[int], x: Tensor, dy: Tensor, out: Tensor, beta: int) -> None:
        """Write a run's xᵀ dy + beta · out by expert to `out`."""
        for inputs, gradient, target in zip(x.split(rows), dy.split(rows), out, strict=True):
            self.products.write_product(inputs.t(), gradient, target, beta)


@dataclass(frozen=True)
class Dispatch:
    """The order of rows. A pair is a token and one of the token's k choices.

    Attributes:
        pairs: The pair of each sorted row.
        slots: The sorted row of each pair.
        copies: Rows of a token.
        rows: Sorted rows of each expert [n], on the tokens' device; None: equal numbers, and the index after the last
            row is a row of zeros.
    """

    pairs: Tensor
    slots: Tensor
    copies: int
    rows: Tensor | None

    @property
    def drops(self) -> bool:
        """Whether experts have a capacity."""
        return self.rows is None


class Dispatched(NamedTuple):
    """Tokens dispatched to experts: rows [R, H] sorted by expert, weights [B, T, k], the router's losses."""

    rows: Tensor
    weights: Tensor
    losses: tuple[Tensor, ...]


@dataclass(frozen=True)
class Trade:
    """Rows between ranks of the expert axis.

    Attributes:
        given: Rows to send to each rank.
        taken: Rows to receive from each rank.
        coming: Received rows by sender and expert of this rank, on the tokens' device.
        evenly: Whether all numbers are equal.
    """

    given: Sequence[int]
    taken: Sequence[int]
    coming: Tensor
    evenly: bool


class _Gather(torch.autograd.Function):
    """y[i] = x[index[i]]. Backward, `back` [R, copies] lists the copies of each row of x, summed in this order, with
    equal bits in each run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, back: Tensor, zeros: bool) -> Tensor:
        ctx.save_for_backward(back)
        ctx.zeros = zeros
        return (F.pad(x, (0, 0, 0, 1)) if zeros else x)[index]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        (back,) = ctx.saved_tensors
        dx = (F.pad(dy, (0, 0, 0, 1)) if ctx.zeros else dy)[back.flatten()]
        return dx.unflatten(0, back.shape).sum(1) if back.shape[1] > 1 else dx, None, None, None


def gather_rows(x: Tensor, index: Tensor, back: Tensor, *, zeros: bool = False) -> Tensor:
    """Gather rows: x [R/copies, H] -> [R', H]. `zeros`: the index after the last row is a row of zeros."""
    y: Tensor = _Gather.apply(x, index, back, zeros)
    return y


class CountDropped(torch.autograd.Function):
    """Identity. Dropped pairs are counted in the backward pass, so once even if the forward pass is recomputed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, has_expert: Tensor, layer: Experts) -> Tensor:
        ctx.save_for_backward(has_expert)
        ctx.layer = layer
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (has_expert,) = ctx.saved_tensors
        ctx.layer.count_dropped((~has_expert).sum())
        return dy, None, None


def dropped_pairs(model: nn.Module, device: torch.device) -> Tensor:
    """Count the pairs of a token and an expert that this rank has dropped since the last call: a scalar on `device`."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    counts = [count for layer in layers if (count := layer.take_dropped()) is not None]
    return torch.stack(counts).sum() if counts else torch.zeros((), device=device)


class Experts(nn.Module):
    """A router and experts. `boundary`: the axis that cuts the experts' inner width, and its collectives. `over`: the
    axes over which experts are dealt."""

    linear: ClassVar[type[GroupedLinear]] = GroupedLinear
    scorer: ClassVar[type[Router]] = Router
    in_graphs: ClassVar[bool] = False

    def __init__(
        self, mesh: Mesh, shape: ExpertsShape, boundary: Boundary = UNCUT, products: Products = PLAIN,
        over: tuple[str, ...] = (EXPERT,),
    ) -> None:  # fmt: skip
        super().__init__()
        self.mesh, self.shape, self.boundary = mesh, shape, boundary
        self.router = self.scorer(mesh, shape, boundary, products)
        apart: Placements = {axis: Shard(0) for axis in over if axis in mesh.grid.names and mesh.size(axis) > 1}
        self.travels = bool(apart)
        self.dropped: Tensor | None = None
        up, down = shape.expand_sizes, (shape.count, shape.inner, shape.hidden)
        biased = shape.linear_biases
        self.expand = self.linear(mesh, up, {**apart, **boundary.inner(3)}, shape.initial, products, biased=biased)
        self.contract = self.linear(mesh, down, {**apart, **boundary.inner(1)}, shape.last, products, biased=biased)

    def low_rank(self, name: str, rank: int, first: Initial, last: Initial) -> tuple[nn.Module, nn.Module]:
        """Make A [n, I, rank] and B [n, rank, ..., N] next to the linear `name`, of initial values `first` and `last`.

        If the inner width is cut, each rank computes a part of the gradient of the factor that is whole.
        """
        spec = (self.expand if name == "expand" else self.contract).specs["weight"]
        count, inputs, *outputs = spec.shape
        apart = {axis: shard for axis, shard in spec.placements.items() if shard.dim == 0}
        cut = {axis: shard for axis, shard in spec.placements.items() if shard.dim}
        over = tuple(cut)
        of_a, of_b = (cut, {}) if name == "contract" else ({}, cut)
        products = self.expand.products
        return (
            self.linear(self.mesh, (count, inputs, rank), {**apart, **of_a}, first, products,
                        partial_over=() if of_a else over),
            self.linear(self.mesh, (count, rank, *outputs), {**apart, **of_b}, last, products,
                        partial_over=() if of_b else over),
        )  # fmt: skip

    def count_dropped(self, pairs: Tensor) -> None:
        """Add to the number of dropped pairs."""
        self.dropped = pairs if self.dropped is None else self.dropped + pairs

    def take_dropped(self) -> Tensor | None:
        """Return the number of dropped pairs since the last call; None: nothing was counted."""
        dropped, self.dropped = self.dropped, None
        return dropped

    def forward(self, h: Tensor, places: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run router and experts.

        Args:
            h: [B, T, H].
            places: Positions of this rank's tokens in their sequence; in training only.

        Returns:
            ([B, T, H],); of a router with losses also the loss of each sequence [B], or this rank's part of the loss if
            the context axis cuts sequences.
        """
        dispatched, plan = self.dispatch(h, places)
        x = dispatched.rows
        if not self.travels:
            y = self.outputs(x, self.runs_of(x, None if plan.rows is None else plan.rows.unsqueeze(0)))
        else:
            trade = self.trade_of(plan, x.device)
            y = self.outputs_here(self.traded(x, trade.given, trade.taken), trade)
            y = self.traded(y, trade.taken, trade.given)
        return self.combine(y, dispatched.weights, plan), *dispatched.losses

    def dispatch(self, h: Tensor, places: Tensor | None) -> tuple[Dispatched, Dispatch]:
        """Run the forward pass up to the exchange of rows; arguments as in `forward`."""
        routed = self.router.route(self.router(h))
        enter = self.boundary.enter
        whole, weights = enter(h), enter(routed.weights.to(h.dtype))
        ids = self.boundary.start_enter(routed.ids).wait()
        if self.shape.capacity is not None and self.training:
            plan, whole = self._bounded(whole, ids, places)
        else:
            experts, order = ids.flatten().sort(stable=True)  # all rows, sorted by expert
            plan = Dispatch(order, order.argsort(), ids.shape[-1], rows_of_experts(experts, self.shape.count))
        back = plan.slots.view(-1, plan.copies)
        rows = gather_rows(whole.flatten(0, 1), plan.pairs // plan.copies, back, zeros=plan.drops)
        return Dispatched(rows, weights, routed.losses), plan

    def combine(self, y: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        """Sum the chosen experts' outputs times their weights: all rows' outputs y [R, H] -> [B, T, H]."""
        y = gather_rows(y, plan.slots, plan.pairs.unsqueeze(1), zeros=plan.drops)
        return self.boundary.leave((y.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(2))

    def _bounded(self, h: Tensor, ids: Tensor, places: Tensor | None) -> tuple[Dispatch, Tensor]:
        """Keep the first C tokens of each sequence and expert, ordered by expert, sequence and position.

        Returns:
            The order of rows; h, with a backward pass that counts dropped pairs.
        """
        (rows, tokens, copies), count = ids.shape, self.shape.count
        before, (fits, most) = earlier_tokens(ids, count), self.within_capacity(ids, places)
        room = min(most, tokens)
        sequence = torch.arange(rows, device=ids.device).view(-1, 1, 1)
        total = count * rows * room
        slots = torch.where(fits, (ids * rows + sequence) * room + before, total).flatten()
        pairs = slots.new_full((total + 1,), slots.numel())
        pairs[slots] = torch.arange(slots.numel(), device=ids.device)
        return Dispatch(pairs[:-1], slots, copies, None), CountDropped.apply(h, fits, self)

    def within_capacity(self, ids: Tensor, places: Tensor | None) -> tuple[Tensor, int]:
        """Return the pairs that experts take, bool [B, T, k], and the most tokens that an expert takes of a sequence.

        Args:
            ids: Numbers of each token's experts [B, T, k].
            places: Positions of this rank's tokens; read if the context axis cuts sequences.
        """
        count, length = self.shape.count, ids.shape[1]
        cut = self.mesh.size("context") if "context" in self.mesh.grid.names else 1
        most = self.shape.most_tokens(length * cut)
        if cut == 1:
            earlier = earlier_tokens(ids, count)
        else:
            assert places is not None, "tokens of a part of a sequence, at places that nobody has said"
            whole = ids.new_zeros(ids.shape[0], length * cut, ids.shape[2])
            whole[:, places] = ids
            whole = start_all_reduce(whole, self.mesh.comm("context")).wait()
            earlier = earlier_tokens(whole, count)[:, places]
        return earlier < most, most

    def grouped(self, x: Tensor) -> bool:
        """Return True if one kernel multiplies the rows x [R, H] of all experts; else the host needs their numbers."""
        capability = self.mesh.capability
        if capability is None or capability[0] not in GROUPED:
            return False
        weights = [linear.weight for linear in self.modules() if isinstance(linear, GroupedLinear)]
        widths = {size for weight in weights for size in (weight.shape[1], weight.shape[2:].numel())}
        offsets = (weight.storage_offset() * weight.element_size() for weight in weights)
        aligned = not any(offset % ALIGNED_BYTES for offset in (*offsets, *(2 * width for width in widths)))
        return aligned and (autocast_dtype(x) or x.dtype) == torch.bfloat16

    def runs_of(self, x: Tensor, counts: Tensor | None) -> Runs:
        """Make one run of the rows x [R, H] of this rank's experts; `counts` [ranks, n]: each rank's rows of each
        expert, or None for equal numbers."""
        here = self.expand.weight.shape[0]
        if not self.grouped(x):
            return [[len(x) // here] * here if counts is None else counts.sum(0).tolist()]
        if counts is None:
            return torch.arange(1, here + 1, dtype=torch.int32, device=x.device) * (len(x) // here)
        return counts.sum(0).cumsum(0).int().to(x.device)  # in a plan the numbers are in host memory

    def outputs(self, x: Tensor, runs: Runs) -> Tensor:
        """Return the outputs of this rank's experts for x [R, H]; `runs`: numbers of rows by run and expert."""
        y: Tensor = self.contract(self.shape.activated(self.expand(x, runs)), runs)
        return y

    def trade_of(self, plan: Dispatch, device: torch.device) -> Trade:
        """Plan the exchange of rows over the expert axis. Without a capacity ranks exchange the numbers of rows by an
        all-to-all, and wait; with a capacity all numbers are equal."""
        size, here = self.mesh.size(EXPERT), self.shape.count // self.mesh.size(EXPERT)
        if plan.rows is None:
            rows = len(plan.pairs) // self.shape.count
            return Trade([here * rows] * size, [here * rows] * size, torch.full((size, here), rows), evenly=True)
        sent = plan.rows.view(size, -1)
        coming = torch.empty_like(sent)
        self.mesh.comm(EXPERT).all_to_all(coming, sent)
        if device.type == "meta":  # a plan: all ranks send equal numbers of rows, and this rank is the busiest
            imbalance = self.mesh.imbalance if isinstance(self.mesh, PlannedMesh) else 1.0
            coming = (sent[self.mesh.index(EXPERT)].expand_as(sent) * imbalance).ceil().long()
        given, taken = torch.stack((sent.sum(1), coming.sum(1))).cpu().tolist()
        return Trade(given, taken, coming, evenly=False)

    def traded(self, x: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Exchange rows x for other ranks' rows, and wait."""
        return trade_rows(x, sent, received, self.mesh, EXPERT)

    def outputs_here(self, x: Tensor, trade: Trade) -> Tensor:
        """Return the outputs of this rank's experts for received rows x, ordered by sender, then by expert."""
        coming = trade.coming
        size, here = coming.shape
        if trade.evenly:
            rows = len(x) // (size * here)
            ordered = x.view(size, here, rows, -1).transpose(0, 1).flatten(0, 2)
            y = self.outputs(ordered, self.runs_of(ordered, None))
            return y.view(here, size, rows, -1).transpose(0, 1).flatten(0, 2)
        # Reorder from (rank, expert) to (expert, rank). In a plan the numbers are in host memory, the rows are not.
        experts = torch.arange(here, device=x.device).repeat(size)
        order = experts.repeat_interleave(coming.flatten().to(x.device), output_size=len(x)).argsort(stable=True)
        inverse = order.argsort()
        ordered = gather_rows(x, order, inverse.unsqueeze(1))
        return gather_rows(self.outputs(ordered, self.runs_of(ordered, coming)), inverse, order.unsqueeze(1))


def rows_of_experts(experts: Tensor, count: int) -> Tensor:
    """Count each expert's rows [n] from the sorted experts of all rows; in a plan equal numbers, in host memory."""
    total = experts.numel()
    if experts.device.type == "meta":
        return torch.tensor([total * (index + 1) // count - total * index // count for index in range(count)])
    # bincount would make the host wait.
    return torch.searchsorted(experts, torch.arange(count + 1, device=experts.device)).diff()


def earlier_tokens(ids: Tensor, count: int) -> Tensor:
    """Count, for each token's chosen experts, the earlier tokens of the sequence with the same expert; ids and result
    [B, T, k]."""
    taken = torch.zeros(*ids.shape[:2], count, dtype=ids.dtype, device=ids.device).scatter_(2, ids, 1)
    return (taken.cumsum(1) - taken).gather(2, ids)
