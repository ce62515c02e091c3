"""Weights kept as slices: the weights of a part of the model are gathered for its computation, and freed afterwards.

| sync  | gradients of S bytes           | weights of P bytes                     | a rank sends, m microbatches   |
|-------|--------------------------------|----------------------------------------|--------------------------------|
| zero3 | reduce-scatter each microbatch | all-gather of a part before its        | m (n-1)/n S for gradients, at  |
|       |                                | forward, and again before its backward | most 2m (n-1)/n P for weights  |

ZeRO-3 (arXiv 1910.02054, section 5.3; torch's fully_shard, arXiv 2304.11277). A part is the unit that a chain runs at
once: the embeddings, a layer, the head. Parameters shared by two parts (a tied table) are gathered for each part. While
a part is computed, the next part's weights are gathered: the next layer in forward passes, the previous in backward
passes. So a rank holds slices of all weights, and two whole parts.

Weights stay whole if needed again at once: between forward and backward pass, and between microbatches. With L layers
on one device, a microbatch gathers L and then L-1 layers; the first layer is still whole for the next microbatch. In a
pipeline stage the next task is unknown: each task gathers all parts of its chunk.

Autograd keeps weights for the backward pass as references. A part's memory is therefore always the same storage, freed
and filled again by resizing. For embeddings and head, only the weights that autograd has kept are gathered again: a
look-up's gradient needs no table.

Recomputed layers gather when the forward pass is repeated in the backward pass. With groups of one layer, nothing is
gathered in addition.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshwright.compute.model import EMBEDDINGS, HEAD, Batch, Chunk, Hidden, Model, RunsParts, Scales
from meshwright.compute.parameters.bucket import Bucket, FlatWeights, PartsUsing
from meshwright.compute.parameters.fixed import FixedPoint
from meshwright.ranks.agreement import make_equal
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.data_parallel.sharded import Sharded, SlicedSum, Zero2, allocate, free
from meshwright.strategies.data_parallel.strategy import BucketBytes, HeldBytes, Policy


class Zero3(Zero2):
    """Rank r owns the r-th slice of every bucket, of weights and gradients; nothing is published."""

    publishes = False


@dataclass(frozen=True)
class Move:
    """Buckets to free, to gather and wait for, and to start gathering when a part begins, each in one order on all
    ranks."""

    released: tuple[int, ...]
    gathered: tuple[int, ...]
    started: tuple[int, ...]

    @property
    def sent(self) -> tuple[int, ...]:
        return self.gathered + self.started


class Walk:
    """A rank's sequence of parts, and the buckets that are whole. Pure, so that the planner can use the class.

    `buckets`: by part. `backward_buckets`: buckets that the backward passes of embeddings and head read. `chunks`: of
    the chain, on this rank. If the chain is one chunk, the backward pass follows the forward pass at once, and the next
    microbatch follows the backward pass.
    """

    def __init__(
        self, buckets: Mapping[int, Collection[int]], backward_buckets: Mapping[int, set[int]], chunks: Sequence[Chunk]
    ) -> None:
        self._order = {layer: chunk.parts for chunk in chunks for layer in chunk.parts}
        self._buckets = buckets
        self._read_back = {**buckets, **backward_buckets}
        """The buckets that the backward pass of each part reads."""
        self._returns = len(chunks) == 1 and chunks[0].first and chunks[0].last
        self._back_at: int | None = None
        """The part with the latest begun backward pass; None in a forward pass."""
        self._begins = True
        self.held: set[int] = set()

    def begin(self) -> None:
        """Begin a forward pass."""
        self._back_at, self._begins = None, True

    def forward(self, layer: int) -> Move:
        """Return the moves of a part's forward pass, or of its recomputation in a backward pass."""
        fresh, self._begins = self._begins and not self._returns, False
        order, here = self._order[layer], self._buckets[layer]
        index = order.index(layer)
        # Recomputed: the part runs forward again within the backward pass, which continues with the previous part.
        if self._back_at in order and layer >= self._back_at:
            return self._back_from(layer, here, fresh=False)
        if index + 1 < len(order):
            return self._moved(here, ahead=self._buckets[order[index + 1]], fresh=fresh)
        # After the last part the backward pass begins: the layer before is needed again at once.
        turns = index > 0 and self._returns
        return self._moved(here, stays=self._buckets[order[index - 1]] if turns else (), fresh=fresh)

    def backward(self, layer: int) -> Move:
        """Return the moves of a part's backward pass."""
        before, self._back_at = self._back_at, layer
        order = self._order[layer]
        same = layer == before == HEAD  # the head has two functions; a layer twice in a row is two microbatches
        # A part at or after the previous one begins a new backward task (of any chunk): nothing gathered for the old
        # task stays.
        fresh = (before not in order or layer >= before) and not self._returns and not same
        return self._back_from(layer, self._read_back[layer], fresh=fresh)

    def _back_from(self, layer: int, here: Collection[int], *, fresh: bool) -> Move:
        order = self._order[layer]
        if index := order.index(layer):
            return self._moved(here, ahead=self._read_back[order[index - 1]], fresh=fresh)
        return self._moved(here, stays=self._buckets[order[1]] if len(order) > 1 else (), fresh=fresh)

    def _moved(
        self, here: Collection[int], *, ahead: Collection[int] = (), stays: Collection[int] = (), fresh: bool
    ) -> Move:
        """Return the moves that make `here` and `ahead` whole. `stays`: kept if whole already. `fresh`: free all other
        buckets."""
        wanted = {*here, *ahead, *stays}
        released = self.held if fresh else self.held - wanted
        left = self.held - released
        gathered, started = set(here) - left, set(ahead) - left - set(here)
        self.held = left | gathered | started
        return Move(tuple(sorted(released)), tuple(sorted(gathered)), tuple(sorted(started)))


class GatheredSum(SlicedSum):
    """A bucket with sliced weights, too. Replicas are compared before slicing: later, equal slices are only on ranks of
    different shard groups."""

    def __init__(self, bucket: Bucket, mesh: Mesh, policy: Policy) -> None:
        self.pinned = False
        """Whether the weights stay whole."""
        super().__init__(bucket, mesh, policy)
        self.differing = super().make_equal() if mesh.device.type != "meta" else []
        # The slice gets separate memory, since the bucket's is freed.
        slot = self.slot
        slot.parameter.data = slot.parameter.data.clone()
        self.weights = FlatWeights(slot.parameter.detach(), slot.places, slot.copy_axes)
        free(bucket.values)

    def gather(self) -> None:
        """Start to gather the other ranks' slices of the weights."""
        if not self.pinned:
            allocate(self.bucket.values)
            self.arriving = self.comm.all_gather(self.bucket.values, self.weights.values, wait=False)

    def release(self) -> None:
        """Free the weights' memory."""
        self.wait()
        if not self.pinned:
            free(self.bucket.values)

    def make_equal(self) -> list[str]:
        differing, self.differing = self.differing, []
        if make_equal(self.weights.values, self.mesh.comm(*self.weights.copy_axes)):
            differing += [region.name for region in self.weights.places]
        return differing


class Gathering(Sharded):
    """A strategy that holds slices of all weights, and whole weights of two parts of the model."""

    sum_of = GatheredSum
    every: list[GatheredSum]  # type: ignore[assignment]

    def __init__(self, buckets: Iterable[Bucket], mesh: Mesh, policy: Policy, fixed: FixedPoint | None = None) -> None:
        super().__init__(buckets, mesh, policy, fixed)
        self._index_of = {x.values.untyped_storage()._cdata: index for index, x in enumerate(self.buckets)}
        """Buckets by the storage of their values."""
        self._kept: dict[int, set[int]] = {}
        self._walk = Walk(self._of, self._kept, ())

    def follow(self, model: RunsParts, using: PartsUsing, chunks: Sequence[Chunk]) -> None:
        """Gather the weights of each part of a chain when the part runs."""
        super().follow(model, using, chunks)
        self._kept = {layer: set() for layer in self._of.keys() & {EMBEDDINGS, HEAD}}
        self._walk = Walk(self._of, self._kept, chunks)

    @classmethod
    def held(cls, buckets: Sequence[BucketBytes]) -> HeldBytes:
        """Return the bytes of all slices, and of the two neighbouring whole parts that are largest together."""
        of: dict[int, set[int]] = {}
        for index, each in enumerate(buckets):
            for layer in each.parts:
                of.setdefault(layer, set()).add(index)
        parts = [of[layer] for layer in sorted(of)]
        pairs = (earlier | later for earlier, later in zip(parts, parts[1:] or parts, strict=False))
        two = max((sum(buckets[index].weights for index in pair) for pair in pairs), default=0)
        slices = sum(each.own_weights for each in buckets)
        return super().held(buckets)._replace(weights=slices, passing_weights=two)

    def forward(self, model: Model, batch: Batch, scales: Scales, incoming: Hidden) -> Hidden:
        self._walk.begin()
        return super().forward(model, batch, scales, incoming)

    def publish(self, *, wait: bool = True) -> None:
        super().publish(wait=wait)
        self._release(self._walk.held)
        self._walk.held = set()

    @contextmanager
    def whole_weights(self) -> Iterator[None]:
        """Keep the head's weights whole while entered; other parts are gathered when run."""
        self._walk.begin()
        head = set(self._of[max(self._of)])
        # Sampling and evaluation call the head separately, outside of any part that would gather for it.
        for index in sorted(head - self._walk.held):
            self.every[index].gather()
        self._wait(head)
        for index in head:
            self.every[index].pinned = True
        yield
        for index in head:
            self.every[index].pinned = False
        self._release(self._walk.held | head)
        self._walk.held = set()

    def run_part(self, layer: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part with whole weights; the weights are also gathered for the part's backward pass."""
        self._move(layer, self._walk.forward(layer))
        if not torch.is_grad_enabled():
            return function(*arguments)
        if layer in self._kept:
            # The tensors saved by autograd show which weights the backward passes of embeddings and head read: a
            # look-up saves no table.
            def note(x: Tensor) -> Tensor:
                index = self._index_of.get(x.untyped_storage()._cdata)
                if index is not None:
                    self._kept[layer].add(index)
                return x

            with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
                result = function(*arguments)
        else:
            result = function(*arguments)
        return self._turning(layer, result)

    def _turning(self, layer: int, result: Any) -> Any:
        """Return the result with a hook that gathers the part's weights when the result's gradient is complete."""
        hidden = result if isinstance(result, tuple) else (result,)
        learn = [x for x in hidden if x.requires_grad]
        # An identity node after the part, since hooks on `grad_fn` run too early if a model has two streams.
        turned = iter(_Turn.apply(lambda: self._move(layer, self._walk.backward(layer)), *learn))
        hidden = tuple(next(turned) if x.requires_grad else x for x in hidden)
        return hidden if isinstance(result, tuple) else hidden[0]

    def _move(self, layer: int, move: Move) -> None:
        """Wait for the weights of the part that begins, and start gathering the next part's."""
        self._release(move.released)
        for index in move.gathered:
            self.every[index].gather()
        self._wait(set(self._of[layer]) & self._walk.held)
        for index in move.started:
            self.every[index].gather()

    def _release(self, indices: Collection[int]) -> None:
        for index in sorted(indices):
            self.every[index].release()


class _Turn(torch.autograd.Function):
    """An identity; backward calls `visit` when all gradients are there."""

    @staticmethod
    def forward(ctx: Any, visit: Callable[[], None], *hidden: Tensor) -> Hidden:
        # An output without a gradient gets None, not a tensor of zeros.
        ctx.set_materialize_grads(False)
        ctx.visit = visit
        return tuple(x.view_as(x) for x in hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        ctx.visit()
        return None, *gradients
