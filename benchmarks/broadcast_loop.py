"""The baseline of 2-D and 2.5-D tensor parallelism: the papers' loop of broadcasts, on the plain model.

Optimus (arXiv 2104.05343, d = 1) and Tesseract (ICPP 2022) as published: rank (i, j, k) of [q, q, d] holds blocks, and

    C = A B     for t in 0..q-1: A[i,t] is broadcast along row i, B[t,j] along column j; C += A B
    C = A Bᵀ    for t: B[t,j] is broadcast along column j; A Bᵀ is reduced along row i to rank (i, t)
    C = Aᵀ B    for t: A[i,t] is broadcast along row i; Aᵀ B is reduced along column j to rank (t, j)

| symbol         | local shape            | forward                                | gradients                      |
|----------------|------------------------|----------------------------------------|--------------------------------|
| h              | [B·T/(dq), H/q]        |                                        |                                |
| linear         | [H/q, 3H/q] and others | A B                                    | dX = dY Wᵀ, dW = Xᵀ dY, over k |
| bias, γ, β     | [N/q], of row 0        | broadcast along the column             | reduced to row 0, and over k   |
| layer norm     |                        | sums of x and of x² over the row       | of x̂ dx̂ and of dx̂ over the row |
| token table    | [V/q, H/q]             | A B, each rank makes its own one-hot A | Aᵀ B, over k                   |
| position table | [T, H/q], of row 0     | as a bias                              | as a bias                      |
| head, not tied | [H/q, V/q]             | a linear                               | a linear                       |
| logits         | [B·T/(dq), V/q]        | maximum, sum, label's logit over a row | local                          |

"over k": summed by an all-reduce over the depth, layer by layer.

The papers leave the loss open; of the faithful forms this form sends least, because logits are never sent. Collectives
are methods of `Comm`, so the loop runs on gloo and on MPI. Each collective ends before the next starts, as in the
papers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from meshwright.ranks.comm import Comm
from meshwright.ranks.mesh import Mesh


@dataclass(frozen=True)
class Shape:
    """[q, q, d] for rank (i, j, k): `row` joins the q ranks of row i, `column` the q ranks of column j."""

    row: Comm
    column: Comm
    depth: Comm

    @classmethod
    def of(cls, mesh: Mesh) -> Shape:
        """Return the shape of a mesh with the axes depth, row and col. Ranks of a row differ in the column."""
        return cls(mesh.comm("col"), mesh.comm("row"), mesh.comm("depth"))

    @property
    def q(self) -> int:
        return self.row.size

    def block(self, whole: Tensor) -> Tensor:
        """Return block [i, j] of the first and last dim."""
        return self.cut(whole.chunk(self.q, 0)[self.column.index])

    def cut(self, whole: Tensor) -> Tensor:
        """Return slice j of the last dim."""
        return whole.detach().chunk(self.q, -1)[self.row.index].contiguous()

    def rows(self, batch: Tensor) -> Tensor:
        """Return rows i + k q of the batch, of d q."""
        return batch.chunk(self.q * self.depth.size)[self.depth.index * self.q + self.column.index]


def _panel(x: Tensor, comm: Comm, root: int) -> Tensor:
    """Broadcast x of the member `root`."""
    panel = x if comm.index == root else torch.empty_like(x)
    comm.broadcast(panel, root)
    return panel


def product(a: Tensor, b: Tensor, shape: Shape) -> Tensor:
    """Return C = A B."""
    c = a.new_zeros(a.shape[0], b.shape[1])
    for t in range(shape.q):
        c.addmm_(_panel(a, shape.row, t), _panel(b, shape.column, t))
    return c


def product_with_transposed(a: Tensor, b: Tensor, shape: Shape) -> Tensor:
    """Return C = A Bᵀ."""
    c = a
    for t in range(shape.q):
        partial = a @ _panel(b, shape.column, t).t()
        shape.row.reduce(partial, t)
        c = partial if shape.row.index == t else c
    return c


def transposed_product(a: Tensor, b: Tensor, shape: Shape) -> Tensor:
    """Return C = Aᵀ B, summed over the depth."""
    c = a
    for t in range(shape.q):
        partial = _panel(a, shape.row, t).t() @ b
        shape.column.reduce(partial, t)
        c = partial if shape.column.index == t else c
    shape.depth.all_reduce(c)
    return c


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, shape: Shape) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        return product(x, weight, shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous()
        dweight = transposed_product(x, dy, ctx.shape)
        return product_with_transposed(dy, weight, ctx.shape), dweight, None


class OfRowZero(torch.autograd.Function):
    """A vector of row 0, broadcast to every rank of the column. The vector has a gradient on row 0 alone."""

    @staticmethod
    def forward(ctx: Any, vector: Tensor, shape: Shape) -> Tensor:
        ctx.shape = shape
        value = vector.clone()
        shape.column.broadcast(value, 0)
        return value

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        total = gradient.clone()
        ctx.shape.column.reduce(total, 0)
        if ctx.shape.column.index != 0:
            return None, None
        ctx.shape.depth.all_reduce(total)
        return total, None


class Normalised(torch.autograd.Function):
    """x̂ = (x - E[x]) / √(E[x²] - E[x]² + ε). This rank has a slice of each row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, epsilon: float, shape: Shape) -> Tensor:
        mean, square = _row_mean(x, shape), _row_mean(x * x, shape)
        rate = (square - mean * mean + epsilon).rsqrt()
        normalised = (x - mean) * rate
        ctx.save_for_backward(normalised, rate)
        ctx.shape = shape
        return normalised

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        normalised, rate = ctx.saved_tensors
        along, mean = _row_mean(normalised * gradient, ctx.shape), _row_mean(gradient, ctx.shape)
        return (gradient - mean - normalised * along) * rate, None, None


def _row_mean(x: Tensor, shape: Shape) -> Tensor:
    """Return the mean over whole rows of x [N, H/q]: [N, 1]."""
    total = x.sum(1, keepdim=True)
    shape.row.all_reduce(total)
    return total / (x.shape[1] * shape.q)


class Lookup(torch.autograd.Function):
    """One-hot tokens [N, V] times the table: a rank adds zeros for rows of other ranks."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, tokens: Tensor, shape: Shape) -> Tensor:
        ctx.save_for_backward(table, tokens)
        ctx.shape = shape
        h = table.new_zeros(tokens.numel(), table.shape[1])
        for t in range(shape.q):
            mine, ids = _in_panel(tokens, t, len(table))
            h[mine] = F.embedding(ids, _panel(table, shape.column, t))
        return h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        table, tokens = ctx.saved_tensors
        shape: Shape = ctx.shape
        total = table
        for t in range(shape.q):
            mine, ids = _in_panel(tokens, t, len(table))
            partial = torch.zeros_like(table).index_add_(0, ids, gradient[mine])
            shape.column.reduce(partial, t)
            total = partial if shape.column.index == t else total
        shape.depth.all_reduce(total)
        return total, None, None


def _in_panel(tokens: Tensor, t: int, rows: int) -> tuple[Tensor, Tensor]:
    """Return a mask of the tokens in panel t of a table, and these tokens' rows in the panel."""
    mine = tokens.div(rows, rounding_mode="floor") == t
    return mine, tokens[mine] - t * rows


class CrossEntropy(torch.autograd.Function):
    """The summed loss of logits [N, V/q], divided by `count`."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, count: int, shape: Shape) -> Tensor:
        highest = logits.new_empty(shape.q, len(logits))
        shape.row.all_gather(highest, logits.amax(1))
        shifted = logits - highest.amax(0)[:, None]
        mine, columns = _in_panel(labels, shape.row.index, logits.shape[1])
        rows = mine.nonzero()[:, 0]
        picked = logits.new_zeros(len(logits))
        picked[rows] = shifted[rows, columns]
        softmax = shifted.exp_()
        total = softmax.sum(1)
        shape.row.all_reduce(total)
        shape.row.all_reduce(picked)
        softmax /= total[:, None]
        softmax[rows, columns] -= 1
        ctx.save_for_backward(softmax.div_(count))
        return (total.log() - picked).sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, factor: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * factor, None, None, None
