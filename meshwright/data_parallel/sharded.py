"""Gradients kept as slices: a bucket is summed when a microbatch has filled it, and its memory is freed.

| sync  | gradients of S bytes           | the optimizer steps | then       | a rank sends, m microbatches        |
|-------|--------------------------------|---------------------|------------|-------------------------------------|
| zero2 | reduce-scatter each microbatch | 1/n                 | all-gather | m (n-1)/n S + (n-1)/n P             |

ZeRO-2 (arXiv 1910.02054, section 5.2). A rank holds its slice of every gradient. During a backward pass it also holds,
for each kind of bucket, three whole ones: the bucket being filled, the bucket before it on its way, and a tied table's,
which is filled from the head's backward pass to the embedding's. With one microbatch a step sends what zero1 sends;
each further microbatch costs one more reduce-scatter, the price of not holding whole gradients in between.

A bucket is sliced over all axes of its sum except two, along which ranks hold equal slices and sum them once a step:
the pipeline's ends, which finish a tied table at different times, and the shard groups of hybrid sharding (HSDP, arXiv
2304.11277, section 3.2.2). Without stages, groups sum a slice under the rest of the last backward pass; with stages,
whose replicas order their weight gradients differently, after it.

With W tasks (deferred weight gradients), parameters whose gradients come with B (norms, tables) run ahead of their
bucket's others by a number of microbatches that depends on message timing. Sums must not depend on timing, or equal
runs would round differently: such a bucket accumulates whole gradients and is summed at the step's end, and so does a
tied table whose two ends are chunks of one stage.

With several chunks a stage, each chunk has buckets of its own, filled in the order of microbatches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence

from torch import Tensor, nn

from meshwright.data_parallel.policies import Zero1
from meshwright.data_parallel.strategy import BucketBytes, BucketSum, HeldBytes, Policy, State, Synchroniser
from meshwright.parameters.bucket import Bucket, Slot, floats_in, group_axes, slice_axes
from meshwright.ranks.comm import DONE, Comm, Work
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mesh import Mesh


class Zero2(Zero1):
    """Rank r holds the r-th slice of every bucket's gradients and optimizer states."""


class SlicedSum(BucketSum):
    """A bucket that is summed in each microbatch into a slice of the slot. Between sums its whole gradients have no
    memory."""

    def __init__(self, bucket: Bucket, mesh: Mesh, policy: Policy) -> None:
        super().__init__(bucket, mesh, policy)
        self.copies = mesh.comm(*(axis for axis in bucket.sum_axes if axis not in slice_axes(bucket.sum_axes)))
        """The ranks with a copy of the slice."""
        self.across: Work | None = None
        """The slice's sum over `copies`, once a step."""
        self.waits = len(bucket.chunks) > 1
        """Whether the bucket accumulates whole gradients until the step's end."""
        self.times_left = 0
        """Number of the bucket's sums begun in this step."""
        self.last = False
        """Whether the step's last sum of the bucket has begun, after which `copies` may sum the slice."""
        free(bucket.gradients)

    def make_comm(self) -> Comm:
        """A comm with asynchronous verbs: with a meeting of all ranks at each bucket, the fastest would wait for the
        slowest each time."""
        return self.mesh.comm(*slice_axes(self.bucket.sum_axes)).under_way()

    def make_slot(self) -> Slot:
        start, stop = self.policy.owned(self.bucket, self.comm)
        slot = self.bucket.slot(start, stop, part_axes=slice_axes(self.bucket.sum_axes))
        self.slice = self.bucket.gradients.new_zeros(stop - start)
        slot.parameter.grad = floats_in(self.slice)
        return slot

    @property
    def total(self) -> Tensor:
        return self.slice

    def begin(self) -> None:
        self.collect()
        allocate(self.bucket.gradients)

    def take(self, parameter: nn.Parameter) -> None:
        self.collect()  # of the microbatch before
        super().take(parameter)

    def leave(self) -> None:
        allocate(self.bucket.gradients)  # one without an element here
        super().leave()
        self.times_left += 1

    def collect(self) -> None:
        """Wait for the sum under way, if any, add it to the slice, and free the whole gradients."""
        if self.state is not State.SUMMING:
            return
        super().end()
        start, stop = self.policy.owned(self.bucket, self.comm)
        if self.times_left > 1:
            self.slice.add_(self.bucket.gradients[start:stop])
        else:
            self.slice.copy_(self.bucket.gradients[start:stop])
        free(self.bucket.gradients)
        self.refill()
        if self.last:
            self.cross()

    def cross(self) -> None:
        """Begin the sum of the complete slice over `copies`."""
        self.collect()
        if self.across is None:
            self.across = self.copies.all_reduce(self.slice, wait=False)

    def end(self) -> None:
        assert self.across is not None, "a slice that its other holders have not summed"
        self.across.wait()
        self.state = State.SUMMED

    def publish(self) -> None:
        super().publish()
        self.times_left, self.last, self.across = 0, False, None

    def fills_with(self, other: SlicedSum) -> bool:
        """Whether the other bucket becomes full at about the same time."""
        return self is other


class Sharded(Synchroniser):
    """Sums each bucket in every microbatch into slices that the slots hold.

    When a bucket is full, the backward pass waits for the sum of the bucket before, which bounds the whole buckets. The
    ranks of a sum do their tasks in one order (Layout.peer_axes), so that no two wait for each other.
    """

    every_microbatch = True
    sum_of: type[SlicedSum] = SlicedSum
    sums: list[SlicedSum]  # type: ignore[assignment]
    _sum_of: dict[nn.Parameter, SlicedSum]  # type: ignore[assignment]

    @classmethod
    def held(cls, buckets: Sequence[BucketBytes]) -> HeldBytes:
        """Bytes of all slices, of whole buckets that wait, and of the three largest buckets of each kind."""
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
        one, chunk = self._sum_of[parameter], self.gradients.user
        if self.gradients.defers:  # it did not wait for W, as others of its bucket may
            one.waits = True
        one.take(parameter)
        if one.state is not State.FULL and not one.waits:  # nothing can leave now that could not before
            return
        order = [one for one in self.sums if not one.waits and one.bucket.chunks in ((), (chunk,))]
        # The bucket with the fewest sums begun comes first. Ends at the last bucket: one without elements on this rank
        # is full again at once.
        while order and (following := min(order, key=lambda one: one.times_left)).state is State.FULL:
            self._leave(following)
            if following is order[-1]:
                break

    def arrivals(self) -> Iterator[int]:
        for one in self.sums:
            if not one.times_left or any(self.gradients.has(parameter) for parameter in one.bucket.parameters):
                self._leave(one)
        return self._ended()

    def _leave(self, one: SlicedSum) -> None:
        """Begin a bucket's sum after the sums of buckets that fill at other times have ended."""
        for other in self.sums:
            if not one.fills_with(other):
                other.collect()
        for parameter in one.bucket.parameters:
            self.gradients.fill(parameter)
            self.gradients.clear(parameter)
        # Beside stages weight gradients come in an order of their own, and slices go on behind the backward pass.
        one.last = self._final and self.mesh.size(PIPE) == 1
        one.leave()


class GroupedSum(BucketSum):
    """A bucket under zero1 with shard groups: each group reduces it to slices, and ranks with equal slices sum these
    over the groups."""

    def __init__(self, bucket: Bucket, mesh: Mesh, policy: Policy) -> None:
        super().__init__(bucket, mesh, policy)
        self.copies = mesh.comm(*(axis for axis in bucket.sum_axes if axis not in group_axes(bucket.sum_axes)))
        """The ranks that step a copy of the slice."""
        self.across: Work | None = None

    def make_comm(self) -> Comm:
        return self.mesh.comm(*group_axes(self.bucket.sum_axes))

    def make_slot(self) -> Slot:
        return self.bucket.slot(*self.policy.owned(self.bucket, self.comm), part_axes=group_axes(self.bucket.sum_axes))

    def cross(self) -> None:
        if self.across is None:
            work, self.work = self.work, DONE
            work.wait()
            self.across = self.copies.all_reduce(self.total, wait=False)

    def end(self) -> None:
        assert self.across is not None, "a slice that other groups have not summed"
        work, self.across = self.across, None
        work.wait()
        self.state = State.SUMMED


class Grouped(Synchroniser):
    """Optimizer states as slices, once in each shard group (zero1)."""

    sum_of = GroupedSum

    def _launch(self) -> None:
        super()._launch()
        under_way = [one for one in self.sums if one.state is State.SUMMING and not one.comm.begins_when_waited_for]
        # Beside stages replicas do their tasks in orders of their own, and must not wait for each other in one.
        for one in under_way[:-1] if self.mesh.size(PIPE) == 1 else ():
            one.cross()


def free(x: Tensor) -> None:
    """Free a tensor's memory; the tensor and its views stay valid for `allocate`."""
    x.untyped_storage().resize_(0)


def allocate(x: Tensor) -> None:
    """Allocate memory for a freed tensor; its values are undefined."""
    storage = x.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(x.numel() * x.element_size())
