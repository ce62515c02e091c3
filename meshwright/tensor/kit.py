"""The kit: the words in which a model is written once, whatever cuts its activations.

A model calls these and plain torch functions that act element by element or head by head; it knows no axis.
`expand` and `contract` are the first and second linear of a pair: between them the inner width may be split.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from meshwright.shard import Initial


class Head(Protocol):
    """The language-model head with its loss."""

    def __call__(self, h: Tensor, labels: Tensor, scale: float) -> Tensor:
        """The sum of the counted tokens' losses times `scale`. h [B, T, H]; labels [B, T], -100 is not counted."""

    def token_losses(self, h: Tensor, labels: Tensor) -> Tensor:
        """Each token's loss in float32, [B, T]; 0 where it is not counted. Without gradients."""

    def logits(self, h: Tensor) -> Tensor:
        """[B, T, V], without the padding of the vocabulary. Without gradients."""


class Kit(Protocol):
    """What a model may ask for. Each word makes a module whose parameters carry their ShardSpec."""

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        """ids [B, T] -> [B, T, H]."""

    def norm(self, hidden: int, epsilon: float) -> nn.Module:
        """Layer norm over H: [B, T, H] -> [B, T, H]."""

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1) -> nn.Module:
        """[B, T, H] -> [B, T, groups, N/groups]: each group (query, key, value, say) is split over ranks by itself.

        One group: [B, T, N].
        """

    def contract(self, inner: int, hidden: int, initial: Initial) -> nn.Module:
        """[B, T, N] -> [B, T, H]."""

    def head_loss(
        self, hidden: int, vocabulary: int, padded: int, initial: Initial, tied: nn.Module | None
    ) -> nn.Module:
        """A `Head`. `tied`: the token embedding whose weight it shares; None: a weight of its own."""

    def local_heads(self, heads: int) -> int:
        """How many attention heads this rank computes."""

    def slice_batch(self, x: Tensor) -> Tensor:
        """This rank's rows of a replica's batch [B, ...]."""
