"""The base of all kits' heads: a table of classes, an optional bias, and the loss.

The table is a parameter of the head, or the table of the token embedding. A kit passes the placements of table and
bias, and a boundary that gathers whole hidden states on every rank with classes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.role import BIAS, TABLE
from meshwright.compute.parameters.shard import Initial, Placements, ShardedModule, ShardSpec, WriteGradient
from meshwright.compute.tensor.boundary import UNCUT, Boundary
from meshwright.compute.tensor.cross_entropy import (
    Classes,
    Objective,
    ScoresClasses,
    chunked_loss,
    give_to_autograd,
    num_correct,
    objective_loss,
)
from meshwright.compute.tensor.islands import UsesIslands
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import PlannedMesh


@dataclass(frozen=True)
class HeadShape:
    """The sizes and options of a head."""

    hidden: int
    vocabulary: int
    """Number of real classes."""
    padded: int
    """Rows of the table: the real classes, then padding."""
    initial: Initial
    bias: bool = False
    smoothing: float = 0.0
    """Share of each token's target that is spread evenly over all real classes."""
    labelled: float = 1.0
    """Share of tokens with labels (cross_entropy.py)."""
    over: tuple[str, ...] = ()
    """A mesh axis that shards the classes if no axis of the kit does."""
    cap: float | None = None
    """The soft cap of logits, cap · tanh(logit / cap) (Gemma 2, arXiv 2408.00118)."""


class TableHead(ShardedModule, UsesIslands, ScoresClasses):
    """A linear over V classes (usually a vocabulary) with cross entropy, chunk by chunk, without whole logits.

    h [B, T, H]; labels [B, t], t <= T. Labels of -100 and tokens without a label are not counted. So a model can pass
    h[:, :1] to further layers and a separate head, with one label per sequence. If a kit splits the sequence, the slice
    is the first token of each part, and only the first part's token is labelled.
    """

    def __init__(
        self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, table: Placements, classes: Placements,
        boundary: Boundary = UNCUT, products: Products = PLAIN,
    ) -> None:  # fmt: skip
        """Make the head.

        Args:
            mesh: the ranks.
            shape: the head's sizes and options.
            tied: the embedding that owns the table; None: the head owns the table.
            table: placements of the table.
            classes: placements of logits and bias by class, over one axis or none.
            boundary: makes h whole on this rank.
            products: multiplies.
        """
        super().__init__(mesh)
        self.boundary = boundary
        comm = mesh.comm(*classes)
        whole = isinstance(mesh, PlannedMesh) and mesh.whole_logits
        self.classes = Classes(
            shape.vocabulary, comm, shape.smoothing, mesh.device_type, shape.labelled, whole=whole, products=products,
            cap=shape.cap,
        )  # fmt: skip
        if tied is None:
            spec = ShardSpec((shape.padded, shape.hidden), table, shape.initial, TABLE)
            self.weight = self.declare("weight", spec)
        else:
            self.tied = (tied,)  # in a tuple: the weight belongs to the embedding and is registered there once
        spec = ShardSpec((shape.padded,), classes, role=BIAS)
        self.bias = self.declare("bias", spec) if shape.bias else None

    @property
    def block(self) -> Tensor:
        """This rank's part of the table."""
        weight: Tensor = self.weight if "weight" in self.specs else self.tied[0].weight  # type: ignore[assignment]
        return weight

    def give(self, like: Tensor, write: WriteGradient) -> Tensor | None:
        """Add the gradient of `block` immediately: it is already computed, even if other gradients are deferred."""
        owner: ShardedModule = self if "weight" in self.specs else self.tied[0]  # type: ignore[assignment]
        return owner.add_gradient("weight", like, write, may_wait=False)

    def own_classes(self, block: Tensor) -> Tensor:
        """Return the rows [V/p, H] of this rank's classes, from this rank's part of the table."""
        return block

    def operands(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the labelled tokens [B·t, H] of whole hidden states, and the table rows of this rank's classes."""
        whole = self.boundary.enter(h)  # [B, T, H]
        return whole[:, : labels.shape[1]].flatten(0, -2), self.own_classes(self.block)

    def forward(self, h: Tensor, labels: Tensor, scale: float | Objective) -> Tensor:
        """Return the sum of the counted tokens' losses, times `scale`; or an objective of the sums of rows."""
        rows, table = self.operands(h, labels)
        classes = replace(self.classes, islands=self.islands)
        # With other rows than the block's, autograd carries the gradient back to the block.
        give = self.give if table is self.block else give_to_autograd
        if callable(scale):
            return objective_loss(rows, table, self.bias, labels, classes, scale, give)
        return chunked_loss(rows, table, self.bias, labels, classes, scale, give)

    @torch.no_grad()
    def num_correct(self, h: Tensor, labels: Tensor) -> Tensor:
        """Count the tokens of this rank's rows with the label as the most likely class. Without gradients."""
        rows, table = self.operands(h, labels)
        return num_correct(rows, table, self.bias, labels.flatten(), self.classes)
