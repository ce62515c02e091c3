"""The base of all kits' heads: a table of classes (its own, or a token embedding's), an optional bias, and the loss.

A kit says how table and bias are cut, and by its boundary how whole hidden states come to this rank's classes.
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
    ScoresClasses,
    chunked_loss,
    give_to_autograd,
    num_correct,
)
from meshwright.compute.tensor.islands import UsesIslands
from meshwright.compute.tensor.products import PLAIN, Products
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import PlannedMesh


@dataclass(frozen=True)
class HeadShape:
    """A head as the model asks for it; `padded` rows in the table, `vocabulary` of them real classes.

    `smoothing`: the share of each token's target that all real classes have in equal parts; `labelled`: the
    share of tokens that have labels (cross_entropy.py). `over`: an axis of the run's that cuts the classes, where no
    axis of the kit does.
    """

    hidden: int
    vocabulary: int
    padded: int
    initial: Initial
    bias: bool = False
    smoothing: float = 0.0
    labelled: float = 1.0
    over: tuple[str, ...] = ()


class TableHead(ShardedModule, UsesIslands, ScoresClasses):
    """A linear over V classes (a vocabulary, usually) with its cross entropy: logits of the rank's classes and the loss
    over all, chunk by chunk, never whole logits.

    h [B, T, H]; labels [B, t], t <= T: -100 is not counted, and neither is a token without a label. (So a model can put
    h[:, :1] into layers and a head of its own, and label one token, also where a kit splits the sequence: there the
    slice is the first token of each part, and the first of these is the labelled one.)
    """

    def __init__(
        self, mesh: Mesh, shape: HeadShape, tied: nn.Module | None, table: Placements, classes: Placements,
        boundary: Boundary = UNCUT, products: Products = PLAIN,
    ) -> None:  # fmt: skip
        """`table`: placements of the table. `classes`: of the classes where logits are made, and so of the bias: over
        one axis or none. `boundary`: by which h enters."""
        super().__init__(mesh)
        self.boundary = boundary
        comm = mesh.comm(*classes)
        whole = isinstance(mesh, PlannedMesh) and mesh.whole_logits
        self.classes = Classes(
            shape.vocabulary, comm, shape.smoothing, mesh.device_type, shape.labelled, whole=whole, products=products
        )
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
        """Add the gradient of `block` at once, even where weight gradients are deferred: it is already computed."""
        owner: ShardedModule = self if "weight" in self.specs else self.tied[0]  # type: ignore[assignment]
        return owner.add_gradient("weight", like, write, may_wait=False)

    def own_classes(self, block: Tensor) -> Tensor:
        """The rows [V/p, H] of this rank's classes, of what it holds of the table."""
        return block

    def operands(self, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens [B·t, H] that labels [B, t] are for, of whole hidden states of the rank's rows; and the rows of
        the table that are its classes."""
        whole = self.boundary.enter(h)  # [B, T, H]
        return whole[:, : labels.shape[1]].flatten(0, -2), self.own_classes(self.block)

    def forward(self, h: Tensor, labels: Tensor, scale: float) -> Tensor:
        """The sum of the counted tokens' losses times `scale`."""
        rows, table = self.operands(h, labels)
        classes = replace(self.classes, islands=self.islands)
        give = self.give if table is self.block else give_to_autograd  # whose backward pass brings it to the block
        return chunked_loss(rows, table, self.bias, labels, classes, scale, give)

    @torch.no_grad()
    def num_correct(self, h: Tensor, labels: Tensor) -> Tensor:
        """How many counted tokens of this rank's rows have their label as the likeliest class. Without gradients."""
        rows, table = self.operands(h, labels)
        return num_correct(rows, table, self.bias, labels.flatten(), self.classes)
