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
from collections.abc import Hashable, Iterable, Iterator, Sequence

from torch import Tensor, nn

from meshwright.bits.fixed import FixedPoint
from meshwright.data_parallel.policies import Zero1
from meshwright.data_parallel.strategy import Policy, Synchroniser, ended, gradients_of
from meshwright.parameters.bucket import Bucket, Slot, floats_in, slice_axes
from meshwright.parameters.gradients import Gradients
from meshwright.ranks.comm import Comm, Work, size_bytes
from meshwright.ranks.grid import PIPE
from meshwright.ranks.mesh import Mesh


class Zero2(Zero1):
    """Rank r owns the r-th slice of every bucket, and holds no more of its gradients than that."""


class Sharded(Synchroniser):
    """Sums each bucket in every microbatch into slices that the slots hold.

    A backward pass waits, when a bucket is full, for the sum of the one before, so that few are whole at a time. The
    ranks of a sum do their tasks in one order (Layout.peer_axes), so that none of them waits for one that waits for it.
    """

    every_microbatch = True

    def __init__(self, buckets: Iterable[Bucket], mesh: Mesh, policy: Policy, fixed: FixedPoint | None = None) -> None:
        self._totals: list[Tensor] = []
        """Each slot's memory: its part of its bucket's gradients."""
        super().__init__(buckets, mesh, policy, fixed)
        summed = [bucket.sum_axes for bucket in self.buckets]
        self._copies = [mesh.comm(*(axis for axis in axes if axis not in slice_axes(axes))) for axes in summed]
        self._summed = [False] * len(self.buckets)
        """Whether a bucket's slice holds a sum of this step."""
        self._under_way: dict[int, Work] = {}
        self._complete: set[int] = set()
        """Buckets that have left in the step's last microbatch, where their slices may go on to the other groups."""
        self._across: dict[int, Work] = {}
        """Sums of slices over the ranks that hold the same ones."""
        self._late = {index for index, bucket in enumerate(self.buckets) if len(bucket.chunks) > 1}
        """Buckets that are summed at the step's end."""
        self._left: defaultdict[int, int] = defaultdict(int)
        """How many buckets of a microbatch have left, by the chunk of this stage that fills them."""
        self._missing = [self._members(index) for index in range(len(self.buckets))]

    def take(self, bucket: Bucket) -> None:
        super().take(bucket)
        free(bucket.gradients)

    def make_comm(self, bucket: Bucket) -> Comm:
        """Verbs that travel: a backward pass begins them bucket by bucket, and meeting all ranks for each would make
        the first wait for the last as often."""
        return self.mesh.comm(*slice_axes(bucket.sum_axes)).under_way()

    def make_slot(self, bucket: Bucket, comm: Comm) -> Slot:
        start, stop = self.policy.owned(bucket, comm)
        slot = bucket.slot(start, stop, part_axes=slice_axes(bucket.sum_axes))
        self._totals.append(bucket.gradients.new_zeros(stop - start))
        slot.parameter.grad = floats_in(self._totals[-1])
        return slot

    def make_gradients(self) -> Gradients:
        return gradients_of(self._views, self.fixed, self.filled, self._begin)

    @property
    def gradient_bytes(self) -> int:
        """The slices, and the buckets that a backward pass has whole at a time."""
        slices = sum(size_bytes(self._total(index)) for index in range(len(self.buckets)))
        whole = [((bucket.matrix, bucket.sum_axes, bucket.cut_axes), bucket.gradients) for bucket in self.buckets]
        late = sum(size_bytes(gradients) for index, (_, gradients) in enumerate(whole) if index in self._late)
        at_once = ((kind, size_bytes(x)) for index, (kind, x) in enumerate(whole) if index not in self._late)
        return slices + late + whole_bytes(at_once)

    def filled(self, parameter: nn.Parameter) -> None:
        """A parameter has its gradient of a microbatch. Buckets of its chunk that are full leave, in their order."""
        index, chunk = self._bucket_of[parameter], self.gradients.user
        if self.gradients.defers:  # it did not wait for W, as others of its bucket may
            self._late.add(index)
        self._missing[index].discard(parameter)
        order = [
            index
            for index, bucket in enumerate(self.buckets)
            if index not in self._late and bucket.chunks in ((), (chunk,))
        ]
        while order and not self._missing[order[self._left[chunk] % len(order)]]:
            self._leave(order[self._left[chunk] % len(order)])
            self._left[chunk] = (self._left[chunk] + 1) % len(order)
            if self._left[chunk] == 0:
                break

    def arrivals(self) -> Iterator[int]:
        for index, bucket in enumerate(self.buckets):
            has_gradients = any(self.gradients.has(parameter) for parameter in bucket.parameters)
            if has_gradients or not (self._summed[index] or index in self._under_way):
                self._leave(index)
        self._collect()
        self._left.clear()
        for index in range(len(self.buckets)):
            if index not in self._across:
                self._sum_across(index)
        across, self._across = self._across, {}
        self._complete.clear()
        return self._as_floats(ended([across[index] for index in range(len(self.buckets))]))

    def publish(self, *, wait: bool = True) -> None:
        super().publish(wait=wait)
        self._summed = [False] * len(self.buckets)

    def _members(self, index: int) -> set[nn.Parameter]:
        """The parameters whose gradients fill a bucket; what has no elements here gets none."""
        return {member for member in self.buckets[index].parameters if member.numel()}

    def _total(self, index: int) -> Tensor:
        return self._totals[index]

    def _begin(self, parameter: nn.Parameter) -> None:
        """A gradient is about to be written: its bucket gets its memory, if it has none."""
        index = self._bucket_of[parameter]
        if index in self._under_way:
            self._collect([index])
        allocate(self.buckets[index].gradients)

    def _leave(self, index: int) -> None:
        """Start a bucket's sum, when those that fill at another time have ended."""
        bucket = self.buckets[index]
        self._collect([other for other in self._under_way if not self.fill_together(index, other)])
        for parameter in bucket.parameters:
            self.gradients.fill(parameter)
            self.gradients.clear(parameter)
        allocate(bucket.gradients)  # one without an element here
        bucket.gradients[bucket.places[-1].stop :].zero_()  # padding, of which a slice and so the norm has a part
        self._under_way[index] = self.policy.reduce(bucket, self.comms[index])
        self._missing[index] = self._members(index)
        if self._final and self.mesh.size(PIPE) == 1:
            self._complete.add(index)

    def fill_together(self, one: int, other: int) -> bool:
        """Whether two buckets are full at about the same time."""
        return one == other

    def _collect(self, indices: Sequence[int] | None = None) -> None:
        """Wait for the sums of these buckets, by default of all, add them to the slices, and free their memory."""
        for index in list(self._under_way) if indices is None else indices:
            self._under_way.pop(index).wait()
            bucket, total = self.buckets[index], self._total(index)
            start, stop = self.policy.owned(bucket, self.comms[index])
            if self._summed[index]:
                total += bucket.gradients[start:stop]
            else:
                total.copy_(bucket.gradients[start:stop])
            self._summed[index] = True
            free(bucket.gradients)
            if index in self._complete:
                self._sum_across(index)

    def _sum_across(self, index: int) -> None:
        self._across[index] = self._copies[index].all_reduce(self._total(index), wait=False)


def whole_bytes(buckets: Iterable[tuple[Hashable, int]]) -> int:
    """The most bytes of buckets that are whole at a time, given the kind and size of each: three of a kind."""
    by_kind: defaultdict[Hashable, list[int]] = defaultdict(list)
    for kind, size in buckets:
        by_kind[kind].append(size)
    return sum(sum(sorted(sizes)[-3:]) for sizes in by_kind.values())


def free(x: Tensor) -> None:
    """Give a tensor's memory back; the tensor and all views of it stay, to be allocated again."""
    x.untyped_storage().resize_(0)


def allocate(x: Tensor) -> None:
    """Give a tensor that was freed memory again, with any values."""
    storage = x.untyped_storage()
    if storage.nbytes() == 0:
        storage.resize_(x.numel() * x.element_size())
