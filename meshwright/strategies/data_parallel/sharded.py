"""Gradients kept as slices: a bucket is summed when a microbatch has filled it, and the bucket's memory is freed.

| sync  | gradients of S bytes           | the optimizer steps | then       | a rank sends, m microbatches        |
|-------|--------------------------------|---------------------|------------|-------------------------------------|
| zero2 | reduce-scatter each microbatch | 1/n                 | all-gather | m (n-1)/n S + (n-1)/n P             |

ZeRO-2 (arXiv 1910.02054, section 5.2). A rank holds one slice of every gradient. During a backward pass a rank also
holds three whole buckets of each kind. These are the bucket being filled, the bucket before (being summed), and a tied
table's, which is filled from the head's backward pass to the embedding's. With one microbatch a step sends the bytes of
zero1. Each further microbatch costs one more reduce-scatter, the price of not holding whole gradients in between.

A bucket is sliced over all axes of its sum except two. Along these two, ranks hold equal slices and sum them once a
step. One is the pipeline's ends, which finish a tied table at different times. The other is the shard groups of hybrid
sharding (HSDP, arXiv 2304.11277, section 3.2.2). Without stages, groups sum a slice under the rest of the last backward
pass. With stages, groups sum after the backward pass, since replicas order weight gradients differently.

With W tasks (deferred weight gradients), gradients computed in B (norms, tables) run ahead of the rest of the bucket.
The number of microbatches ahead depends on message timing. Sums must not depend on timing, or equal runs would round
differently. Such a bucket accumulates whole gradients and is summed at the step's end. A tied table with both ends in
chunks of one stage is treated the same way.

With several chunks a stage, each chunk has separate buckets, filled in the order of microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

import torch
from torch import Tensor, nn

from meshwright.compute.parameters.bucket import Bucket
from meshwright.compute.parameters.fixed import floats_in
from meshwright.ranks.grid import ENDS, PIPE, REPLICATE
from meshwright.ranks.mesh import Mesh
from meshwright.strategies.data_parallel.policies import Zero1
from meshwright.strategies.data_parallel.strategy import BucketBytes, BucketSum, HeldBytes, Policy, State, Synchroniser


class Zero2(Zero1):
    """Rank r holds the r-th slice of every bucket's gradients and optimizer states."""

    apart = (ENDS, REPLICATE)
    """Copies of a slice: shard groups, and the pipeline's ends, which finish a tied table at different times."""


class SlicedSum(BucketSum):
    """A bucket summed in each microbatch into a slice of the slot. Between sums its whole gradients have no memory."""

    def __init__(self, bucket: Bucket, mesh: Mesh, policy: Policy) -> None:
        super().__init__(bucket, mesh, policy)
        # If all ranks synchronised at each bucket, the fastest would wait for the slowest each time.
        self.comm = self.comm.under_way()
        self.arrived = self.total
        """The rank's part of the whole gradients, into which a microbatch is summed."""
        self.total = torch.zeros_like(self.arrived)
        if bucket.rule.trained:
            self.slot.parameter.grad = floats_in(self.total)
        self.waits = len(bucket.chunks) > 1
        """Whether the bucket accumulates whole gradients until the step's end."""
        self.times_left = 0
        """Number of the bucket's sums begun in this step."""
        self.last = False
        """Whether the step's last sum of the bucket has begun, after which `copies` may sum the slice."""
        free(bucket.gradients)

    def begin(self) -> None:
        self.collect()
        allocate(self.bucket.gradients)

    def take(self, parameter: nn.Parameter) -> None:
        self.collect()  # of the microbatch before
        super().take(parameter)

    def leave(self) -> None:
        allocate(self.bucket.gradients)  # a bucket without elements here
        super().leave()
        self.times_left += 1

    def collect(self) -> None:
        """Wait for the sum under way, if any, add it to the slice, and free the whole gradients."""
        if self.state is not State.SUMMING:
            return
        self.end()
        if self.times_left > 1:
            self.total.add_(self.arrived)
        else:
            self.total.copy_(self.arrived)
        free(self.bucket.gradients)
        self.refill()
        if self.last:
            self.cross()

    def cross(self) -> None:
        self.collect()
        if self.state not in (State.CROSSING, State.SUMMED):
            self.work, self.state = self.copies.all_reduce(self.total.view(-1), wait=False), State.CROSSING

    def publish(self) -> None:
        super().publish()
        self.times_left, self.last = 0, False


class Sharded(Synchroniser):
    """A strategy that sums each bucket in every microbatch, into slices held by the slots.

    When a bucket is full, the backward pass waits for the sum of the bucket before, which bounds the number of whole
    buckets. The ranks of a sum run tasks in one order (Layout.peer_axes), so that no two wait for each other.
    """

    every_microbatch = True
    sum_of: type[SlicedSum] = SlicedSum
    sums: list[SlicedSum]  # type: ignore[assignment]
    _sum_of: dict[nn.Parameter, SlicedSum]  # type: ignore[assignment]

    @classmethod
    def held(cls, buckets: Sequence[BucketBytes]) -> HeldBytes:
        """Return the bytes of all slices, of whole buckets that wait, and of the three largest buckets of each kind."""
        by_kind: defaultdict[Hashable, list[int]] = defaultdict(list)
        for each in buckets:
            if not each.waits:
                by_kind[each.kind].append(each.gradients)
        at_once = sum(sum(sorted(sizes)[-3:]) for sizes in by_kind.values())
        late = sum(each.gradients for each in buckets if each.waits)
        slices = sum(each.own_gradients for each in buckets)
        return super().held(buckets)._replace(gradients=slices, passing_gradients=late + at_once)

    def filled(self, parameter: nn.Parameter) -> None:
        """Note a parameter's gradient of a microbatch, and begin the sums of its chunk's full buckets in order."""
        sum_, chunk = self._sum_of[parameter], self.gradients.user
        if self.gradients.defers:  # computed in B, while others of the bucket may wait for W
            sum_.waits = True
        sum_.take(parameter)
        if sum_.state is not State.FULL and not sum_.waits:  # no other bucket has become ready
            return
        order = [sum_ for sum_ in self.sums if not sum_.waits and sum_.bucket.chunks in ((), (chunk,))]
        # The bucket with the fewest sums begun is first. Ends at the last bucket: one without elements on this rank is
        # full again at once.
        while order and (following := min(order, key=lambda sum_: sum_.times_left)).state is State.FULL:
            self._leave(following)
            if following is order[-1]:
                break

    def arrivals(self) -> Iterator[int]:
        for sum_ in self.sums:
            if not sum_.times_left or any(self.gradients.has(parameter) for parameter in sum_.bucket.views):
                self._leave(sum_)
        return self._ended()

    def _leave(self, sum_: SlicedSum) -> None:
        """Begin a bucket's sum, then wait for the sums of buckets that fill at other times. When a sum ends, the link
        already has the next one, and need not wait until the first is added to its slice."""
        for parameter in sum_.bucket.views:
            self.gradients.fill(parameter)
            self.gradients.clear(parameter)
        # With stages, weight gradients have another order, and slices are summed over groups after the backward pass.
        sum_.last = self._final and self.mesh.size(PIPE) == 1
        sum_.leave()
        for earlier_sum in self.sums:
            # Buckets of one part become full at about the same time, if the model is gathered by part.
            if earlier_sum is not sum_ and not (sum_.bucket.parts and sum_.bucket.parts == earlier_sum.bucket.parts):
                earlier_sum.collect()


def free(x: Tensor) -> None:
    """Free a tensor's memory; the tensor and its views stay valid for `allocate`."""
    x.untyped_storage().resize_(0)


def allocate(x: Tensor) -> None:
    """Allocate memory for a freed tensor; its values are undefined."""
    storage = x.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(x.numel() * x.element_size())
