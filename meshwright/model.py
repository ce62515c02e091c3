"""A model as a chain: begin, its layers, end, the losses. A rank may hold the whole chain or a stretch of it.

What passes from layer to layer is a tuple of tensors, of the same shapes after every layer, so that a pipeline may cut
the chain between any two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from meshwright.batch import Batch, Scales

Hidden = tuple[Tensor, ...]
"""The activations between two layers; one tensor [B, T, H] in a model without a second stream."""


@dataclass(frozen=True)
class Stretch:
    """A contiguous part of the chain: these layers, and its beginning (embeddings) and end (head, losses) or not."""

    layers: range
    first: bool
    last: bool

    @classmethod
    def whole(cls, num_layers: int) -> Stretch:
        return cls(range(num_layers), True, True)


@dataclass(frozen=True)
class Costs:
    """What the links of the chain cost, in any one unit: embeddings, each layer, head and losses."""

    begin: float
    layers: tuple[float, ...]
    end: float

    @property
    def total(self) -> float:
        return self.begin + sum(self.layers) + self.end


class Model(Protocol):
    """The chain, called whole or link by link. A link that a rank does not hold must not be called."""

    labels: tuple[str, ...]
    """The batch's entries that are counted, one for each loss."""
    inside: tuple[str, ...]
    """The batch's entries that are read inside of branches, and sliced for there: masks of attention."""

    def __call__(self, batch: Batch, scales: Scales) -> Tensor:
        """The summed losses, each times its scale: `loss(trunk(batch), batch, scales)`."""

    def trunk(self, batch: Batch) -> Tensor:
        """The normed hidden states [B, T, H]: `end(run_layers(begin(batch), batch))`."""

    def begin(self, batch: Batch) -> Hidden:
        """What the first layer reads."""

    def run_layers(self, hidden: Hidden, batch: Batch) -> Hidden:
        """The stretch's layers, one after the other."""

    def end(self, hidden: Hidden) -> Tensor:
        """The normed hidden states [B, T, H] of what the last layer gives."""

    def loss(self, h: Tensor, batch: Batch, scales: Scales) -> Tensor:
        """The losses of hidden states."""

    def right(self, h: Tensor, batch: Batch) -> list[int]:
        """How many counted elements of each label are the model's likeliest answer. Without gradients."""
