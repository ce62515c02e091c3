"""A data-parallel strategy as the train loop sees it, and the one synchroniser that executes gradient sums.

A step: share the batch, forward and backward of each microbatch (pipeline/), finish (the slots' gradients are the
global batch's), the optimizer steps the slots, publish (every rank's parameters are the new ones). New values may
travel under the next forward pass: each part of the model then waits for its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, nn

from meshwright.bits.fixed import FixedPoint
from meshwright.bits.gradients import ExactGradients
from meshwright.model import Batch, Chunk, Hidden, LoadRows, Model, Scales
from meshwright.parameters.bucket import Bucket, FlatWeights, PartsUsing, Slot
from meshwright.parameters.gradients import Gradients, OnFirst, OnGradient, Views
from meshwright.ranks.agreement import make_equal, same_everywhere
from meshwright.ranks.comm import DONE, Comm, Later, Work, size_bytes
from meshwright.ranks.grid import DATA_AXES
from meshwright.ranks.mesh import Mesh


class Policy(Protocol):
    """How one bucket travels: summed to its owners, then published by them.

    `replicated`: every rank owns all of a bucket. `blocks`: `reduce` returns only when the other ranks have come, too.
    """

    replicated: bool
    blocks: bool

    def owned(self, bucket: Bucket, comm: Comm) -> tuple[int, int]:
        """start, stop of the part that this rank's optimizer steps."""

    def reduce(self, bucket: Bucket, comm: Comm) -> Work:
        """Sum the gradients over the comm into (at least) the owned part."""

    def publish(self, bucket: Bucket, comm: Comm) -> Work:
        """Bring the owners' new values to every rank."""


class Replicated:
    """The part of a policy whose ranks all step the whole bucket, so that nothing is left to publish."""

    replicated = True
    blocks = False

    def owned(self, bucket: Bucket, comm: Comm) -> tuple[int, int]:
        return 0, bucket.values.numel()

    def publish(self, bucket: Bucket, comm: Comm) -> Work:
        return DONE


class RunsParts(Protocol):
    """A chain, which has each of its parts run by `run_part(part, function, *arguments)`."""

    run_part: Callable[..., Any]


class Strategy(Protocol):
    """A data-parallel strategy, as the train loop sees it. `gradients`: where the model's layers add theirs up.
    `every_microbatch`: it sums in each microbatch, not in the step's last alone."""

    gradients: Gradients
    every_microbatch: bool

    @property
    def weight_bytes(self) -> int:
        """The most bytes of weights that a rank holds at a time."""

    @property
    def gradient_bytes(self) -> int:
        """The most bytes of gradients that a rank holds at a time."""

    @property
    def slots(self) -> list[Slot]: ...

    @property
    def weights(self) -> list[FlatWeights]:
        """All that this rank holds of the model; returns when published values have arrived."""

    def share(self, load: LoadRows, replica_batch: int) -> Batch:
        """This replica's rows of the step's global batch, on the host, as `load` gives them."""

    def forward(self, model: Model, batch: Batch, scales: Scales, incoming: Hidden) -> Hidden:
        """A stage's forward pass: what the stage after reads, or (loss,)."""

    def expect(self, final: bool) -> None:
        """Say whether the coming backward pass is the last of its chunk in the step: only in that one gradients may be
        summed."""

    def arrivals(self) -> Iterator[int]:
        """Every slot's index, each as soon as it holds the whole gradient. What has not left yet leaves at the call."""

    def finish(self) -> None:
        """Wait until the slots hold the whole gradient."""

    def publish(self, *, wait: bool = True) -> None:
        """Give every rank the stepped parameters, and clear the gradients. `wait=False`: they may still be on their
        way, and are waited for where the strategy gives weights away or runs the model; slots may be read meanwhile."""

    def whole_weights(self) -> AbstractContextManager[None]:
        """While entered, the model's halves may be called by themselves, without gradients."""

    def make_replicas_equal(self) -> list[str]:
        """Compare by hash the parameters that several ranks hold; broadcast the first's where they differ: which."""


class Synchroniser:
    """Sums buckets over their axes by a policy, each as soon as the backward pass has filled it.

    Between steps no parameter has a gradient: autograd then hands over what it has computed instead of adding it to
    zeros, and a bucket is written once a step.

    Sends, a bucket a step: what its policy sends. Buckets start in one fixed order on every rank. A policy that blocks
    sums them behind the backward pass: inside it a last stage would wait, in the sum of a tied table, for the first,
    and that one for the gradient which the last has yet to send. Nothing is lost: a sum that blocks hides nothing.

    New values are published in the other order, about the forward pass's, under which they travel (`follow`).
    """

    every_microbatch = False

    def __init__(self, buckets: Iterable[Bucket], mesh: Mesh, policy: Policy, fixed: FixedPoint | None = None) -> None:
        """`buckets`: taken one after the other, so that one that is not kept whole is given back before the next.
        `fixed`: how gradients become integers, where the buckets' are."""
        self.fixed = fixed
        self.mesh = mesh
        self.policy = policy
        self.buckets: list[Bucket] = []
        self.comms: list[Comm] = []
        self._slots: list[Slot] = []
        self._views: dict[nn.Parameter, Tensor] = {}
        for bucket in buckets:
            self.take(bucket)
        self._missing = self._all_members()
        self._works: list[Work] = []
        self._final = False
        self._arriving: dict[int, Work] = {}
        """Buckets whose values are on their way."""
        self._of: dict[int, list[int]] = {}
        """The buckets that each part of the model reads."""
        numbered = enumerate(self.buckets)
        self._bucket_of = {parameter: index for index, bucket in numbered for parameter in bucket.parameters}
        self.gradients = self.make_gradients()
        for parameter in self._bucket_of:
            parameter.grad = None

    def take(self, bucket: Bucket) -> None:
        """Add a bucket: the ranks that sum it, and the part of it that this rank's optimizer steps."""
        comm = self.make_comm(bucket)
        self.buckets.append(bucket)
        self.comms.append(comm)
        self._slots.append(self.make_slot(bucket, comm))
        self._views |= bucket.members()

    def make_comm(self, bucket: Bucket) -> Comm:
        """The ranks over which the policy sums and publishes a bucket."""
        return self.mesh.comm(*bucket.sum_axes)

    def make_slot(self, bucket: Bucket, comm: Comm) -> Slot:
        """The part of a bucket that this rank's optimizer steps."""
        start, stop = self.policy.owned(bucket, comm)
        return bucket.slot(start, stop, part_axes=() if self.policy.replicated else bucket.sum_axes)

    def make_gradients(self) -> Gradients:
        """Where the model's layers add their gradients up."""
        return gradients_of(self._views, self.fixed, self.filled)

    @property
    def weight_bytes(self) -> int:
        return sum(size_bytes(bucket.values) for bucket in self.buckets)

    @property
    def gradient_bytes(self) -> int:
        return sum(size_bytes(bucket.gradients) for bucket in self.buckets) + self.gradients.apart_bytes

    @property
    def slots(self) -> list[Slot]:
        return self._slots

    @property
    def weights(self) -> list[FlatWeights]:
        self._wait()
        grid = self.mesh.grid
        return [FlatWeights(bucket.values, bucket.places, bucket.copy_axes(grid)) for bucket in self.buckets]

    def share(self, load: LoadRows, replica_batch: int) -> Batch:
        return load(self.mesh.index(*DATA_AXES) * replica_batch, replica_batch)

    def forward(self, model: Model, batch: Batch, scales: Scales, incoming: Hidden) -> Hidden:
        return model(batch, scales, incoming)

    def expect(self, final: bool) -> None:
        self._final = final

    def _all_members(self) -> list[set[nn.Parameter]]:
        """The parameters of each bucket. What has no elements here (its owner is another rank) gets no gradient."""
        return [{member for member in bucket.parameters if member.numel()} for bucket in self.buckets]

    def follow(self, model: RunsParts, using: PartsUsing, chunks: Sequence[Chunk]) -> None:
        """Wait for the values of a chain's parts when it runs them. `using`: the parts that use each parameter;
        `chunks`: those of the chain that this rank holds."""
        readers = [{part for place in bucket.places for part in using[place.name]} for bucket in self.buckets]
        parts = [part for chunk in chunks for part in chunk.parts]
        self._of = {part: [index for index, those in enumerate(readers) if part in those] for part in parts}
        model.run_part = self.run_part

    def run_part(self, part: int, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a part of the model when its values have arrived."""
        self._wait(self._of[part])
        return function(*arguments)

    def arrivals(self) -> Iterator[int]:
        self._wait()  # a slot must not be stepped while it travels
        for missing in self._missing:
            for parameter in missing:  # which the last microbatch did not reach
                self.gradients.fill(parameter)
            missing.clear()
        self._launch()
        works, self._works, self._missing = self._works, [], self._all_members()
        return self._as_floats(ended(works))

    def _as_floats(self, arrivals: Iterator[int]) -> Iterator[int]:
        """The arrivals, each slot's sum of integers as the float32 gradient that its optimizer reads."""
        for index in arrivals:
            if self.fixed is not None:
                self.fixed.to_float32(self._total(index))
            yield index

    def _total(self, index: int) -> Tensor:
        """The memory in which a slot's gradient is summed."""
        start, stop = self.policy.owned(self.buckets[index], self.comms[index])
        return self.buckets[index].gradients[start:stop]

    def finish(self) -> None:
        for _ in self.arrivals():
            pass

    def publish(self, *, wait: bool = True) -> None:
        self._wait()
        for index in reversed(range(len(self.buckets))):
            self._arriving[index] = self.policy.publish(self.buckets[index], self.comms[index])
        # What begins when it is waited for gains nothing, and inside of a forward pass the first and the last stage
        # would wait for each other: for a tied table's values, and for the hidden states before them.
        self._wait([index for index, comm in enumerate(self.comms) if wait or comm.begins_when_waited_for])
        for bucket in self.buckets:
            for parameter in bucket.parameters:
                self.gradients.clear(parameter)

    def whole_weights(self) -> AbstractContextManager[None]:
        self._wait()
        return nullcontext()

    def make_replicas_equal(self) -> list[str]:
        self._wait()
        return make_buckets_equal(self.buckets, self.mesh)

    def _wait(self, indices: Collection[int] | None = None) -> None:
        """Return when the values of these buckets have arrived, by default of all."""
        for index in sorted(self._arriving if indices is None else self._arriving.keys() & set(indices)):
            self._arriving.pop(index).wait()

    def filled(self, parameter: nn.Parameter) -> None:
        """A parameter has its gradient of a microbatch. In the final one, buckets that are full leave."""
        if self._final:
            self.gradients.fill(parameter)
            self._missing[self._bucket_of[parameter]].discard(parameter)
            self._launch()

    def _launch(self) -> None:
        """Start the sums of the next buckets in order, as far as they are filled."""
        while len(self._works) < len(self.buckets) and not self._missing[len(self._works)]:
            index = len(self._works)
            bucket = self.buckets[index]
            if self.fixed is not None:
                bucket.gradients[bucket.places[-1].stop :].zero_()  # padding, where the last step's floats still are
            self._works.append(self._sum(bucket, self.comms[index]))

    def _sum(self, bucket: Bucket, comm: Comm) -> Work:
        """Under way, or where it would block here begun when it is waited for."""
        if self.policy.blocks:
            return Later(lambda: self.policy.reduce(bucket, comm).wait())
        return self.policy.reduce(bucket, comm)


def gradients_of(
    views: Views, fixed: FixedPoint | None, on_gradient: OnGradient, on_first: OnFirst | None = None
) -> Gradients:
    """Where layers add up: floats, or integers if sums are `fixed`."""
    if fixed is None:
        return Gradients(views, on_gradient, on_first)
    return ExactGradients(views, fixed, on_gradient, on_first)


def make_buckets_equal(buckets: Sequence[Bucket], mesh: Mesh) -> list[str]:
    """Strategy.make_replicas_equal of weights that lie in buckets."""
    differing = []
    for bucket in buckets:
        comm = mesh.comm(*bucket.copy_axes(mesh.grid))
        if not same_everywhere(bucket.values, comm):  # one small message, as long as all is well
            parts = ((place.name, bucket.values[place.start : place.stop]) for place in bucket.places)
            differing += [name for name, values in parts if make_equal(values, comm)]
    return differing


def ended(works: list[Work]) -> Iterator[int]:
    """The works' indices, each when it has ended."""
    for index, work in enumerate(works):
        work.wait()
        yield index
