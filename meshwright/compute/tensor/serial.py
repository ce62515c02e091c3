"""A kit's methods for layers that no axis cuts: the base of all kits, and the kit of one device.

| layer     | input     | weight        | output        | sends |
|-----------|-----------|---------------|---------------|-------|
| embedding | [B, T]    | [V, H]        | [B, T, H]     | -     |
| norm      | [B, T, H] | [H], [H]      | [B, T, H]     | -     |
| expand    | [B, T, H] | [H, G, N/G]   | [B, T, G, N/G]| -     |
| contract  | [B, T, N] | [N, H]        | [B, T, H]     | -     |
| linear    | [B, t, I] | [I, N]        | [B, t, N]     | -     |
| head      | [B, T, H] | [V, H]        | loss          | -     |

The serial kit is the reference for tests of every other kit. A kit with an axis passes a `Boundary` for activations of
pairs (boundary.py), and overrides the methods of layers with sharded weights.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.role import BIAS, TABLE, Role
from meshwright.compute.parameters.shard import UNPLACED, ZEROS, Initial, Placements, ShardedModule, ShardSpec
from meshwright.compute.tensor.arithmetic import AT_ONCE, Arithmetic
from meshwright.compute.tensor.boundary import UNCUT, Boundary, start_copies
from meshwright.compute.tensor.copies import HeadGroups
from meshwright.compute.tensor.cross_entropy import chunked_token_losses
from meshwright.compute.tensor.head import HeadShape, TableHead
from meshwright.compute.tensor.kit import LinearPair, LinearRole, NormKind, Where
from meshwright.compute.tensor.linear import Addends, Local, at_once, linear, lookup
from meshwright.compute.tensor.norms import GroupNorm
from meshwright.compute.tensor.products import PLAIN, LinearLayer, Products
from meshwright.compute.tensor.router import ExpertsShape
from meshwright.ranks.collectives import cross
from meshwright.ranks.mesh import Mesh

TensorFunction = Callable[[Tensor], Tensor]
"""A kit's function on a layer's input or output."""

LinearInGraph = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Products], Tensor]
"""in_graph(x, weight, bias, anchor, layer_index, products): x W + b of a layer (graphs.py)."""


class Embedding(ShardedModule):
    """A table [V, H]; a call returns rows.

    If an axis shards the rows, each rank looks up the ids in its shard and returns zeros for other ids; `after` sums
    over ranks.
    """

    def __init__(
        self, mesh: Mesh, num_rows: int, hidden: int, initial: Initial, placements: Placements = UNPLACED, *,
        before: TensorFunction = UNCUT.part, after: TensorFunction = UNCUT.whole, addends: Addends = at_once,
    ) -> None:  # fmt: skip
        super().__init__(mesh)
        self.before, self.after, self.addends = before, after, addends
        self.axes = [axis for axis, shard in placements.items() if shard.dim == 0]
        self.weight = self.declare("weight", ShardSpec((num_rows, hidden), placements, initial, TABLE))

    def forward(self, ids: Tensor) -> Tensor:
        if not self.axes:
            return lookup(ids, self, self.addends)  # [B, T, H]
        rows = self.before(ids) - self.mesh.index(*self.axes) * self.weight.shape[0]
        mine = (rows >= 0) & (rows < self.weight.shape[0])
        found = lookup(torch.where(mine, rows, 0), self, self.addends)
        return self.after(found * mine.unsqueeze(-1))


class SerialLinear(LinearLayer):
    """A linear x W + b over the last dim of x, with W [in, G, out/G]: y = after(before(x) W + b)."""

    in_graphs = True
    in_graph: LinearInGraph | None = None
    """Computes the product in a compiled graph."""
    layer_index: Tensor
    anchor: Tensor

    def __init__(
        self, mesh: Mesh, inputs: int, outputs: tuple[int, ...], initial: Initial, placements: Placements = UNPLACED,
        *, bias: bool = True, products: Products = PLAIN, before: TensorFunction = UNCUT.part,
        after: TensorFunction = UNCUT.whole,
    ) -> None:  # fmt: skip
        super().__init__(mesh)
        self.products, self.before, self.after = products, before, after
        self.weight = self.declare("weight", ShardSpec((inputs, *outputs), placements, initial))
        self.bias = self.declare("bias", ShardSpec(outputs, initial=ZEROS, role=BIAS)) if bias else None

    def join_graph(self, layer_index: int, in_graph: LinearInGraph) -> None:
        """Use `in_graph` for the product in compiled graphs.

        Args:
            layer_index: index of the layer in the process; stored as a tensor, since graphs hold numbers as constants.
            in_graph: computes the product in a graph.
        """
        self.register_buffer("layer_index", torch.tensor(layer_index), persistent=False)
        anchor = torch.empty(0, device=self.mesh.device, requires_grad=True)
        self.register_buffer("anchor", anchor, persistent=False)
        self.in_graph = in_graph

    def forward(self, x: Tensor) -> Tensor:
        bias, weight = None if self.bias is None else self.bias.flatten(), self.weight.flatten(1)
        if self.in_graph is not None and torch.compiler.is_compiling():
            y = self.in_graph(self.before(x), weight, bias, self.anchor, self.layer_index, self.products)
        else:
            y = linear(self.before(x), weight, bias, self, self.products)
        return self.after(y.unflatten(-1, self.weight.shape[1:]) if self.weight.dim() > 2 else y)


class SerialHead(TableHead):
    """A head with the whole table; padding rows are left out.

    `token_losses` and `logits` serve evaluation and generation, without gradients.
    """

    def token_losses(self, h: Tensor, labels: Tensor) -> Tensor:
        """Return each token's loss [B, T] in float32 or better; 0 for tokens that are not counted."""
        losses = chunked_token_losses(h.flatten(0, -2), self.block, self.bias, labels.flatten(), self.classes)
        return losses.view(labels.shape)

    def logits(self, h: Tensor) -> Tensor:
        """Return logits [..., V] of hidden states [..., H], without the padding of the vocabulary."""
        bias = None if self.bias is None else self.bias[: self.classes.vocabulary]
        table = self.block[: self.classes.vocabulary]
        logits = self.classes.products.multiply(h.reshape(-1, h.shape[-1]), table.t(), bias).view(*h.shape[:-1], -1)
        if self.classes.cap is not None:
            logits = torch.tanh(logits / self.classes.cap) * self.classes.cap
        return logits


def grouped(inner: int, groups: int) -> tuple[int, ...]:
    """Return the output dims of a linear with `groups` groups that are each split separately."""
    return (inner,) if groups == 1 else (groups, inner // groups)


class KitBase:
    """Base of all kits: every method but `experts`, for layers that no axis shards."""

    hidden: ClassVar[Placements] = UNPLACED
    """The placements of a vector [H] outside of pairs."""

    def __init__(self, mesh: Mesh, boundary: Boundary = UNCUT, arithmetic: Arithmetic = AT_ONCE) -> None:
        """Make a kit. `boundary`: of activations and pairs; `arithmetic`: computes this rank's part of pairs."""
        self.mesh, self.arithmetic, self.parts, self.inner = mesh, arithmetic, arithmetic.parts, arithmetic
        self.boundary, self.split_axes = boundary, boundary.split_axes
        self.kept: dict[Any, Tensor] = {}

    def outside(self, layer: ShardedModule) -> nn.Module:
        """Return the layer for use between pairs. Kits may return a stand-in on ranks that do not compute the layer."""
        return layer

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        return self.outside(Embedding(self.mesh, num_rows, hidden, initial, addends=self.arithmetic.lookup()))

    def norm(
        self, width: int, epsilon: float, *, kind: NormKind = "layer", groups: int = 1, bias: bool = True,
        inside: bool = False, over_heads: bool = False,
    ) -> nn.Module:  # fmt: skip
        layer: ShardedModule
        if kind == "group":
            placements = self.boundary.inner(0) if inside else self.hidden
            layer = GroupNorm(self.mesh, width, groups, epsilon, placements)
        else:
            # One weight for all heads: each rank's gradient covers the rank's heads, so ranks sum their gradients.
            layer = self.arithmetic.norm(
                self.mesh, width, epsilon, kind, bias=bias and kind == "layer",
                placements=self.boundary.inner(0) if over_heads else self.hidden,
                heads_over=tuple(self.boundary.inner(0)) if inside and not over_heads else (),
                inside=inside, over_heads=over_heads,
            )  # fmt: skip
        return layer if inside else self.outside(layer)

    def linear(self, role: LinearRole, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        before, after = (self.boundary if role == end else UNCUT for end in ("patches", "scores"))
        return SerialLinear(
            self.mesh, inputs, (outputs,), initial, bias=bias and role == "transform",
            products=self.arithmetic.between(role, outputs), before=before.part, after=after.whole,
        )  # fmt: skip

    @property
    def branches(self) -> LinearPair:
        return self

    def expand(
        self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
        heads: HeadGroups | None = None,
    ) -> nn.Module:  # fmt: skip
        return SerialLinear(
            self.mesh, hidden, grouped(inner, groups), initial, bias=bias, products=self.arithmetic.products
        )  # fmt: skip

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        return self.expand(inner, hidden, initial, bias=bias)  # no axis cuts pairs here, so both are the same

    def enter(self, x: Tensor, heads: int) -> Tensor:
        boundary, local_heads, start_sum = self.boundary, self.local_heads(heads), self.arithmetic.start_sum_of_heads
        if boundary is UNCUT and torch.compiler.is_compiling():
            return x.unsqueeze(2).expand(-1, -1, local_heads, -1)
        return cross(x, lambda x: start_copies(x, local_heads, boundary), lambda dy: start_sum(dy, boundary))

    def leave(self, x: Tensor) -> Tensor:
        boundary, local_heads, start_sum = self.boundary, x.shape[2], self.arithmetic.start_sum_of_heads
        return cross(x, lambda x: start_sum(x, boundary), lambda dy: start_copies(dy, local_heads, boundary))

    def local(
        self, shape: tuple[int, ...], dim: int, initial: Initial, role: Role, *, by_run: bool = False
    ) -> nn.Module:  # fmt: skip
        spec = ShardSpec(shape, self.boundary.inner(dim), initial, role)
        return Local(self.mesh, spec, self.arithmetic.sample_runs * (self.arithmetic.query_runs if by_run else 1))

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        return self.outside(self.arithmetic.head(self.mesh, shape, tied, UNCUT, SerialHead))

    def local_heads(self, heads: int) -> int:
        return self.arithmetic.heads_of(heads, self.mesh.size(*self.boundary.inner(0)))

    def slice(self, x: Tensor, where: Where) -> Tensor:
        return self.boundary.part(x) if where == "hidden" else x

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        return nullcontext()  # one rank, or a kit with a separate stream on each rank already


class SerialKit(KitBase):
    """The kit of one device."""

    def experts(self, shape: ExpertsShape) -> nn.Module:
        return self.arithmetic.experts(self.mesh, shape, self.boundary)
