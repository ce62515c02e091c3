"""The buckets of gradients that a run would make, the programs that sum and publish them, and a rank's memory with
them.

The programs are recorded from the data-parallel policies (data_parallel/), run on buckets of meta tensors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from meshwright.compute.models.chain import chain_of, split_name
from meshwright.compute.parameters.bucket import Bucket, BucketKey, SlotSize, arranged, gradient_dtype, padded
from meshwright.compute.parameters.owners import Segments
from meshwright.compute.parameters.role import StepRule
from meshwright.compute.parameters.rounding import NOISE_BYTES, NOISE_TENSORS, PIECE
from meshwright.compute.parameters.shard import ShardSpec
from meshwright.compute.precision import DTYPES
from meshwright.config import Config
from meshwright.config.registry import load_entry
from meshwright.planner.plan.memory import Memory, Parameter, Peak
from meshwright.planner.plan.recorder import Program, Recorder
from meshwright.planner.plan.remembered import remembered
from meshwright.planner.plan.software import HALF, Software, Sums
from meshwright.ranks.comm import Comm
from meshwright.ranks.grid import ENDS, HEAD_COPIES, PIPE, Grid
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.data_parallel.assembly import bucket_bytes
from meshwright.strategies.data_parallel.strategy import BucketBytes, HeldBytes, Policy, Synchroniser
from meshwright.strategies.memory.offload import SINGLE, kept_bytes, master_bytes, moment_bytes, state_bytes
from meshwright.strategies.optim.section import Update
from meshwright.strategies.optim.states import by_rule, stepped_together

if TYPE_CHECKING:
    from meshwright.planner.plan.site import Site


class BucketPrograms(NamedTuple):
    """The programs of a bucket (PlannedBucket)."""

    reduce: Program
    publish: Program
    across: Program
    gather: Program


@dataclass(eq=False)
class BucketSums:
    """The sums of equal buckets. A search reads the programs of few layouts, so these are recorded at the first
    read."""

    policy: Policy
    bucket: Bucket
    """The bucket, on meta tensors."""
    mesh: Mesh
    recorder: Recorder
    """The recorder that observes `mesh`."""
    trained: bool
    """False: the weights are gathered, and neither summed nor published."""

    @cached_property
    def comm(self) -> Comm:
        """The communicator of the ranks that divide the bucket into slices."""
        return self.mesh.comm(*(axis for axis in self.bucket.sum_axes if axis not in self.policy.apart))

    @cached_property
    def owned(self) -> tuple[int, int]:
        """The first of the elements that this rank steps, and the end of these."""
        return self.policy.owned(self.bucket, self.comm)

    @cached_property
    def programs(self) -> BucketPrograms:
        """The recorded programs."""
        (start, stop), program, ledger = self.owned, self.recorder.program, self.mesh.ledger
        values, gradients = self.bucket.values, self.bucket.gradients
        # On meta tensors the policy sends nothing; the comm records the program.
        with program(ledger) as recorded:
            self.policy.reduce(self.bucket, self.comm).wait()
        reduce = recorded()
        with program(ledger) as recorded:
            self.policy.publish(self.bucket, self.comm).wait()
        publish = recorded()
        with program(ledger) as recorded:
            apart = (axis for axis in self.bucket.sum_axes if axis in self.policy.apart)
            self.mesh.comm(*apart).all_reduce(gradients[start:stop])
        across = recorded()
        with program(ledger) as recorded:
            # zero3's gather before a task: the whole bucket, from its ranks' slices.
            self.comm.all_gather(values, values[: values.numel() // self.comm.size])
        if not self.trained:
            reduce = publish = across = Program()
        return BucketPrograms(reduce, publish, across, recorded())


# Not frozen: a search makes 10^6 buckets, and a frozen one takes three times as long. Equal only if identical.
@dataclass(eq=False)
class PlannedBucket:
    """A bucket of gradients. Never changed."""

    kind: BucketKey
    """The facts that all parameters of the bucket share."""
    summed_in: torch.dtype
    """The dtype of the gradients."""
    names: tuple[str, ...]
    """Names of the bucket's parameters."""
    num_elements: int
    """Elements with padding."""
    stepped_elements: int
    """Elements stepped by this rank's optimizer."""
    ranks: int
    """The number of ranks that sum these gradients."""
    matrices: tuple[tuple[int, ...], ...]
    """The shape of each matrix that this rank steps, under a rule that steps whole matrices."""
    blocks: bool
    """Whether the sum runs after the backward pass."""
    parts_back: frozenset[int]
    """The parts of the model that read the weights in the backward pass."""
    waits: bool
    """Whether sliced gradients are summed once, at the step's end, and not for each microbatch."""
    slices: bool
    """Whether gradients are slices; `reduce` then runs for each microbatch, unless the bucket `waits`."""
    casts: bool
    """Whether the slices of half-precision weights and gradients are float32 (Software.slice_dtype)."""
    nearest: bool
    """Whether bf16 masters and states are rounded without random bits (Software.rounding)."""
    low_bytes: int
    """Bytes of whole weights beyond the run's format (Software.low_weights); below zero if weights are narrower."""
    sums: BucketSums

    @property
    def reduce(self) -> Program:
        return self.sums.programs.reduce

    @property
    def publish(self) -> Program:
        return self.sums.programs.publish

    @property
    def across(self) -> Program:
        """The sum over ranks with equal slices, once a step."""
        return self.sums.programs.across

    @property
    def gather(self) -> Program:
        """The all-gather of weights, if weights are slices."""
        return self.sums.programs.gather

    @cached_property
    def sizes(self) -> BucketBytes:
        key, value, gradient = self.kind, self.kind.dtype.itemsize, self.summed_in.itemsize * self.kind.rule.trained
        # A float32 slice of the weights is the optimizer's master, which its states count.
        own_value, own_gradient = (0, SINGLE) if self.casts else (value, gradient)
        weights, owned = self.num_elements * value + self.low_bytes, self.stepped_elements * own_value
        # Copies beside the run's format are of whole weights; weights in the lower format alone are cut in it.
        owned += min(0, self.low_bytes) * self.stepped_elements // self.num_elements if owned else 0
        return BucketBytes(
            (key.dtype, key.rule.decays, key.sum_axes, key.cut_axes), key.parts, weights,
            self.num_elements * gradient, owned, self.stepped_elements * own_gradient, self.waits,
        )  # fmt: skip

    @cached_property
    def stepped(self) -> SlotSize:
        """The size of this rank's slot."""
        return SlotSize(self.stepped_elements, self.kind.dtype, self.kind.rule, self.matrices)

    def master_bytes(self, config: Config) -> int:
        """Return the bytes of an element's float32 master; 0 without a master."""
        return master_bytes(config.optimizer, self.kind.dtype) if self.kind.rule.trained else 0

    def stored_bytes(self, config: Config) -> int:
        """Return the bytes of this rank's slot in a checkpoint: weights or masters, and moments."""
        weights = self.stepped_elements * (self.master_bytes(config) or self.kind.dtype.itemsize)
        return weights + sum(moment_bytes(config.optimizer, self.stepped)) * self.kind.rule.trained

    def touched_bytes(self, config: Config, device_type: str) -> int:
        """Return the bytes that the norm and the optimizer's step read and write.

        The step reads and writes weights and moments, and both read the gradient. Half-precision weights add the
        gradient's widening and the rounding. On a CPU the norm adds a float64 copy (norm.py).
        """
        size, gradient = self.kind.dtype.itemsize, SINGLE if self.casts else self.summed_in.itemsize
        # The norm reads the gradient. The step reads the gradient, and reads and writes master or weight and every
        # moment. To the nearest, one kernel reads and writes the weight in bf16 and widens nothing.
        narrow = config.optimizer.masters == "bf16" and size < SINGLE
        alone = narrow and self.nearest
        each = gradient + (gradient + 2 * size if alone else max(SINGLE, size) * (2 + 1))
        if gradient < SINGLE and not alone:
            each += gradient + SINGLE
        # The CPU's norm writes and reads a wide copy.
        if device_type == "cpu" and gradient < torch.float64.itemsize:
            each += 2 * torch.float64.itemsize
        # Gathered weights are cast by the gathers.
        if self.master_bytes(config) and not (self.casts and config.layout.data.strategy.gathers):
            each += SINGLE + size
        if narrow and not alone:
            each += NOISE_BYTES - 2 * (SINGLE - size)  # the step reads and writes the weight in bf16
        if config.optimizer.states == "bf16" and not self.nearest:
            each += NOISE_BYTES * len(config.optimizer.update.states_of(self.kind.rule))
        return self.stepped_elements * each + 2 * sum(moment_bytes(config.optimizer, self.stepped))


class _Group(NamedTuple):
    """Parameters that share a bucket, with the fields of PlannedBucket. `shapes`: of each; `num_elements`: without
    padding."""

    kind: BucketKey
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    num_elements: int
    parts_back: frozenset[int]
    waits: bool


class _Arrangement(NamedTuple):
    """Facts that determine the parameters of each bucket."""

    by_part: bool
    """Weights are gathered part by part."""
    by_chunk: bool
    """A chunk has separate buckets, since a shared bucket would wait for the other chunk's backward pass."""
    bucket_bytes: int
    """0: by part, of any size."""
    grid: Grid
    """The run's axes; all of size 1 unless matrices are assigned to ranks."""
    token_axes: tuple[str, ...]
    update: Update
    policy: str
    """The data-parallel policy that assigns matrices to ranks; empty: the optimizer steps no matrices."""


@dataclass(frozen=True, eq=False)
class HeldParameters:
    """The parameters of a rank, in the model's order. Instances are equal only if identical."""

    parameters: tuple[Parameter, ...]
    tied: frozenset[str] = frozenset()
    """Names of parameters that another stage also holds."""

    @remembered()
    def groups(self, rule: _Arrangement) -> list[_Group]:
        """Return the parameters of each bucket, in the order in which buckets are sent."""
        mesh = planned_mesh(rule.grid, 0, rule.token_axes)
        known, parameters = self.by_name, self.parameters
        using = {name: each.parts for name, each in known.items()} if rule.by_part else None
        chunks = {name: each.chunks for name, each in known.items()} if rule.by_chunk else None
        groups = arranged(
            [(each.name, each.num_elements, each.dtype) for each in parameters], self.specs, mesh, rule.bucket_bytes,
            using, chunks, rule.update.rule_of, load_entry(rule.policy)().dealt_over(mesh) if rule.policy else None,
        )  # fmt: skip
        made = []
        for key, names in groups:
            members = [known[name] for name in names]
            made.append(_Group(
                key, tuple(names), tuple([each.shape for each in members]),
                sum([each.num_elements for each in members]),
                frozenset([segment for each in members for segment in each.parts_back]),
                # Gradients computed by B, or by two chunks, are complete only after the step's last microbatch.
                any(each.comes_with_b or len(each.chunks) > 1 for each in members),
            ))  # fmt: skip
        return made

    @cached_property
    def by_name(self) -> dict[str, Parameter]:
        return {each.name: each for each in self.parameters}

    @cached_property
    def specs(self) -> dict[str, ShardSpec]:
        """The parameters' specs; parameters that share a spec object share the result's."""
        tied = {each.name: replace(each.spec, tied=True) for each in self.parameters if each.name in self.tied}
        return {each.name: each.spec for each in self.parameters} | tied

    @cached_property
    def weight_bytes(self) -> int:
        return sum(each.weight_bytes for each in self.parameters)

    @remembered("precision", "widens_gradients")
    def gradient_bytes(self, config: Config) -> int:
        """Return the bytes of whole gradients."""
        return sum(each.gradient_bytes(config) for each in self.parameters)


@dataclass(frozen=True, eq=False)
class Buckets:
    """Plans buckets, and caches the programs of equal ones. `casts`: Software.slice_dtype is float32. `low_weight`:
    bytes of an element of a linear's weight beyond the run's format (Software.low_weight). `nearest`:
    Software.rounding is nearest. `when`: Software.sums."""

    casts: bool = False
    low_weight: float = 0.0
    nearest: bool = False
    when: Sums = "microbatch"

    def are_late(self, config: Config) -> bool:
        """Return whether sliced gradients are summed once, at the step's end."""
        late = self.when == "step" or (self.when == "stages" and config.layout.pipeline.size > 1)
        return late and config.layout.data.strategy.slices and config.accumulates

    def of(self, config: Config, rank: int, held: HeldParameters) -> list[PlannedBucket]:
        """Return a rank's buckets, in the order in which buckets are sent."""
        grid, update = config.grid, config.optimizer.update
        mesh = planned_mesh(grid, rank, config.layout.token_axes)
        if not update.matrix_step:  # no matrix is assigned to a rank
            grid = Grid(tuple((name, 1) for name in grid.names), (grid.names[0], 1) if grid.copies else None)
        sync = config.layout.data.strategy
        policy, widens = load_entry(sync.policy)(), config.widens_gradients
        late = self.are_late(config)
        buckets: list[PlannedBucket] = []
        comms: dict[tuple[str, ...], tuple[Comm, tuple[int, ...]]] = {}
        known: dict[Hashable, tuple[Any, ...]] = {}
        arrangement = _Arrangement(
            sync.gathers, sync.slices and config.layout.pipeline.chunks > 1,
            0 if sync.gathers else bucket_bytes(config), grid,
            mesh.token_axes, update, sync.policy if update.matrix_step else "",
        )  # fmt: skip
        for key, names, shapes, elements, parts_back, waits in held.groups(arrangement):
            # Buckets of layers are equal except for names and parts.
            alike = key.dtype, key.rule, key.sum_axes, key.segments, elements, shapes if update.matrix_step else ()
            if alike not in known:
                if key.sum_axes not in comms:
                    each = tuple(mesh.comm(axis).size for axis in key.sum_axes)
                    comms[key.sum_axes] = mesh.comm(*key.sum_axes), each
                comm, sizes = comms[key.sum_axes]
                num_elements = padded(elements, comm.size)
                summed_in = gradient_dtype(key.dtype, widens and not (late and self.when == "step"))
                ranks = tuple(zip(key.sum_axes, sizes, strict=True))
                sums = self._sums(
                    sync.policy, key.dtype, summed_in, num_elements, ranks, comm.index, key.segments, key.rule.trained
                )
                start, stop = sums.owned
                stepped = stop - start
                summing = mesh.comm(*(axis for axis in key.sum_axes if axis not in policy.apart))
                matrices = _stepped_matrices(key, shapes, summing.index if stepped else None)
                known[alike] = summed_in, num_elements, stepped, math.prod(sizes), matrices, sums
            summed_in, num_elements, stepped, num_ranks, matrices, sums = known[alike]
            casts = (
                self.casts and sync.slices and key.rule.trained and config.memory.offload.to == "none"
                and master_bytes(config.optimizer, key.dtype) > 0
            )  # fmt: skip
            low_bytes = 0
            if self.low_weight and key.dtype.itemsize == HALF:
                low_bytes = round(self.low_weight * low_elements(names, shapes))
            buckets.append(PlannedBucket(
                key, summed_in, names, num_elements, stepped, num_ranks, matrices, policy.blocks, parts_back,
                waits or late, sync.slices, casts, self.nearest, low_bytes, sums,
            ))  # fmt: skip
        return buckets

    @remembered()
    def _sums(
        self, policy: str, dtype: torch.dtype, summed_in: torch.dtype, num_elements: int,
        axes: tuple[tuple[str, int], ...], index: int, segments: Segments, trained: bool,
    ) -> BucketSums:  # fmt: skip
        # The order of axes is no key: bytes sent are equal in every order, and only seconds differ (network.py). The
        # rank's index is a key: a root sends more than the others.
        recorder, stand_ins = Recorder(), {ENDS: PIPE, HEAD_COPIES: f"axis of {HEAD_COPIES}"}
        copies = next(((stand_ins[name], size) for name, size in axes if name == HEAD_COPIES), None)
        grid = Grid(tuple((stand_ins.get(name, name), size) for name, size in axes), copies)
        mesh = planned_mesh(grid, index, (), observer=recorder.started)
        values = torch.empty(num_elements, dtype=dtype, device=mesh.device)
        gradients = torch.empty(num_elements, dtype=summed_in, device=mesh.device)  # empty_like is Python code on meta
        # The rule does not matter here: the segments determine how whole matrices are sent.
        names, rule = tuple(name for name, _ in axes), StepRule("elements")
        bucket = Bucket(values, gradients, {}, (), rule, names, (), segments=segments)
        return BucketSums(load_entry(policy)(), bucket, mesh, recorder, trained)

    @remembered(
        "model", "data", "loss", "bits", "batch.global_", "layout.data", "layout.context", "layout.tensor",
        "layout.order", "layout.pipeline.size",
    )  # fmt: skip
    def share(self, config: Config) -> Program:
        """Return the program that gives rank 0 its rows of a step's batch; if rank 0 is the server, the program
        scatters all."""
        recorder = Recorder()
        mesh = planned_mesh(config.grid, 0, config.layout.token_axes, "cpu", recorder.started)
        sync = config.layout.data.strategy
        shapes = chain_of(config).sample_shapes(config).items()
        with recorder.program(mesh.ledger) as recorded:
            synchroniser = load_entry(sync.synchroniser)([], mesh, load_entry(sync.policy)())
            synchroniser.share(
                lambda _, count: {
                    name: torch.empty(count, *shape, dtype=torch.long, device="meta") for name, shape in shapes
                },
                config.replica_batch,
            )
        return recorded()


def low_elements(names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the elements of the weights of layers' linears, without routers, whose products keep the run's format."""
    return sum(
        math.prod(shape)
        for name, shape in zip(names, shapes, strict=True)
        if len(shape) > 1 and split_name(name)[0] is not None and ROUTER not in name
    )


ROUTER = ".router."


def _stepped_matrices(
    key: BucketKey, shapes: Sequence[tuple[int, ...]], rank: int | None
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """Return the shapes of the matrices that a rank steps. `rank`: its index among the ranks that sum the bucket; None:
    it steps no part of the bucket."""
    if key.rule.by != "matrices" or rank is None:
        return ()
    if not key.segments:
        return tuple(shapes)
    begins = accumulate((math.prod(shape) for shape in shapes), initial=0)
    first, last = key.segments[rank : rank + 2]
    return tuple(shape for shape, begin in zip(shapes, begins, strict=False) if first <= begin < last)


def loads_program(config: Config, rank: int, routers: int) -> Program:
    """Return the program that sums the loads counted by a rank's routers over a batch (tensor/router.py)."""
    recorder = Recorder()
    mesh = planned_mesh(config.grid, rank, config.layout.token_axes, "cpu", recorder.started)
    wide = torch.promote_types(DTYPES[config.precision.dtype], torch.float32)
    with recorder.program(mesh.ledger) as recorded:
        loads = torch.empty(routers, config.model.routing.num_experts, dtype=wide, device="meta")
        mesh.comm(*mesh.token_axes).all_reduce(loads)
    return recorded()


def streams(config: Config) -> bool:
    """Return whether an optimizer steps each bucket on arrival: it is offloaded, and does not wait for the norm
    (clipping, the loss scale of fp16)."""
    waits = config.optimizer.clip is not None or config.precision.dtype == "fp16"
    return config.memory.offload.to != "none" and not waits


def memory_of(config: Config, buckets: Sequence[PlannedBucket], peak: Peak, site: Site) -> Memory:
    """Return the memory of a rank with these buckets. `peak`: the most bytes held by its tasks."""
    software, (host, host_of_node) = site.software, host_bytes(config, buckets, peak, site)
    held = held_of(config, buckets)
    # The copies exist after the tasks' memory is freed, so the larger of the two counts.
    widened = max(map(sum, widened_together(config, buckets, software)), default=0)
    most = max(peak.total_bytes + held.passing, widened)
    activations = min(peak.activation_bytes, most)
    return Memory(
        held.weights,
        held.gradients + software.apart_bytes(config, held),
        state_bytes(config, slots_of(buckets)),
        activations,
        most - activations,
        site.context(config),
        host=host,
        host_of_node=host_of_node,
        unpredicted=software.unpredicted_share(config),
    )


def host_bytes(config: Config, buckets: Sequence[PlannedBucket], peak: Peak, site: Site) -> tuple[int, int]:
    """Return the bytes in host memory apart from the device: of a rank, and of all ranks of a node with equal bytes.

    The bytes are activations, offloaded states, and the buffer of a GPU's checkpoint (checkpoint/staging.py). Of ranks
    with equal slots one copies its slot to the host; a node's part of these ranks is taken to be its part of all ranks.
    """
    each = peak.host_bytes
    if site.cluster.device.kind == "cpu":  # a CPU's memory is the host's
        return each, 0
    if config.memory.offload.to == "host":
        each += kept_bytes(config.optimizer, slots_of(buckets))
    stored: dict[Hashable, int] = {}
    for bucket in buckets:  # layers have equal slots
        if bucket.stepped not in stored:
            stored[bucket.stepped] = bucket.stored_bytes(config)
    copied = [stored[bucket.stepped] for bucket in buckets]
    share = sum(
        size * bucket.num_elements / (bucket.ranks * bucket.stepped_elements)
        for size, bucket in zip(copied, buckets, strict=True)
        if size
    )
    ranks = min(config.layout.world_size, site.cluster.devices_per_node)
    return each + sum(copied), max(each + sum(copied), round(ranks * (each + share)))


def widened_together(config: Config, buckets: Sequence[PlannedBucket], software: Software) -> Iterator[list[int]]:
    """Yield the bytes of float32 copies of half-precision gradients that an optimizer on the device holds at a time.

    With random rounding, the bytes of a piece's tensors are yielded first: at most a GPU's piece, at most the longest
    slot.
    """
    random = config.optimizer.rounds and software.rounding == "random"
    if random:
        longest = max((bucket.stepped_elements for bucket in buckets), default=0)
        yield [SINGLE * min(PIECE["cuda"], longest)] * (len(config.optimizer.update.states) + NOISE_TENSORS)
    nearest = config.optimizer.masters == "bf16" and software.rounding == "nearest"
    if random or nearest or config.memory.offload.to != "none":
        return
    for members in by_rule([bucket.kind.rule for bucket in buckets]).values():
        rule_buckets = [buckets[index] for index in members]
        sizes = [
            0 if bucket.casts or bucket.summed_in.itemsize >= SINGLE else bucket.stepped_elements * SINGLE
            for bucket in rule_buckets
        ]
        for some in [range(len(sizes))] if software.widening == "whole" else stepped_together(sizes):
            yield [sizes[index] for index in some]


def held_of(config: Config, buckets: Sequence[PlannedBucket]) -> HeldBytes:
    """Return a rank's bytes of weights and gradients in these buckets, from the strategy's synchroniser."""
    synchroniser: type[Synchroniser] = load_entry(config.layout.data.strategy.synchroniser)
    return synchroniser.held([bucket.sizes for bucket in buckets])


def slots_of(buckets: Sequence[PlannedBucket]) -> list[SlotSize]:
    """Return the sizes of the slots that a rank's optimizer steps."""
    return [bucket.stepped for bucket in buckets if bucket.kind.rule.trained]
