"""The kit: the words in which a model is written once, whatever cuts its activations.

A model calls these and plain torch functions that act element by element or head by head; it knows no axis.
`expand` and `contract` are the first and second linear of a pair: between them the inner width may be split.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from meshwright.shard import Initial


class Head(Protocol):
    """A linear over V classes (a vocabulary, usually) with its cross entropy.

    h [B, T, H]; labels [B, t], t <= T: -100 is not counted, and neither is a token without a label. (So a model can put
    h[:, :1] into layers and a head of its own, and label one token, also where a kit splits the sequence: there the
    slice is the first token of each part, and the first of these is the labelled one.)
    """

    def __call__(self, h: Tensor, labels: Tensor, scale: float) -> Tensor:
        """The sum of the counted tokens' losses times `scale`."""

    def right(self, h: Tensor, labels: Tensor) -> int:
        """How many counted tokens of this rank's rows have their label as the likeliest class. Without gradients."""


class WholeHead(Head, Protocol):
    """The serial kit's head, which can also be asked what it computes: by evaluation and generation."""

    def token_losses(self, h: Tensor, labels: Tensor) -> Tensor:
        """Each token's loss in float32, [B, T]; 0 where it is not counted. Without gradients."""

    def logits(self, h: Tensor) -> Tensor:
        """[B, T, V], without the padding of the vocabulary. Without gradients."""


class Kit(Protocol):
    """What a model may ask for. Each layer carries its parameters' ShardSpecs.

    `split_axes`: the mesh axes whose ranks hold different parts of the activations between two pairs of linears, so
    that their dropout masks must differ; on all others they must be the same.
    """

    split_axes: tuple[str, ...]

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        """ids [B, T] -> [B, T, H]."""

    def patches(self, inputs: int, hidden: int, initial: Initial) -> nn.Module:
        """Rows of numbers, whole on every rank and without a gradient: [B, T, inputs] -> [B, T, H]; no bias."""

    def norm(self, hidden: int, epsilon: float) -> nn.Module:
        """Layer norm over H: [B, T, H] -> [B, T, H]."""

    def expand(self, hidden: int, inner: int, initial: Initial, *, groups: int = 1) -> nn.Module:
        """[B, T, H] -> [B, T, groups, N/groups]: each group (query, key, value, say) is split over ranks by itself.

        One group: [B, T, N].
        """

    def contract(self, inner: int, hidden: int, initial: Initial) -> nn.Module:
        """[B, T, N] -> [B, T, H]."""

    def transform(self, inputs: int, outputs: int, initial: Initial) -> nn.Module:
        """[B, t, inputs] -> [B, t, outputs]: a linear outside of a pair, from and to activations as the kit holds them.

        t <= T, as in `Head`. For heads; in blocks, use a pair.
        """

    def head_loss(
        self,
        hidden: int,
        vocabulary: int,
        padded: int,
        initial: Initial,
        tied: nn.Module | None = None,
        *,
        bias: bool = False,
    ) -> nn.Module:
        """A `Head`. `tied`: the token embedding whose weight it shares; None: a weight of its own."""

    def local_heads(self, heads: int) -> int:
        """How many attention heads this rank computes."""

    def slice_batch(self, x: Tensor) -> Tensor:
        """This rank's rows of a replica's batch [B, ...]; the train loop calls it, models see the result."""

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        """Around what draws random numbers inside a pair of linears, with probability `rate`: each rank its own."""

    def end_step(self) -> None:
        """The weights have changed: forget what was derived from them."""
