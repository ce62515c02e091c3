"""Gradients kept as slices: each bucket is summed as soon as a microbatch has filled it, and its memory given back.

| sync  | gradients of S bytes           | the optimizer steps | then       | a rank sends, m microbatches        |
|-------|--------------------------------|---------------------|------------|-------------------------------------|
| zero2 | reduce-scatter each microbatch | 1/n                 | all-gather | m (n-1)/n S + (n-1)/n P             |

ZeRO-2 (arXiv 1910.02054, section 5.2). A rank holds its slice of every gradient and, while a backward pass runs, of
each kind of buckets the one that is being filled, the one before it, whose sum travels meanwhile, and a tied table's,
which is filled from the head's backward pass to the embeddings'. With one microbatch it sends what zero1
sends; each further one costs another reduce-scatter, which is the price of not holding whole gradients between them.

A bucket is sliced over all axes that it is summed over but two, whose ranks keep the same slices and sum them once a
step: the pipeline's ends, which come to a tied table at different moments, and the shard groups of hybrid sharding
(HSDP, arXiv 2304.11277, section 3.2.2). Groups of whole models sum a slice under the rest of the last backward pass,
as soon as their ranks have it; beside stages, whose weight gradients come in an order of their own, behind it.

Where weight gradients are tasks of their own (W), a parameter whose gradient comes already with B (norms, tables) runs
ahead of its bucket's others by as many microbatches as messages have made it. What is summed together must not depend
on that, or two equal runs would round differently: such a bucket adds up in whole, and is summed at the step's end.
So does a tied table of which one stage holds both ends, each in a chunk of its own.

Each chunk of a stage that has several fills buckets of its own, in the order of the microbatches whatever the others
do.
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
    """Rank r owns the r-th slice of every bucket, and holds no more of its gradients than that."""


class SlicedSum(BucketSum):
    """A bucket whose gradients are summed in each microbatch into a slice, which the slot holds, and else have no
    memory. It is filling again when a microbatch's sum is in the slice."""

    def __init__(self, bucket: Bucket, mesh: Mesh, policy: Policy) -> None:
        super().__init__(bucket, mesh, policy)
        self.copies = mesh.comm(*(axis for axis in bucket.sum_axes if axis not in slice_axes(bucket.sum_axes)))
        """The ranks that hold the same slice."""
        self.across: Work | None = None
        """The slice's sum over them, once a step."""
        self.waits = len(bucket.chunks) > 1
        """Whether the bucket adds up in whole, and is summed at the step's end."""
        self.times_left = 0
        """How often the bucket has left in this step: once in each microbatch, or at the step's end."""
        self.last = False
        """Whether the bucket has left for the last time in the step: then its slice may go on to the other groups."""
        free(bucket.gradients)

    def make_comm(self) -> Comm:
        """Verbs that travel: a backward pass begins them bucket by bucket, and meeting all ranks for each would make
        the first wait for the last as often."""
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
        """Wait for a microbatch's sum, if one is under way, add it to the slice, and give its memory back."""
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
        """Sum the slice, which is complete, over those who hold the same one."""
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
        """Whether the other bucket is full at about the same time."""
        return self is other


class Sharded(Synchroniser):
    """Sums each bucket in every microbatch into slices that the slots hold.

    A backward pass waits, when a bucket is full, for the sum of the one before, so that few are whole at a time. The
    ranks of a sum do their tasks in one order (Layout.peer_axes), so that none of them waits for one that waits for it.
    """

    every_microbatch = True
    sum_of: type[SlicedSum] = SlicedSum
    sums: list[SlicedSum]  # type: ignore[assignment]
    _sum_of: dict[nn.Parameter, SlicedSum]  # type: ignore[assignment]

    @classmethod
    def held(cls, buckets: Sequence[BucketBytes]) -> HeldBytes:
        """Slices of gradients; and whole those that wait, and of each kind the three that are largest."""
        by_kind: defaultdict[Hashable, list[int]] = defaultdict(list)
        for each in buckets:
            if not each.waits:
                by_kind[each.kind].append(each.gradients)
        at_once = sum(sum(sorted(sizes)[-3:]) for sizes in by_kind.values())
        late = sum(each.gradients for each in buckets if each.waits)
        slices = sum(each.own_gradients for each in buckets)
        return super().held(buckets)._replace(gradients=slices, passing_gradients=late + at_once)

    def filled(self, parameter: nn.Parameter) -> None:
        """A parameter has its gradient of a microbatch. Buckets of its chunk that are full leave, in their order."""
        one, chunk = self._sum_of[parameter], self.gradients.user
        if self.gradients.defers:  # it did not wait for W, as others of its bucket may
            one.waits = True
        one.take(parameter)
        if one.state is not State.FULL and not one.waits:  # nothing can leave now that could not before
            return
        order = [one for one in self.sums if not one.waits and one.bucket.chunks in ((), (chunk,))]
        # The first that has left in fewer microbatches than others; up to the last, for one without an element here is
        # full again at once.
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
        """Start a bucket's sum, when those that fill at another time have ended."""
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
    """A bucket of which each shard group steps all slices: what a group has summed, the others' ranks with the same
    slice sum over each other."""

    def __init__(self, bucket: Bucket, mesh: Mesh, policy: Policy) -> None:
        super().__init__(bucket, mesh, policy)
        self.copies = mesh.comm(*(axis for axis in bucket.sum_axes if axis not in group_axes(bucket.sum_axes)))
        """The ranks that step the same slice."""
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
    """Give a tensor's memory back; the tensor and all views of it stay, to be allocated again."""
    x.untyped_storage().resize_(0)


def allocate(x: Tensor) -> None:
    """Give a tensor that was freed memory again, with any values."""
    storage = x.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(x.numel() * x.element_size())
