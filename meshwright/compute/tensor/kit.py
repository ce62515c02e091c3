"""The kit: the words in which a model is written once, whatever cuts its activations.

A model calls these and plain torch functions that act element by element or head by head; it knows no axis.
`expand` and `contract` are the first and second linear of a pair: between them the inner width may be split.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Literal, Protocol

from torch import Tensor, nn

from meshwright.compute.parameters.role import Role
from meshwright.compute.parameters.shard import Initial

if TYPE_CHECKING:
    from meshwright.compute.tensor.copies import HeadGroups
    from meshwright.compute.tensor.head import HeadShape
    from meshwright.compute.tensor.router import ExpertsShape


class LinearPair(Protocol):
    """Where the first and second linear of a pair come from. `bias`: whether they add one."""

    def expand(
        self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
        heads: HeadGroups | None = None,
    ) -> nn.Module:  # fmt: skip
        """[B, T, H] -> [B, T, groups, N/groups]: each group (query, key, value, say) is split over ranks by itself.

        One group: [B, T, N]. `heads`: N is queries, keys and values of these; where ranks are more than key-value heads
        (local_heads(heads.count) is 0) a rank gets some queries of one head, its key and its value,
        [B, T, (G/c + 2) E] (copies.py).
        """

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        """[B, T, N] -> [B, T, H]."""


NormKind = Literal["layer", "rms", "group"]
"""layer: over H. rms: x / rms(x) times a weight, over H (Zhang and Sennrich, arXiv 1910.07467). group: over T and the
channels of a group (Wu and He, arXiv 1803.08494)."""

LinearRole = Literal["transform", "patches", "scores"]
"""A linear outside of pairs, by where its input and output are. transform: [B, t, I] -> [B, t, N], both as the kit
holds activations; for heads and shortcuts, elsewhere in blocks use a pair. patches: from rows of numbers that every
rank has whole and that need no gradient, [B, T, I] -> [B, T, N]. scores: [B, t, I] -> [B, T, N], alike on all ranks
that hold these rows: what a loss over tokens is made of; what a kit that splits the sequence gives behind the first
token's scores is of no use where t < T. t <= T, as in a head (head.py)."""

Where = Literal["batch", "inside", "hidden"]
"""batch: rows of a replica's batch [B, ...], as models see it. inside: those that a rank sees inside of `branches`;
masks are sliced so. hidden: the part of x [T, H] that lies outside of pairs."""


class Kit(LinearPair, Protocol):
    """The layers that a model is written in. Each carries its parameters' ShardSpecs.

    `branches`: for a pair whose inside falls into branches that need nothing of each other: the heads of an attention,
    the paths of a ResNeXt block. Inside of one, a rank may see other rows of the batch than outside.
    A pair of the kit itself, a feed-forward's, has slices of its inner width at most.

    `split_axes`: the mesh axes whose ranks hold different parts of the activations between two pairs of linears, so
    that their dropout masks must differ; on all others they must be the same.

    `parts`: those of its inner width that a rank multiplies one by one, each with a key-value head of its own.
    `inner`: the arithmetic between the two linears of its own pairs; None: torch's. `kept`: tensors derived from
    weights, to be cleared when a step has changed these.
    """

    split_axes: tuple[str, ...]
    parts: int
    inner: Any
    kept: dict[Any, Tensor]

    @property
    def branches(self) -> LinearPair: ...

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        """ids [B, T] -> [B, T, H]."""

    def norm(
        self, width: int, epsilon: float, *, kind: NormKind = "layer", groups: int = 1, bias: bool = True,
        inside: bool = False,
    ) -> nn.Module:  # fmt: skip
        """[B, T, H] -> [B, T, H]. `groups`: of channels, of a group norm.

        `bias`: of a layer norm; none where nothing behind it feels one: its gradient would be rounding alone, which
        Adam makes steps of. `inside`: of `branches`; layer and rms then norm a head's width, [..., E] -> [..., E], by
        one weight for all heads, and a rank has whole groups.
        """

    def linear(self, role: LinearRole, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        """A linear outside of pairs. `bias`: of a transform; patches have none, nor have scores: a softmax over tokens
        or texts does not change by a number that all of them have."""

    def enter(self, x: Tensor, heads: int) -> Tensor:
        """An activation that all heads share comes into `branches` by no linear: x as the kit holds activations,
        [B, T, N], to a copy for each head here, [B, T, local_heads(heads), N]. Backward: `leave`."""

    def leave(self, x: Tensor) -> Tensor:
        """The sum over all heads, of all ranks: [B, T, local heads, N] to [B, T, N] as the kit holds activations.
        Backward: `enter`."""

    def local(self, shape: tuple[int, ...], dim: int, initial: Initial, role: Role) -> nn.Module:
        """A parameter inside of `branches`, split along `dim` as their inner width is: call it for this rank's part."""

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        """A `TableHead` (head.py), or what stands for one. `tied`: the token embedding whose weight it shares; None: a
        weight of its own."""

    def local_heads(self, heads: int) -> int:
        """How many attention heads (or paths) this rank computes; 0 where ranks are more."""

    def slice(self, x: Tensor, where: Where) -> Tensor:
        """This rank's part of numbers without a gradient that every rank has whole. Train loops slice batches, models
        see the result."""

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        """Around what draws random numbers inside a pair of linears, with probability `rate`: each rank its own."""


class ExpertsKit(Kit, Protocol):
    """A kit with feed-forwards of experts: its section says `holds_experts`."""

    def experts(self, shape: ExpertsShape) -> nn.Module:
        """[B, T, H] and the tokens' places [T] in their sequences, there in training, to ([B, T, H],), and each
        sequence's balance [B] where it is asked for."""
