"""The base of data-parallel strategies: the synchroniser, which sums gradients over replicas by a policy.

A step: share the batch, forward and backward of each microbatch (pipeline/), finish (slots hold the global batch's
gradients), the optimizer steps the slots, publish (every rank gets the new parameters). New values may be sent during
the next forward pass: each part of the model then waits for its own.
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
from meshwright.strategies.data_parallel.pieces import convert, pieces_of


class Policy:
    """A rule for summing one bucket to its owners, and for publishing the owners' new values.

    | owners | gradients are summed by | a rank's optimizer steps       | then the new values are             |
    |--------|-------------------------|--------------------------------|-------------------------------------|
    | all    | an all-reduce           | the whole bucket               | on every rank: nothing is published |
    | each   | a reduce-scatter        | the slice of the rank's index  | gathered                            |
    | first  | a reduce to the first   | all of it on the first, else 0 | broadcast by the first rank         |
    With `each`, matrices that are stepped whole are reduced to an owner each, which broadcasts the values (owners.py).
    """

    owners: Literal["all", "each", "first"] = "all"
    publishes = True
    """Whether owners send new values; False if weights are sliced, too, and gathered for each computation."""
    blocks = False
    """Whether `reduce` returns only after the other ranks have called it, too."""
    by_pieces = False
    """Whether each rank may sum a piece of integers (pieces.py)."""
    apart: tuple[str, ...] = ()
    """Axes along which ranks own the same part: summed over the other axes first, then once a step over these."""

    def owned(self, bucket: Bucket, comm: Comm) -> tuple[int, int]:
        """Return start, stop of the part that this rank's optimizer steps."""
        length = bucket.values.numel()
        if self.owners == "each" and bucket.segments:
            return bucket.segments[comm.index], bucket.segments[comm.index + 1]
        if self.owners == "each":
            slice_length = length // comm.size
            return comm.index * slice_length, (comm.index + 1) * slice_length
        return 0, length if self.owners == "all" or comm.index == 0 else 0

    def dealt_over(self, mesh: Mesh) -> DealtOver | None:
        """Return ranks(axes): the number of ranks that share out a bucket's matrices; None: none are shared out."""
        if self.owners != "each":
            return None
        return lambda axes: mesh.comm(*(axis for axis in axes if axis not in self.apart)).size

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        """Sum the gradients over the comm into (at least) the owned part."""
        match self.owners:
            case "all":
                return comm.all_reduce(bucket.gradients.view(-1), wait=False)
            case "each" if bucket.segments:
                return together(
                    comm.reduce(bucket.gradients[start:stop].view(-1), owner, wait=False)
                    for owner, start, stop in owners(bucket.segments)
                )
            case "each":
                start, stop = self.owned(bucket, comm)
                return comm.reduce_scatter(bucket.gradients[start:stop].view(-1), bucket.gradients.view(-1), wait=False)
            case "first":
                return comm.reduce(bucket.gradients.view(-1), 0, wait=False)

    def publish(self, bucket: Bucket, comm: Comm) -> Work:
        """Send the owners' new values to every rank."""
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
    """A bucket's bytes on a rank: all `weights` and `gradients`, `own_weights` and `own_gradients` of the part that the
    rank's optimizer steps. `kind`: buckets of equal kind can reuse each other's memory. `parts`: of the model, for
    buckets made by part. `waits`: gradients accumulate over all microbatches and are summed once, at the step's end."""

    kind: Hashable
    parts: tuple[int, ...]
    weights: int
    gradients: int
    own_weights: int
    own_gradients: int
    waits: bool


class HeldBytes(NamedTuple):
    """Bytes of weights and gradients held permanently, and the peak held temporarily while tasks run."""

    weights: int
    gradients: int
    passing_weights: int = 0
    passing_gradients: int = 0

    @property
    def passing(self) -> int:
        return self.passing_weights + self.passing_gradients


class State(Enum):
    """A bucket's state in a step. After a sum in any microbatch but the last, the bucket is filled again."""

    FILLING = "some of its gradients are to come"
    FULL = "it leaves when those before it have left"
    SUMMING = "its sum is under way"
    CROSSING = "ranks that own the same part of it sum theirs"
    SUMMED = "its slot holds the whole gradient"


class BucketSum:
    """A bucket in a step, and the only owner of its state: filling, full, summing, crossing, summed.

    Methods are the transitions, overridden by strategies. The `Synchroniser` decides when buckets change state, and in
    which order.
    """

    waits = False
    """Whether whole gradients accumulate and are summed once, at the step's end."""

    def __init__(self, bucket: Bucket, mesh: Mesh, policy: Policy) -> None:
        self.bucket, self.mesh, self.policy = bucket, mesh, policy
        axes = tuple(axis for axis in bucket.sum_axes if axis not in policy.apart)
        self.comm = mesh.comm(*axes)
        """The ranks over which the policy sums and publishes the bucket."""
        self.copies = mesh.comm(*(axis for axis in bucket.sum_axes if axis in policy.apart))
        """The ranks that own the same part."""
        self.pieces = pieces_of(bucket, self.comm) if policy.by_pieces else None
        """Pieces of integers that ranks sum; None: the policy sums."""
        start, stop = policy.owned(bucket, self.comm)
        self.slot = bucket.slot(start, stop, part_axes=() if policy.owners == "all" else axes)
        """The part of the bucket that this rank's optimizer steps."""
        self.total = bucket.gradients[start:stop]
        """The memory of the slot's summed gradient: integers, or pairs of integers, if bits are layout-free."""
        self.weights = FlatWeights(bucket.values, bucket.places, bucket.copy_axes)
        """This rank's part of the bucket's weights between steps."""
        self.work: Work = DONE
        """The sum in progress."""
        self.arriving: Work | None = None
        """The receive of values stepped by other ranks."""
        self.refill()

    @property
    def sizes(self) -> BucketBytes:
        bucket, slot_elements = self.bucket, self.slot.parameter.numel()
        group_key = bucket.values.dtype, bucket.rule.decays, bucket.sum_axes, bucket.cut_axes
        value, gradients = bucket.values.element_size(), bucket.gradients
        return BucketBytes(
            group_key, bucket.parts, bucket.values.numel() * value, gradients.numel() * gradients.element_size(),
            slot_elements * value, self.total.numel() * gradients.element_size(), self.waits,
        )  # fmt: skip

    def refill(self) -> None:
        """Begin filling: all gradients are missing, except of parameters without elements here (another rank's)."""
        self.missing = {member for member in self.bucket.views if member.numel()}
        self.state = State.FILLING if self.missing else State.FULL

    def begin(self) -> None:
        """Prepare for writing a gradient into the bucket."""

    def take(self, parameter: nn.Parameter) -> None:
        """Note that a parameter has its gradient. Full after the last."""
        self.missing.discard(parameter)
        if not self.missing and self.state is State.FILLING:
            self.state = State.FULL

    def leave(self) -> None:
        """Begin the sum (state: summing). A sum that would block here begins when waited for."""
        # Zero the padding, which slices and the norm may contain: a slice's memory is new, and integer sums leave
        # floats there.
        self.bucket.gradients[self.bucket.places[-1].stop :].zero_()
        usual, self.state = partial(self.policy.reduce, self.bucket, self.comm), State.SUMMING
        reduce = usual if self.pieces is None else self.pieces.reduce
        self.work = Later(lambda: reduce().wait()) if self.policy.blocks else reduce()

    def cross(self) -> None:
        """Begin the sum over the ranks that own the same part, once a step, after the sum of all microbatches."""
        if self.state is State.SUMMING and self.copies.size > 1:
            self.end()
            self.work, self.state = self.copies.all_reduce(self.total.view(-1), wait=False), State.CROSSING

    def end(self) -> None:
        """Wait for the sum (state: summed)."""
        work, self.work = self.work, DONE
        work.wait()
        self.state = State.SUMMED

    def publish(self) -> None:
        """Send the slot's stepped values to ranks that do not step the slot; begin filling again."""
        self.arriving = self.policy.publish(self.bucket, self.comm)
        self.refill()

    def wait(self) -> None:
        """Wait until the values of all owners are received."""
        if self.arriving is not None:
            work, self.arriving = self.arriving, None
            work.wait()

    def make_equal(self) -> list[str]:
        """Return the parameters that were unequal on ranks with copies; all now have the first rank's values."""
        bucket, comm = self.bucket, self.mesh.comm(*self.weights.copy_axes)
        if same_everywhere(bucket.values, comm):  # one small message if all are equal
            return []
        parts = ((region.name, bucket.values[region.start : region.stop]) for region in bucket.places)
        return [name for name, values in parts if make_equal(values, comm)]


class Synchroniser:
    """A data-parallel strategy, as the train loop uses it. `gradients`: collects the gradients of the model's layers.

    Sums buckets over their axes by a policy, each as soon as the backward pass has filled the bucket.

    Between steps no parameter has a gradient: autograd then hands over computed gradients instead of adding to zeros,
    and a bucket is written once a step.

    Sends, once a step and bucket, the policy's messages. Buckets start in one fixed order on every rank. Blocking
    policies sum after the backward pass. During it, tied embeddings would deadlock: the last stage waits for the first
    in the sum, the first for the last stage's gradient. Nothing is lost: a blocking sum overlaps with nothing.

    New values are published in reverse order, about the forward pass's, and sent under that pass (`follow`).
    """

    every_microbatch = False
    """Whether gradients are summed in each microbatch, not only in the step's last."""
    sum_of: type[BucketSum] = BucketSum

    def __init__(self, buckets: Iterable[Bucket], mesh: Mesh, policy: Policy, fixed: FixedPoint | None = None) -> None:
        """`fixed`: the format of gradients in integer buckets."""
        self.fixed = fixed
        self.mesh = mesh
        self.policy = policy
        # One after the other: a bucket that is not kept whole is freed before the next is allocated.
        made = [self.sum_of(bucket, mesh, policy) for bucket in buckets]
        self.sums = [sum_ for sum_ in made if sum_.bucket.rule.trained]
        self.frozen = [sum_ for sum_ in made if not sum_.bucket.rule.trained]
        """Buckets of frozen parameters: values only, never summed, stepped or published."""
        self.every = [*self.sums, *self.frozen]
        self.buckets = [sum_.bucket for sum_ in self.every]
        self.slots = [sum_.slot for sum_ in self.sums]
        self._weights = [sum_.weights for sum_ in self.every]
        self._sum_of = {parameter: sum_ for sum_ in self.sums for parameter in sum_.bucket.views}
        self._final = False
        self._of: dict[int, list[int]] = {}
        """The buckets that each part of the model reads."""
        views = {parameter: view for sum_ in self.sums for parameter, view in sum_.bucket.views.items()}
        told: tuple[OnGradient, OnFirst] = self.filled, lambda parameter: self._sum_of[parameter].begin()
        counts = [member for sum_ in self.sums if sum_.bucket.rule.by == "signs" for member in sum_.bucket.views]
        self.gradients = Gradients(views, *told) if fixed is None else ExactGradients(views, fixed, *told, counts)
        for parameter in self._sum_of:
            parameter.grad = None

    @classmethod
    def held(cls, buckets: Sequence[BucketBytes]) -> HeldBytes:
        """Return the bytes that a rank holds of these buckets. Only sizes are read, so that the planner can call it."""
        return HeldBytes(sum(each.weights for each in buckets), sum(each.gradients for each in buckets))

    @property
    def most_bytes(self) -> tuple[int, int]:
        """The peak bytes of weights, and of gradients, on a rank."""
        held = self.held([sum_.sizes for sum_ in self.every])
        apart = sum(size_bytes(x) for users in self.gradients.apart.values() for x in users.values())
        gradients = held.gradients + held.passing_gradients + apart
        return held.weights + held.passing_weights, gradients

    @property
    def weights(self) -> list[FlatWeights]:
        """This rank's weights; waits until published values are received."""
        self._wait()
        return self._weights

    def share(self, load: LoadRows, replica_batch: int) -> Batch:
        """Return this replica's rows of the step's global batch, on the host, as given by `load`."""
        return load(self.mesh.index(*DATA_AXES) * replica_batch, replica_batch)

    def forward(self, model: Model, batch: Batch, scales: Scales, incoming: Hidden) -> Hidden:
        """Run a stage's forward pass; return the input of the next stage, or (loss,)."""
        return model(batch, scales, incoming)

    def expect(self, final: bool) -> None:
        """Say whether the next backward pass is its chunk's last in the step: gradients may only be summed in
        the last."""
        self._final = final

    def follow(self, model: RunsParts, using: PartsUsing, chunks: Sequence[Chunk]) -> None:
        """Wait for the values of each part of a chain when the part runs. `using`: the parts that use each parameter;
        `chunks`: the chunks of the chain on this rank."""
        readers = [{layer for region in bucket.places for layer in using[region.name]} for bucket in self.buckets]
        parts = [layer for chunk in chunks for layer in chunk.parts]
        self._of = {layer: [index for index, those in enumerate(readers) if layer in those] for layer in parts}
        model.run_parts_by(self.run_part)

    def run_part(self, layer: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of the model after its values are received."""
        self._wait(self._of[layer])
        return function(*arguments)

    def filled(self, parameter: nn.Parameter) -> None:
        """Note a parameter's gradient of a microbatch. In the final microbatch, start the sums of full buckets."""
        if self._final:
            self.gradients.fill(parameter)
            self._sum_of[parameter].take(parameter)
            self._launch()

    def _launch(self) -> None:
        """Start the sums of full buckets, in order, up to the first not full; then `cross` all sums but the newest."""
        for sum_ in self.sums:
            if sum_.state is State.FILLING:
                break
            if sum_.state is State.FULL:
                sum_.leave()
        # With stages, replicas run tasks in different orders, and must not wait for each other during a backward pass.
        if self.policy.apart and self.mesh.size(PIPE) == 1:
            begun = [sum_ for sum_ in self.sums if sum_.state is State.SUMMING and not sum_.comm.begins_when_waited_for]
            for sum_ in begun[:-1]:
                sum_.cross()

    def arrivals(self) -> Iterator[int]:
        """Yield slot indices, each when the slot holds the whole gradient. Starts sums that have not begun."""
        self._wait()  # a slot must not be stepped while being sent
        for sum_ in self.sums:
            # Not reached by the last microbatch, in the bucket's order: a set's order differs by process.
            for parameter in [member for member in sum_.bucket.views if member in sum_.missing]:
                self.gradients.fill(parameter)
                sum_.take(parameter)
        self._launch()
        return self._ended()

    def _ended(self) -> Iterator[int]:
        """Yield the buckets' indices, each when its slot holds the whole gradient."""
        for sum_ in self.sums:
            sum_.cross()
        for index, sum_ in enumerate(self.sums):
            sum_.end()
            if self.fixed is not None:
                convert(self.fixed, sum_.total, sum_.pieces)
            yield index

    def finish(self) -> None:
        """Wait until the slots hold the whole gradient."""
        for _ in self.arrivals():
            pass

    def publish(self, *, wait: bool = True) -> None:
        """Give every rank the stepped parameters, and clear the gradients. `wait=False`: values may still be in
        transit, and are waited for when weights are read or the model runs; slots may be read meanwhile."""
        self._wait()
        for sum_ in reversed(self.sums):
            sum_.publish()
            for parameter in sum_.bucket.views:
                self.gradients.clear(parameter)
        # A send that begins only when waited for gains nothing from waiting later. In a forward pass the first and the
        # last stage would deadlock: one waits for a tied table's values, the other for the hidden states computed
        # before.
        self._wait([index for index, sum_ in enumerate(self.sums) if wait or sum_.comm.begins_when_waited_for])

    def publish_frozen(self) -> None:
        """Give every rank the frozen values that other ranks have read from a checkpoint."""
        # As after a step, which only publishes trained values.
        for sum_ in self.frozen:
            sum_.publish()
        self._wait()

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the model's halves can be called separately, without gradients."""
        self._wait()
        return nullcontext()

    def make_replicas_equal(self) -> list[str]:
        """Compare by hash the parameters held by several ranks. Broadcast unequal ones; return their names."""
        self._wait()
        return [name for sum_ in self.every for name in sum_.make_equal()]

    def _wait(self, indices: Collection[int] | None = None) -> None:
        """Wait until these buckets' values are received; None: all buckets'."""
        for index in range(len(self.every)) if indices is None else sorted(indices):
            self.every[index].wait()
