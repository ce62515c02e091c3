"""Gradients' buckets as a run would make them, the programs that sum and publish them, and a rank's memory with them.

The programs are the data-parallel policies' own (data_parallel/), run on buckets of meta tensors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch

from meshwright.compute.models.chain import chain_of
from meshwright.compute.parameters.bucket import Bucket, BucketKey, SlotSize, arranged, gradient_dtype, padded
from meshwright.compute.precision import DTYPES
from meshwright.config import Config
from meshwright.config.registry import load_entry
from meshwright.planner.plan.memory import Memory, Parameter, Peak
from meshwright.planner.plan.recorder import Program, Recorder
from meshwright.planner.plan.software import Software
from meshwright.ranks.comm import Comm
from meshwright.ranks.mesh import Mesh
from meshwright.ranks.planned import planned_mesh
from meshwright.strategies.data_parallel.assembly import bucket_bytes
from meshwright.strategies.data_parallel.strategy import BucketBytes, HeldBytes, Policy, Synchroniser
from meshwright.strategies.memory.offload import SINGLE, moment_bytes, state_bytes
from meshwright.strategies.optim.states import by_rule, stepped_together


@dataclass(frozen=True)
class PlannedBucket:
    """A bucket of gradients. `names`: its parameters'; `num_elements`: with its padding; `stepped_elements`: those that
    this rank's optimizer steps; `matrices`: the shape of each matrix among them, of a rule that steps matrices;
    `blocks`: it is summed behind the backward pass; `summed_in`: its gradients' type.
    Where gradients are slices, `reduce` runs `sums` times a step, but once where the bucket `waits` for the step's end;
    `across` sums slices that other ranks have too, once. Where weights are slices, too, `gather` brings them together,
    and `parts_back` are the parts of the model that read them going backward."""

    kind: BucketKey
    summed_in: torch.dtype
    names: tuple[str, ...]
    num_elements: int
    stepped_elements: int
    matrices: tuple[tuple[int, ...], ...]
    blocks: bool
    parts_back: frozenset[int]
    waits: bool
    sums: int
    reduce: Program
    publish: Program
    across: Program
    gather: Program

    @cached_property
    def sizes(self) -> BucketBytes:
        kind, value, gradient = self.kind, self.kind.dtype.itemsize, self.summed_in.itemsize * self.kind.rule.trained
        return BucketBytes(
            (kind.dtype, kind.rule.decays, kind.sum_axes, kind.cut_axes), kind.parts, self.num_elements * value,
            self.num_elements * gradient, self.stepped_elements * value, self.stepped_elements * gradient, self.waits,
        )  # fmt: skip

    @property
    def stepped(self) -> SlotSize:
        """The size of this rank's slot."""
        return SlotSize(self.stepped_elements, self.kind.dtype, self.kind.rule, self.matrices)

    @property
    def master_bytes(self) -> int:
        """Bytes of an element's float32 master, where weights are halves."""
        return SINGLE if self.kind.rule.trained and self.kind.dtype.itemsize < SINGLE else 0

    def touched_bytes(self, config: Config, device_type: str) -> int:
        """Bytes that the norm and the optimizer's step read and write: weight and moments twice, gradients once in
        each, and where weights are halves the gradient's widening and the rounding; on a CPU the float64 copy of which
        the norm is (norm.py)."""
        size, gradient = self.kind.dtype.itemsize, self.summed_in.itemsize
        # The norm reads the gradient; the step reads it, and reads and writes master or weight and every moment.
        each = gradient + max(SINGLE, size) * (2 + 1)
        if gradient < SINGLE:
            each += gradient + SINGLE
        # Written once and read once: the CPU's norm is of a wide copy.
        if device_type == "cpu" and gradient < torch.float64.itemsize:
            each += 2 * torch.float64.itemsize
        if self.master_bytes:
            each += SINGLE + size
        return self.stepped_elements * each + 2 * sum(moment_bytes(config.optimizer.update, self.stepped))


class _Group(NamedTuple):
    """Parameters that share a bucket, as PlannedBucket has them; `num_elements`: without padding."""

    kind: BucketKey
    names: tuple[str, ...]
    num_elements: int
    parts_back: frozenset[int]
    waits: bool


@dataclass
class Buckets:
    """Plans buckets, and remembers the programs of those that are alike."""

    _programs: dict[Hashable, tuple[int, Program, Program, Program, Program]] = field(default_factory=dict)
    _arranged: dict[Hashable, list[_Group]] = field(default_factory=dict)
    _shares: dict[Hashable, Program] = field(default_factory=dict)

    def of(
        self, config: Config, rank: int, parameters: Sequence[Parameter], tied: set[str], known: Hashable = None
    ) -> list[PlannedBucket]:
        """A rank's buckets, in the order in which they leave. `tied`: parameters that another stage holds too. `known`:
        equal for equal parameters, where it is said."""
        recorder, layout = Recorder(), config.layout
        mesh = planned_mesh(config.grid, rank, layout.token_axes, "cpu", recorder.started)
        sync = layout.data.strategy
        policy = load_entry(sync.policy)()
        # Of an axis only its name arranges parameters, not how many ranks it has, if no matrices are dealt out to them.
        dealt = (layout.data, layout.axes) if config.optimizer.update.matrix_step else None
        key = (
            known, sync.gathers, sync.slices and layout.pipeline.chunks > 1, bucket_bytes(config), mesh.grid.names,
            mesh.token_axes, dealt,
        )  # fmt: skip
        groups = self._arranged.get(key) if known is not None else None
        if groups is None:
            groups = _groups(config, mesh, parameters, tied)
            if known is not None:
                self._arranged[key] = groups
        shapes = {parameter.name: parameter.shape for parameter in parameters}
        buckets: list[PlannedBucket] = []
        comms: dict[tuple[str, ...], tuple[Comm, tuple[int, ...]]] = {}
        for kind, names, elements, parts_back, waits in groups:
            if kind.sum_axes not in comms:
                comms[kind.sum_axes] = mesh.comm(*kind.sum_axes), tuple(mesh.comm(axis).size for axis in kind.sum_axes)
            comm, sizes = comms[kind.sum_axes]
            num_elements = padded(elements, comm.size)
            summed_in = gradient_dtype(kind.dtype, config.widens_gradients)
            # Not the order of axes: what a sum sends is the same in every order, only its seconds differ (network.py).
            # Its place among the ranks: a root does more than the others.
            alike = (
                layout.data.sync, kind.dtype, summed_in, kind.sum_axes, sizes, comm.index, num_elements, kind.segments,
            )  # fmt: skip
            if alike not in self._programs:
                axes = tuple(axis for axis in kind.sum_axes if axis not in policy.apart)
                self._programs[alike] = _programs(policy, kind, axes, summed_in, num_elements, mesh, recorder)
            stepped, *programs = self._programs[alike]
            if not kind.rule.trained:  # gathered, and neither summed nor published
                programs[:3] = [Program()] * 3
            summing = mesh.comm(*(axis for axis in kind.sum_axes if axis not in policy.apart))
            matrices = _stepped_matrices(kind, [shapes[name] for name in names], summing.index if stepped else None)
            # A bucket whose gradients are late keeps them whole, and is summed once at the step's end.
            sums = config.num_microbatches if sync.slices and not waits else 1
            buckets.append(PlannedBucket(
                kind, summed_in, names, num_elements, stepped, matrices, policy.blocks, parts_back, waits, sums,
                *programs,
            ))  # fmt: skip
        return buckets

    def share(self, config: Config) -> Program:
        """The program by which rank 0 gets its rows of a step's batch; where it is the server, it scatters all."""
        layout = config.layout
        key = layout.data.sync, layout.axes, config.copies, config.replica_batch, config.model, config.data
        if key not in self._shares:
            recorder = Recorder()
            mesh = planned_mesh(config.grid, 0, layout.token_axes, "cpu", recorder.started)
            sync = layout.data.strategy
            shapes = chain_of(config).sample_shapes(config).items()
            with recorder.program(mesh.ledger) as recorded:
                own = load_entry(sync.synchroniser)([], mesh, load_entry(sync.policy)())
                own.share(
                    lambda _, count: {
                        name: torch.empty(count, *shape, dtype=torch.long, device="meta") for name, shape in shapes
                    },
                    config.replica_batch,
                )
            self._shares[key] = recorded()
        return self._shares[key]


def _groups(config: Config, mesh: Mesh, parameters: Sequence[Parameter], tied: set[str]) -> list[_Group]:
    """Which of a rank's parameters share a bucket, in the order in which these leave."""
    sync = config.layout.data.strategy
    specs = {
        parameter.name: replace(parameter.spec, tied=True) if parameter.name in tied else parameter.spec
        for parameter in parameters
    }
    sizes = {parameter.name: parameter.num_elements for parameter in parameters}
    items = [(parameter.name, parameter.num_elements, parameter.dtype) for parameter in parameters]
    # Gradients that come with B, or from two chunks, are whole only when the step's last microbatch is through.
    late = {parameter.name for parameter in parameters if parameter.comes_with_b or len(parameter.chunks) > 1}
    using = {parameter.name: parameter.parts for parameter in parameters} if sync.gathers else None
    back = {parameter.name: parameter.parts_back for parameter in parameters}
    # With slices a chunk fills buckets of its own, else a bucket would wait for the other chunk's backward pass.
    several = sync.slices and config.layout.pipeline.chunks > 1
    chunks = {parameter.name: parameter.chunks for parameter in parameters} if several else None
    return [
        _Group(
            kind, tuple(names), sum(sizes[name] for name in names),
            frozenset(part for name in names for part in back[name]), not late.isdisjoint(names),
        )
        for kind, names in arranged(
            items, specs, mesh, bucket_bytes(config), using, chunks, config.optimizer.update.rule_of,
            load_entry(sync.policy)().dealt_over(mesh),
        )
    ]  # fmt: skip


def _stepped_matrices(
    kind: BucketKey, shapes: Sequence[tuple[int, ...]], rank: int | None
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """Return the shapes of the matrices that a rank steps. `rank`: among those that sum the bucket; None: one that
    steps nothing of it."""
    if kind.rule.by != "matrices" or rank is None:
        return ()
    if not kind.segments:
        return tuple(shapes)
    begins = accumulate((math.prod(shape) for shape in shapes), initial=0)
    first, last = kind.segments[rank : rank + 2]
    return tuple(shape for shape, begin in zip(shapes, begins, strict=False) if first <= begin < last)


def loads_program(config: Config, rank: int, routers: int) -> Program:
    """The program that sums what a rank's routers have counted of a batch (tensor/router.py)."""
    recorder = Recorder()
    mesh = planned_mesh(config.grid, rank, config.layout.token_axes, "cpu", recorder.started)
    wide = torch.promote_types(DTYPES[config.precision.dtype], torch.float32)
    with recorder.program(mesh.ledger) as recorded:
        loads = torch.empty(routers, config.model.routing.num_experts, dtype=wide, device="meta")
        mesh.comm(*mesh.token_axes).all_reduce(loads)
    return recorded()


def _programs(
    policy: Policy,
    kind: BucketKey,
    axes: tuple[str, ...],
    summed_in: torch.dtype,
    num_elements: int,
    mesh: Mesh,
    recorder: Recorder,
) -> tuple[int, Program, Program, Program, Program]:
    """The number of elements that this rank steps, its programs that sum over `axes` and publish, the one that sums
    over the others of the bucket's axes, and the one that gathers slices of weights."""
    values = torch.empty(num_elements, dtype=kind.dtype, device=mesh.device)
    gradients = torch.empty(num_elements, dtype=summed_in, device=mesh.device)  # empty_like is steps in Python there
    bucket = Bucket(
        values, gradients, {}, (), kind.rule, kind.sum_axes, kind.cut_axes, segments=kind.segments
    )  # fmt: skip
    comm = mesh.comm(*axes)
    # On meta tensors the policy sends nothing; its comm writes the program.
    start, stop = policy.owned(bucket, comm)
    with recorder.program(mesh.ledger) as recorded:
        policy.reduce(bucket, comm).wait()
    reduce = recorded()
    with recorder.program(mesh.ledger) as recorded:
        policy.publish(bucket, comm).wait()
    publish = recorded()
    with recorder.program(mesh.ledger) as recorded:
        mesh.comm(*(axis for axis in kind.sum_axes if axis not in axes)).all_reduce(gradients[start:stop])
    across = recorded()
    with recorder.program(mesh.ledger) as recorded:
        # What zero3 gathers before a task: the whole bucket of its ranks' slices.
        comm.all_gather(values, values[: values.numel() // comm.size])
    return stop - start, reduce, publish, across, recorded()


def streams(config: Config) -> bool:
    """Whether an optimizer steps each bucket as it comes: an offloaded one that does not wait for the norm, as clipping
    and fp16's loss scale do."""
    waits = config.optimizer.clip is not None or config.precision.dtype == "fp16"
    return config.memory.offload.to != "none" and not waits


def memory_of(
    config: Config, buckets: Sequence[PlannedBucket], peak: Peak, context_bytes: int, software: Software
) -> Memory:
    """The memory of a rank with these buckets, whose tasks hold so much at most."""
    held = held_of(config, buckets)
    # They exist when the tasks' memory is gone: so the larger of the two counts, not the sum.
    widened = max(map(sum, widened_together(config, buckets, software)), default=0)
    most = max(peak.total_bytes + held.passing, widened)
    activations = min(peak.activation_bytes, most)
    return Memory(
        held.weights,
        held.gradients + software.apart_bytes(config, held.weights),
        state_bytes(config, slots_of(buckets)),
        activations,
        most - activations,
        context_bytes,
        host=peak.host_bytes,
    )


def widened_together(config: Config, buckets: Sequence[PlannedBucket], software: Software) -> Iterator[list[int]]:
    """The bytes of each float32 copy of half-precision gradients that an optimizer on the device has at a time."""
    if config.memory.offload.to != "none":
        return
    for members in by_rule([bucket.kind.rule for bucket in buckets]).values():
        own = [buckets[index] for index in members]
        sizes = [bucket.stepped_elements * SINGLE if bucket.summed_in.itemsize < SINGLE else 0 for bucket in own]
        for some in [range(len(sizes))] if software.widening == "whole" else stepped_together(sizes):
            yield [sizes[index] for index in some]


def held_of(config: Config, buckets: Sequence[PlannedBucket]) -> HeldBytes:
    """The bytes of weights and gradients that a rank has of these buckets, as its strategy says."""
    synchroniser: type[Synchroniser] = load_entry(config.layout.data.strategy.synchroniser)
    return synchroniser.held([bucket.sizes for bucket in buckets])


def slots_of(buckets: Sequence[PlannedBucket]) -> list[SlotSize]:
    """The sizes of the slots that a rank's optimizer steps."""
    return [bucket.stepped for bucket in buckets if bucket.kind.rule.trained]
