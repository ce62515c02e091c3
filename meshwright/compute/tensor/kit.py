"""The kit: the layers that a model is built from, independent of the tensor parallelism that splits activations.

A model calls the kit and plain torch functions that act per element or per head; models name no mesh axis.
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
    """Factory of the first (`expand`) and second (`contract`) linear of a pair. `bias`: whether linears add biases."""

    @property
    def inner(self) -> Any:
        """The arithmetic between the two linears; None: torch's."""

    def expand(
        self, hidden: int, inner: int, initial: Initial, *, groups: int = 1, bias: bool = True,
        heads: HeadGroups | None = None,
    ) -> nn.Module:  # fmt: skip
        """Make a linear [B, T, H] -> [B, T, groups, N/groups]; each group (e.g. query, key, value) is split separately.

        One group: [B, T, N]. `heads`: N holds queries, keys and values of these head groups. If there are more ranks
        than key-value heads (local_heads(heads.count) is 0), a rank gets some queries of one head with the head's key
        and value, [B, T, (G/c + 2) E] (copies.py).
        """

    def contract(self, inner: int, hidden: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        """Make a linear [B, T, N] -> [B, T, H]."""


NormKind = Literal["layer", "rms", "rms-around-one", "group"]
"""layer: over H. rms: x / rms(x) times a weight, over H (Zhang and Sennrich, arXiv 1910.07467). rms-around-one: times
1 + weight, with weights that begin at 0 (Gemma). group: over T and the channels of a group (Wu and He, arXiv
1803.08494)."""

LinearRole = Literal["transform", "patches", "scores"]
"""A linear outside of pairs, by the layout of input and output (t <= T, as in head.py):

- transform: [B, t, I] -> [B, t, N], both sharded as the kit's activations; for heads and shortcuts (in blocks: pairs).
- patches: [B, T, I] -> [B, T, N], from rows that every rank holds whole and that need no gradient.
- scores: [B, t, I] -> [B, T, N], equal on all ranks with these rows, for a loss over tokens. If t < T, only the first
  token's scores are valid under a kit that splits the sequence."""

Where = Literal["batch", "inside", "hidden"]
"""batch: this rank's rows of a replica's batch [B, ...], outside of branches. inside: this rank's rows inside of
`branches`; masks are sliced this way. hidden: this rank's part of x [T, H] outside of pairs."""


class Kit(LinearPair, Protocol):
    """Factory of a model's layers. Each layer has the ShardSpecs of its parameters.

    `branches`: pairs with independent branches between the two linears: the heads of an attention, the paths of a
    ResNeXt block. Inside of branches, a rank may hold other rows of the batch than outside. A pair of the kit itself (a
    feed-forward) only splits the inner width into slices.

    `split_axes`: mesh axes with different activations on each rank between two pairs of linears. Dropout masks must
    differ along these axes and be equal along all others.

    `parts`: number of parts of the inner width that a rank multiplies one by one, each with a separate key-value head.
    `kept`: tensors derived from weights, to be cleared after a step has changed the weights.
    """

    split_axes: tuple[str, ...]
    parts: int
    kept: dict[Any, Tensor]

    @property
    def branches(self) -> LinearPair: ...

    def embedding(self, num_rows: int, hidden: int, initial: Initial) -> nn.Module:
        """Make an embedding, ids [B, T] -> [B, T, H]."""

    def norm(
        self, width: int, epsilon: float, *, kind: NormKind = "layer", groups: int = 1, bias: bool = True,
        inside: bool = False, over_heads: bool = False,
    ) -> nn.Module:  # fmt: skip
        """Make a norm, [B, T, H] -> [B, T, H].

        Args:
            width: the normed width.
            epsilon: the addend to the variance.
            kind: the kind of norm (`NormKind`).
            groups: number of channel groups of a group norm.
            bias: whether a layer norm adds a bias. Pass False if later layers cancel a bias: the gradient would be
                only rounding errors, and Adam would turn them into full steps.
            inside: True inside of `branches`. Layer and rms then norm a head's width, [..., E] -> [..., E], with one
                weight for all heads, and a rank holds whole groups.
            over_heads: True inside of branches for an rms over the numbers of all heads, [..., heads E] -> the same;
                `width` counts the heads of all ranks.
        """

    def linear(self, role: LinearRole, inputs: int, outputs: int, initial: Initial, *, bias: bool = True) -> nn.Module:
        """Make a linear outside of pairs. `bias`: whether a transform adds one. Patches and scores have no bias: a
        softmax over tokens or texts does not change if all scores change by one number."""

    def enter(self, x: Tensor, heads: int) -> Tensor:
        """Broadcast an activation that all heads share to this rank's heads, without a linear.

        x [B, T, N], sharded as the kit's activations -> [B, T, local_heads(heads), N]. Backward: `leave`.
        """

    def leave(self, x: Tensor) -> Tensor:
        """Sum over the heads of all ranks: [B, T, local heads, N] -> [B, T, N], sharded as the kit's activations.
        Backward: `enter`."""

    def local(
        self, shape: tuple[int, ...], dim: int, initial: Initial, role: Role, *, by_run: bool = False
    ) -> nn.Module:  # fmt: skip
        """Make a parameter inside of `branches`, split along `dim` like the inner width. A call returns this part.

        If a kit adds gradients in pieces, a call returns the part once for each run of samples; `by_run`: once for each
        run of queries of these.
        """

    def head_loss(self, shape: HeadShape, tied: nn.Module | None = None) -> nn.Module:
        """Make a `TableHead` (head.py) or a module with the same calls. `tied`: the token embedding that shares the
        weight with the head; None: a separate weight."""

    def local_heads(self, heads: int) -> int:
        """Return the number of attention heads (or paths) on this rank; 0 if there are more ranks than heads."""

    def slice(self, x: Tensor, where: Where) -> Tensor:
        """Slice a tensor without gradient that every rank holds whole. The training loop slices batches for models."""

    def own_randomness(self, rate: float) -> AbstractContextManager[None]:
        """Return a context for random draws (dropout with probability `rate`) inside a pair: different on each rank."""


class ExpertsKit(Kit, Protocol):
    """Kit with mixtures of experts; the kit's config section has `holds_experts`."""

    def experts(self, shape: ExpertsShape) -> nn.Module:
        """Make a mixture of experts of (x [B, T, H], positions [T] of the tokens in their sequences, in training only).

        Returns of a call: ([B, T, H],), with each sequence's balance loss [B] if `shape` asks for one.
        """
