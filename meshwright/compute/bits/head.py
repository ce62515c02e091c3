"""Head and cross entropy by parts of the vocabulary and runs of tokens, with equal bits in every layout.

Parts and runs: bits/blocks.py. The two passes are the ones of cross_entropy.py, one part at a time: logits [C, V/N] of
each of N parts. Every rank receives the statistics of all parts. A maximum does not depend on the order. Sums over
parts (exponentials, the label's logit, dh) are trees over the index of the part. The gradients of table and bias of
each run are added as integers by the ranks that hold these parameters.

Each token's loss is rounded to a multiple of 2^-40, so the sum of losses does not depend on the order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from meshwright.compute.bits.blocks import Blocks, apart, parts_of, sum_of_products
from meshwright.compute.model import IGNORED
from meshwright.compute.parameters.fixed import SUMMED_LOSS, FixedPoint, rounded_sum
from meshwright.compute.parameters.shard import Placements, WriteGradient
from meshwright.compute.parameters.writes import ScaledGradient
from meshwright.compute.tensor.boundary import Boundary
from meshwright.compute.tensor.cross_entropy import (
    CHUNK_BYTES,
    CHUNK_ROWS,
    Classes,
    Objective,
    chosen_rows,
    ranges,
    scale_shares,
    shares_of,
    wide_dtype,
)
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.linear import autocast_device, cast
from meshwright.compute.tensor.products import Products, added
from meshwright.ranks.agreement import all_rows
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.trees import tree_sum


class PartHead(TableHead):
    """A head with classes in parts; the boundary's axis, if any, shards the classes."""

    def __init__(
        self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, boundary: Boundary, blocks: Blocks,
        products: Products, table: Placements | None = None,
    ) -> None:  # fmt: skip
        """Make the head. `table`: the placements of the table; None: the placements of the classes."""
        classes = boundary.inner(0)
        super().__init__(mesh, shape, tied, classes if table is None else table, classes, boundary, products)
        self.blocks = blocks
        self.fixed: FixedPoint | None = None
        """Holds the step's loss scale; in training it sets the quantum of losses."""
        self.observed: list[tuple[Tensor, Tensor]] | None = None
        """If a list, each forward pass appends its labels and the unscaled losses of these, both [B, t]."""

    def round_by(self, fixed: FixedPoint) -> None:
        """Round training losses to multiples of 2^-40 times the loss scale of `fixed`."""
        self.fixed = fixed

    def observe(self) -> list[tuple[Tensor, Tensor]]:
        """Return a new list that each later forward pass appends to, as `observed`."""
        self.observed = found = list[tuple[Tensor, Tensor]]()
        return found

    def forward(self, h: Tensor, labels: Tensor, scale: float | Objective) -> Tensor:
        assert not callable(scale), "a rule refuses losses over pairs with equal bits"
        h, table, bias = cast(h, self.block, self.bias)
        with torch.autocast(autocast_device(h.device), enabled=False):
            differentiates = torch.is_grad_enabled() and (h.requires_grad or table.requires_grad)
            loss: Tensor = _PartLoss.apply(h, table, bias, labels, scale, self, differentiates)
        return loss

    @torch.no_grad()
    def chosen(self, h: Tensor, choose: Callable[[slice, Tensor], Tensor]) -> Tensor:
        """Return the losses [B, t] of labels that are chosen from the logits, with the kernels of the forward pass.

        Args:
            h: [B, t, H], the hidden states of one run of tokens; every class is on this rank.
            choose: `choose(rows, logits)` gets a range of the B·t rows and their logits [C, V], and returns the labels
                [C]. Rows with the label IGNORED have a loss of 0.
        """
        classes = self.classes
        factors = torch.zeros(h.shape[0] * h.shape[1], 1, dtype=wide_dtype(h), device=h.device)
        losses = torch.zeros_like(factors)
        for chunk, _, logits in _logits(apart(h).flatten(0, 1), _Tables.of(self.own_classes(self.block), self)):
            for block in logits:
                classes.capped(block)
            labels = choose(chunk, torch.cat(logits, -1)[:, : classes.vocabulary])
            found = _to_gradients(logits, labels.unsqueeze(1), factors[chunk], classes, self.blocks)
            losses[chunk] = torch.where(labels.unsqueeze(1) != IGNORED, found, 0)
        return losses.view(h.shape[:2])


@dataclass(frozen=True)
class _Tables:
    """A rank's classes as kernels get them."""

    head: PartHead
    weights: list[list[Tensor]]
    """[V/N, H/n] by part of the classes and by part of the hidden width."""
    biases: list[Tensor | None]
    """[V/N] by part of the classes."""

    @classmethod
    def of(cls, table: Tensor, head: PartHead, bias: Tensor | None = None) -> _Tables:
        """Split the classes [V/p, H] and their biases [V/p]; `bias` None: the head's."""
        blocks, bias = head.blocks, head.bias if bias is None else bias
        weights = [parts_of(rows, blocks.hidden, -1) for rows in parts_of(table, blocks.parts, 0)]
        return cls(head, weights, [None] * len(weights) if bias is None else [*parts_of(bias, blocks.parts, 0)])


def _logits(rows: Tensor, tables: _Tables) -> Iterator[tuple[slice, list[Tensor], list[Tensor]]]:
    """Yield chunks of rows [n, H]: the range, the rows by parts of the hidden width, and the logits by parts."""
    head, height = tables.head, tables.weights[0][0].shape[0]
    classes, device = head.classes, head.classes.device_type
    for chunk in classes.alike(ranges(0, rows.shape[0], 4 * height, CHUNK_BYTES[device], CHUNK_ROWS), rows):
        those = parts_of(rows[chunk], head.blocks.hidden, -1)
        pairs = zip(tables.weights, tables.biases, strict=True)
        yield chunk, those, [logits_of_part(classes.products, those, weights, offsets) for weights, offsets in pairs]


@dataclass
class _RunGradients:
    """The gradients of one run."""

    dh: Tensor
    """[rows, H], float32 or float64: this rank's leaf of the ranks' tree."""
    dtable: Tensor
    """[n, V/p, H/n], by part of the hidden width."""
    dbias: Tensor | None
    """[V/p]"""


class _PartLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, table: Tensor, bias: Tensor | None, labels: Tensor, scale: float, head: PartHead,
        differentiates: bool,
    ) -> Tensor:  # fmt: skip
        blocks, count = head.blocks, labels.shape[1]
        whole = head.boundary.start_enter(h).wait()  # [B, T, H]
        total = torch.zeros((), dtype=torch.float64, device=h.device)
        ctx.head, ctx.shape, ctx.dtype, ctx.gradients = head, whole.shape, h.dtype, []
        wanted = labels.chunk(blocks.runs if count > 1 else 1, 1)
        tables, observed = _Tables.of(head.own_classes(table), head, bias), list[Tensor]()
        for rows, run_labels in zip(blocks.rows(whole[:, :count]), wanted, strict=True):
            learns = differentiates and ctx.needs_input_grad[1]
            losses, gradients = _run(rows, run_labels, tables, scale, differentiates, learns)
            # An evaluation sums losses and divides at the end, so the quantum of losses is larger.
            quantum = head.fixed.scale if head.fixed is not None and head.training else SUMMED_LOSS
            total += rounded_sum(losses, scale, quantum)
            ctx.gradients.append(gradients)
            if head.observed is not None:
                observed.append(losses.view(run_labels.shape))
        if head.observed is not None:
            head.observed.append((labels, torch.cat(observed, 1)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor | None, ...]:
        head: PartHead = ctx.head
        runs: list[_RunGradients] = ctx.gradients
        ctx.gradients = []
        rows = head.blocks.joined([run.dh for run in runs], ctx.shape[0])
        dh = torch.zeros(ctx.shape, dtype=rows.dtype, device=factor.device)
        torch.mul(rows, factor.to(rows.dtype), out=dh[:, : rows.shape[1]])
        leaving = head.boundary.start_leave(dh)
        dtable = dbias = None
        for run in runs:
            if ctx.needs_input_grad[1]:
                count, height, width = run.dtable.shape
                like = run.dtable.new_empty(height, count * width)
                dtable = added(dtable, head.give(like, _times(run.dtable, factor)))
            if run.dbias is not None:
                write = _times(run.dbias.unsqueeze(0), factor)
                dbias = added(dbias, head.add_gradient("bias", run.dbias, write, may_wait=False))
        return leaving.wait().to(ctx.dtype), dtable, dbias, *[None] * 4


def _times(parts: Tensor, factor: Tensor) -> WriteGradient:
    """Return a function that writes the parts [n, ..., N/n] of a gradient [..., N] times a factor."""
    if len(parts) == 1:
        return ScaledGradient(parts[0], factor.to(parts.dtype))

    def write(out: Tensor, beta: int) -> None:
        for gradient, target in zip(parts, out.chunk(len(parts), -1), strict=True):
            if beta:
                target.add_(gradient * factor.to(gradient.dtype))
            else:
                torch.mul(gradient, factor.to(gradient.dtype), out=target)

    return write


def _run(
    rows: Tensor, labels: Tensor, tables: _Tables, scale: float, differentiates: bool, learns: bool
) -> tuple[Tensor, _RunGradients]:  # fmt: skip
    """Compute the unscaled losses [n, 1] of a run's labelled rows, 0 for rows that are not counted, and the gradients.

    Args:
        rows: [B·t, H], the hidden states.
        labels: [B, t], the wanted classes.
        tables: this rank's classes.
        scale: factor of the loss.
        differentiates: compute gradients too.
        learns: compute the gradient of the table too.
    """
    blocks, classes = tables.head.blocks, tables.head.classes
    products, index = classes.products, chosen_rows(labels, classes)
    all_of, labels = rows, labels.flatten()
    if index is not None:
        rows, labels = rows[index], labels[index]
    counted, wide = (labels != IGNORED).unsqueeze(1), wide_dtype(rows)
    factors, losses = counted.to(wide) * scale, rows.new_empty(rows.shape[0], 1, dtype=wide)
    dh = torch.empty(rows.shape if differentiates else (0,), dtype=wide, device=rows.device)
    (height, width), heights = tables.weights[0][0].shape, len(tables.weights) if learns else 0
    dtable = rows.new_empty(blocks.hidden, heights * height, width, dtype=wide)
    if not rows.shape[0]:
        dtable.zero_()  # without rows no chunk writes dtable
    dbias = None
    if tables.biases[0] is not None:
        dbias = rows.new_zeros(len(tables.biases) * height, dtype=wide)
    for chunk, those, logits in _logits(rows, tables):
        slopes = [classes.capped(block) for block in logits]
        losses[chunk] = _to_gradients(logits, labels[chunk].unsqueeze(1), factors[chunk], classes, blocks)
        for block, slope in zip(logits, slopes, strict=True) if differentiates else ():
            if slope is not None:
                block.mul_(slope)
        if differentiates:
            by_column = zip(*tables.weights, strict=True)
            for column, target in zip(by_column, dh[chunk].chunk(len(those), -1), strict=True):
                target.copy_(blocks.total(map(products.multiply, logits, column)))
            for inputs, of_inputs in zip(those, dtable, strict=True) if learns else ():
                for block, target in zip(logits, of_inputs.chunk(len(logits)), strict=True):
                    products.write_product(block.t(), inputs, target, int(chunk.start > 0))
            if dbias is not None:
                dbias += torch.cat([block.sum(0, dtype=wide) for block in logits])
    if index is not None and differentiates:
        dh = torch.zeros(all_of.shape, dtype=dh.dtype, device=dh.device).index_copy_(0, index, dh)
    return torch.where(counted, losses, 0), _RunGradients(dh, dtable, dbias)


def logits_of_part(
    products: Products, rows: list[Tensor], table: list[Tensor], bias: Tensor | None
) -> Tensor:  # fmt: skip
    """Return the logits [C, V/N] of one part of the classes.

    Args:
        products: multiplies two parts.
        rows: [C, H/n], the hidden states by parts of the hidden width.
        table: [V/N, H/n], the part's classes by parts of the hidden width.
        bias: [V/N], or None.
    """
    if len(rows) == 1:
        return products.multiply(rows[0], table[0].t(), bias)
    logits = sum_of_products(products, rows, (weight.t() for weight in table)).to(rows[0].dtype)
    return logits if bias is None else logits.add_(bias)


def _to_gradients(logits: list[Tensor], labels: Tensor, factors: Tensor, classes: Classes, blocks: Blocks) -> Tensor:
    """Return the losses [C, 1], and overwrite the logits with the gradients of the logits.

    Args:
        logits: [C, V/N], of each of this rank's parts.
        labels: [C, 1], as in cross_entropy.py.
        factors: [C, 1], as in cross_entropy.py.
        classes: the rank's classes.
        blocks: the parts.
    """
    wide, height = wide_dtype(logits[0]), logits[0].shape[1]
    parts = []
    for index, block in enumerate(logits, blocks.first_part):
        held = min(max(classes.vocabulary - index * height, 0), height)
        targets = labels - index * height
        mine = (targets >= 0) & (targets < held)
        columns, certain = torch.where(mine, targets, 0), mine.to(wide).mul_(1 - classes.smoothing)
        if held:
            shares, statistics = shares_of(block, columns, certain, classes, held)
        else:
            shares, statistics = block, block.new_zeros(block.shape[0], 3, dtype=wide)
            statistics[:, 0] = torch.finfo(wide).min
        parts.append((held, columns, certain, shares, statistics))
    everyone = all_rows(torch.stack([block[-1] for block in parts]), classes.comm).flatten(0, 1)  # [N, C, 3]
    tops, sums, picked = everyone.split(1, 2)
    highest = tops.amax(0)
    relative = (tops - highest).exp_()
    total = tree_sum((sums * relative).unbind())
    losses = total.log().add_(highest).sub_(tree_sum(picked.clone().unbind()))
    scales = relative.mul_(factors).div_(total).mul_(sums)
    for index, (block, (held, columns, certain, shares, _)) in enumerate(zip(logits, parts, strict=True)):
        if held:
            scale = scales[blocks.first_part + index]
            scale_shares(block, shares, columns, certain, scale, factors, classes, held)
        else:
            block.zero_()
    return losses
