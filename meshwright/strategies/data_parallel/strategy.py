"""The base of data-parallel strategies: the synchroniser, which executes gradient sums by a policy.

A step: share the batch, forward and backward of each microbatch (pipeline/), finish (the slots' gradients are the
global batch's), the optimizer steps the slots, publish (every rank's parameters are the new ones). New values may
travel under the next forward pass: each part of the model then waits for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from functools import partial
from typing import Any, Literal, NamedTuple

from torch import nn

from meshwright.compute.model import Batch, Chunk, Hidden, LoadRows, Model, RunsParts, Scales
from meshwright.compute.parameters.bucket import Bucket, FlatWeights, PartsUsing
from meshwright.compute.parameters.exact_gradients import ExactGradients
from meshwright.compute.parameters.fixed import FixedPoint
from meshwright.compute.parameters.gradients import Gradients, OnFirst, OnGradient
from meshwright.compute.parameters.owners import DealtOver, owners
from meshwright.ranks.agreement import make_equal, same_everywhere
from meshwright.ranks.comm import DONE, Comm, Later, Work, size_bytes, together
from meshwright.ranks.grid import DATA_AXES, PIPE
from meshwright.ranks.mesh import Mesh


class Policy:
    """How one bucket travels: summed to its owners, then published by them.

    | owners | gradients are summed by | a rank's optimizer steps       | then the new values are             |
    |--------|-------------------------|--------------------------------|-------------------------------------|
    | all    | an all-reduce           | the whole bucket               | on every rank: nothing is published |
    | each   | a reduce-scatter        | the slice of the rank's index  | gathered                            |
    | first  | a reduce to the first   | all of it on the first, else 0 | broadcast by the first rank         |
    Of `each`, a reduce sums matrices that are stepped whole to the owner of each, which broadcasts them (owners.py).
    """

    owners: Literal["all", "each", "first"] = "all"
    publishes = True
    """Whether owners send new values; not where weights are slices, too, and gathered for what is computed."""
    blocks = False
    """Whether `reduce` returns only when the other ranks have come, too."""
    apart: tuple[str, ...] = ()
    """Axes along which ranks own the same part: it is summed over the other axes, and once a step over these."""

    def owned(self, bucket: Bucket, comm: Comm) -> tuple[int, int]:
        """start, stop of the part that this rank's optimizer steps."""
        length = bucket.values.numel()
        if self.owners == "each" and bucket.segments:
            return bucket.segments[comm.index], bucket.segments[comm.index + 1]
        if self.owners == "each":
            part = length // comm.size
            return comm.index * part, (comm.index + 1) * part
        return 0, length if self.owners == "all" or comm.index == 0 else 0

    def dealt_over(self, mesh: Mesh) -> DealtOver | None:
        """Return how many ranks share out a bucket's matrices, by its axes; None if they are not shared out."""
        if self.owners != "each":
            return None
        return lambda axes: mesh.comm(*(axis for axis in axes if axis not in self.apart)).size

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        """Sum the gradients over the comm into (at least) the owned part."""
        match self.owners:
            case "all":
                return comm.all_reduce(bucket.gradients, wait=False)
            case "each" if bucket.segments:
                return together(
                    comm.reduce(bucket.gradients[start:stop], owner, wait=False)
                    for owner, start, stop in owners(bucket.segments)
                )
            case "each":
                start, stop = self.owned(bucket, comm)
                return comm.reduce_scatter(bucket.gradients[start:stop], bucket.gradients, wait=False)
            case "first":
                return comm.reduce(bucket.gradients, 0, wait=False)

    def publish(self, bucket: Bucket, comm: Comm) -> Work:
        """Bring the owners' new values to every rank."""
        if self.owners == "all" or not self.publishes:
            return DONE
        if self.owners == "first":
            return comm.broadcast(bucket.values, 0, wait=False)
        if bucket.segments:
            return together(
                comm.broadcast(bucket.values[start:stop], owner, wait=False)
                for owner, start, stop in owners(bucket.segments)
            )
        start, stop = self.owned(bucket, comm)
        return comm.all_gather(bucket.values, bucket.values[start:stop], wait=False)


class BucketBytes(NamedTuple):
    """A bucket's bytes on a rank: `weights` and `gradients` of all of it, `own_weights` and `own_gradients` of the part
    that the rank's optimizer steps. `kind`: buckets of one kind may lie in one another's memory; `parts`: those of the
    model that use it, where a bucket is a part's; `waits`: it adds up in whole, and is summed at the step's end."""

    kind: Hashable
    parts: tuple[int, ...]
    weights: int
    gradients: int
    own_weights: int
    own_gradients: int
    waits: bool


class HeldBytes(NamedTuple):
    """Bytes of weights and gradients held all the time, and the most held in passing while tasks run."""

    weights: int
    gradients: int
    passing_weights: int = 0
    passing_gradients: int = 0

    @property
    def passing(self) -> int:
        return self.passing_weights + self.passing_gradients


class State(Enum):
    """Where a bucket is in a step. A sum that has ended in a microbatch that is not the last makes it fill anew."""

    FILLING = "some of its gradients are to come"
    FULL = "it leaves when those before it have left"
    SUMMING = "its sum is under way"
    CROSSING = "ranks that own the same part of it sum theirs"
    SUMMED = "its slot holds the whole gradient"


class BucketSum:
    """A bucket on its way through a step, and the one owner of its state: filling, full, summing, crossing, summed.

    What happens at each turn is here, and overridden where a strategy does otherwise; when buckets turn, and in which
    order, is the Synchroniser's.
    """

    waits = False
    """Whether the bucket adds up in whole, and is summed at the step's end."""

    def __init__(self, bucket: Bucket, mesh: Mesh, policy: Policy) -> None:
        self.bucket, self.mesh, self.policy = bucket, mesh, policy
        axes = tuple(axis for axis in bucket.sum_axes if axis not in policy.apart)
        self.comm = mesh.comm(*axes)
        """The ranks over which the policy sums and publishes the bucket."""
        self.copies = mesh.comm(*(axis for axis in bucket.sum_axes if axis in policy.apart))
        """The ranks that own the same part."""
        start, stop = policy.owned(bucket, self.comm)
        self.slot = bucket.slot(start, stop, part_axes=() if policy.owners == "all" else axes)
        """The part of the bucket that this rank's optimizer steps."""
        self.total = bucket.gradients[start:stop]
        """The memory in which the slot's gradient is summed: integers where bits are layout-free."""
        self.weights = FlatWeights(bucket.values, bucket.places, bucket.copy_axes)
        """This rank's part of the bucket's weights between steps."""
        self.work: Work = DONE
        """The sum in progress."""
        self.arriving: Work | None = None
        """Values stepped by other ranks, on their way here."""
        self.refill()

    @property
    def sizes(self) -> BucketBytes:
        bucket, own = self.bucket, self.slot.parameter.numel()
        kind = bucket.values.dtype, bucket.rule.decays, bucket.sum_axes, bucket.cut_axes
        value, gradients = bucket.values.element_size(), bucket.gradients
        return BucketBytes(
            kind, bucket.parts, bucket.values.numel() * value, gradients.numel() * gradients.element_size(),
            own * value, self.total.numel() * gradients.element_size(), self.waits,
        )  # fmt: skip

    def refill(self) -> None:
        """Filling: all gradients are to come, but of what has no elements here, whose owner is another rank."""
        self.missing = {member for member in self.bucket.views if member.numel()}
        self.state = State.FILLING if self.missing else State.FULL

    def begin(self) -> None:
        """Called before a gradient is written into the bucket."""

    def take(self, parameter: nn.Parameter) -> None:
        """Called when a parameter has its gradient. Full after the last."""
        self.missing.discard(parameter)
        if not self.missing and self.state is State.FILLING:
            self.state = State.FULL

    def leave(self) -> None:
        """Summing: the sum is begun, or where it would block here begun when it is waited for."""
        # Padding, of which a slice and so the norm has a part: a slice's memory is new, and after a step of integers
        # the floats lie there that they became.
        self.bucket.gradients[self.bucket.places[-1].stop :].zero_()
        reduce, self.state = partial(self.policy.reduce, self.bucket, self.comm), State.SUMMING
        self.work = Later(lambda: reduce().wait()) if self.policy.blocks else reduce()

    def cross(self) -> None:
        """Begin what follows the sum of all microbatches, once: the sum over the ranks that own the same part."""
        if self.state is State.SUMMING and self.copies.size > 1:
            self.end()
            self.work, self.state = self.copies.all_reduce(self.total, wait=False), State.CROSSING

    def end(self) -> None:
        """Summed: wait for the sum."""
        work, self.work = self.work, DONE
        work.wait()
        self.state = State.SUMMED

    def publish(self) -> None:
        """The slot was stepped: its new values go to those who do not step it, and the bucket fills anew."""
        self.arriving = self.policy.publish(self.bucket, self.comm)
        self.refill()

    def wait(self) -> None:
        """Return when the values of all owners have arrived."""
        if self.arriving is not None:
            work, self.arriving = self.arriving, None
            work.wait()

    def make_equal(self) -> list[str]:
        """The parameters that the ranks which hold them had with other values; now they have the first's."""
        bucket, comm = self.bucket, self.mesh.comm(*self.weights.copy_axes)
        if same_everywhere(bucket.values, comm):  # one small message if all are equal
            return []
        parts = ((place.name, bucket.values[place.start : place.stop]) for place in bucket.places)
        return [name for name, values in parts if make_equal(values, comm)]


class Synchroniser:
    """A data-parallel strategy, as the train loop sees it. `gradients`: where the model's layers add theirs up.

    Sums buckets over their axes by a policy, each as soon as the backward pass has filled it.

    Between steps no parameter has a gradient: autograd then hands over what it has computed instead of adding it to
    zeros, and a bucket is written once a step.

    Sends, a bucket a step: what its policy sends. Buckets start in one fixed order on every rank. A policy that blocks
    sums them behind the backward pass: inside it a last stage would wait, in the sum of a tied table, for the first,
    and that one for the gradient which the last has yet to send. Nothing is lost: a sum that blocks hides nothing.

    New values are published in the other order, about the forward pass's, under which they travel (`follow`).
    """

    every_microbatch = False
    """Whether it sums in each microbatch, not in the step's last alone."""
    sum_of: type[BucketSum] = BucketSum

    def __init__(self, buckets: Iterable[Bucket], mesh: Mesh, policy: Policy, fixed: FixedPoint | None = None) -> None:
        """`fixed`: how gradients become integers, where the buckets' are."""
        self.fixed = fixed
        self.mesh = mesh
        self.policy = policy
        # One after the other, so that a bucket that is not kept whole is given back before the next is made.
        made = [self.sum_of(bucket, mesh, policy) for bucket in buckets]
        self.sums = [one for one in made if one.bucket.rule.trained]
        self.frozen = [one for one in made if not one.bucket.rule.trained]
        """Buckets of frozen parameters: values alone, which nobody sums, steps and publishes."""
        self.every = [*self.sums, *self.frozen]
        self.buckets = [one.bucket for one in self.every]
        self.slots = [one.slot for one in self.sums]
        self._weights = [one.weights for one in self.every]
        self._sum_of = {parameter: one for one in self.sums for parameter in one.bucket.views}
        self._final = False
        self._of: dict[int, list[int]] = {}
        """The buckets that each part of the model reads."""
        views = {parameter: view for one in self.sums for parameter, view in one.bucket.views.items()}
        told: tuple[OnGradient, OnFirst] = self.filled, lambda parameter: self._sum_of[parameter].begin()
        self.gradients = Gradients(views, *told) if fixed is None else ExactGradients(views, fixed, *told)
        for parameter in self._sum_of:
            parameter.grad = None

    @classmethod
    def held(cls, buckets: Sequence[BucketBytes]) -> HeldBytes:
        """The bytes that a rank has of these buckets. Of sizes alone, so that the planner asks the same."""
        return HeldBytes(sum(each.weights for each in buckets), sum(each.gradients for each in buckets))

    @property
    def most_bytes(self) -> tuple[int, int]:
        """The most bytes of weights, and of gradients, that a rank holds at a time."""
        held = self.held([one.sizes for one in self.every])
        apart = sum(size_bytes(x) for users in self.gradients.apart.values() for x in users.values())
        gradients = held.gradients + held.passing_gradients + apart
        return held.weights + held.passing_weights, gradients

    @property
    def weights(self) -> list[FlatWeights]:
        """This rank's weights; returns when published values have arrived."""
        self._wait()
        return self._weights

    def share(self, load: LoadRows, replica_batch: int) -> Batch:
        """This replica's rows of the step's global batch, on the host, as `load` gives them."""
        return load(self.mesh.index(*DATA_AXES) * replica_batch, replica_batch)

    def forward(self, model: Model, batch: Batch, scales: Scales, incoming: Hidden) -> Hidden:
        """A stage's forward pass: what the stage after reads, or (loss,)."""
        return model(batch, scales, incoming)

    def expect(self, final: bool) -> None:
        """Say whether the coming backward pass is the last of its chunk in the step: only in that one gradients may be
        summed."""
        self._final = final

    def follow(self, model: RunsParts, using: PartsUsing, chunks: Sequence[Chunk]) -> None:
        """Wait for the values of a chain's parts when it runs them. `using`: the parts that use each parameter;
        `chunks`: those of the chain that this rank holds."""
        readers = [{part for place in bucket.places for part in using[place.name]} for bucket in self.buckets]
        parts = [part for chunk in chunks for part in chunk.parts]
        self._of = {part: [index for index, those in enumerate(readers) if part in those] for part in parts}
        model.run_parts_by(self.run_part)

    def run_part(self, part: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of the model when its values have arrived."""
        self._wait(self._of[part])
        return function(*arguments)

    def filled(self, parameter: nn.Parameter) -> None:
        """A parameter has its gradient of a microbatch. In the final one, buckets that are full leave."""
        if self._final:
            self.gradients.fill(parameter)
            self._sum_of[parameter].take(parameter)
            self._launch()

    def _launch(self) -> None:
        """Start the sums of the next buckets in order, as far as they are full, and what follows those that are over
        (BucketSum.cross)."""
        for one in self.sums:
            if one.state is State.FILLING:
                break
            if one.state is State.FULL:
                one.leave()
        # Beside stages replicas do their tasks in orders of their own, and must not wait for each other in one.
        if self.policy.apart and self.mesh.size(PIPE) == 1:
            under_way = [one for one in self.sums if one.state is State.SUMMING and not one.comm.begins_when_waited_for]
            for one in under_way[:-1]:
                one.cross()

    def arrivals(self) -> Iterator[int]:
        """Slot indices, each as soon as the slot holds the whole gradient. Starts the sums that have not begun."""
        self._wait()  # a slot must not be stepped while it travels
        for one in self.sums:
            # Those that the last microbatch did not reach, in the bucket's order: a set has another in every process.
            for parameter in [member for member in one.bucket.views if member in one.missing]:
                self.gradients.fill(parameter)
                one.take(parameter)
        self._launch()
        return self._ended()

    def _ended(self) -> Iterator[int]:
        """The buckets' indices, each when its slot holds the whole gradient."""
        for one in self.sums:
            one.cross()
        for index, one in enumerate(self.sums):
            one.end()
            if self.fixed is not None:
                self.fixed.to_float32(one.total)
            yield index

    def finish(self) -> None:
        """Wait until the slots hold the whole gradient."""
        for _ in self.arrivals():
            pass

    def publish(self, *, wait: bool = True) -> None:
        """Give every rank the stepped parameters, and clear the gradients. `wait=False`: they may still be on their
        way, and are waited for where the strategy gives weights away or runs the model; slots may be read meanwhile."""
        self._wait()
        for one in reversed(self.sums):
            one.publish()
            for parameter in one.bucket.views:
                self.gradients.clear(parameter)
        # What begins when it is waited for gains nothing, and inside of a forward pass the first and the last stage
        # would wait for each other: for a tied table's values, and for the hidden states before them.
        self._wait([index for index, one in enumerate(self.sums) if wait or one.comm.begins_when_waited_for])

    def publish_frozen(self) -> None:
        """Give every rank the frozen values that the others have read from a checkpoint."""
        # As after a step, which publishes trained values alone.
        for one in self.frozen:
            one.publish()
        self._wait()

    def whole_weights(self) -> AbstractContextManager[None]:
        """While entered, the model's halves may be called by themselves, without gradients."""
        self._wait()
        return nullcontext()

    def make_replicas_equal(self) -> list[str]:
        """Compare by hash the parameters that several ranks hold; broadcast the first's where they differ: which."""
        self._wait()
        return [name for one in self.every for name in one.make_equal()]

    def _wait(self, indices: Collection[int] | None = None) -> None:
        """Return when these buckets' values have arrived; by default all buckets'."""
        for index in range(len(self.every)) if indices is None else sorted(indices):
            self.every[index].wait()
