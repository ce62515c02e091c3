"""A process's memory on its device beyond tensors: the allocator's cache, the context, communicators' buffers.

NCCL gives each communicator buffers, for every channel and neighbour that it sends through. Each process group of torch
has a communicator. Two facts give a channel's bytes. On four A100 joined by NVLink (24 channels) a group of two took
544 MiB and a larger group 688 MiB, rings and trees together (github.com/NVIDIA/nccl, issue 964). Between two ranks that
send to each other directly, a channel takes 10 MiB to receive and 2 MiB to send (issue 1685).

| communicators of a rank                  | buffers of                                              |
|------------------------------------------|---------------------------------------------------------|
| one for each set of axes in use          | rings and trees; under direct verbs every other rank    |
| the world's: norm, step report           | rings and trees                                         |
| two for each neighbour stage             | rings and trees of two (created by a sum); one          |
|                                          | neighbour                                               |

The fullest rank's allocations are replayed from recordings, through a model of its allocator:

| allocated                                                 | freed                                                  |
|-----------------------------------------------------------|--------------------------------------------------------|
| parameters; then buckets of values and gradients, masters | parameters, when the bucket is filled                  |
| messages, some before arrival (mailbox.py)                | activations after B, or W; gradients after B           |
| temporaries of tasks, in recorded order                   | as recorded                                            |
| a part's output to the next, or gradient to the one before| after the reader's forward pass, or backward if kept   |
| moments, in the first step                                | never                                                  |
| float32 copies of half-precision gradients                | after the step                                         |

Two steps are replayed, since moments are allocated in the first one, between its activations. A replayed step has
enough microbatches to fill the stages, and a few more, in the schedule's order. A longer step repeats these
allocations. Under GPipe a longer step holds more in proportion.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from meshwright.planner.plan.allocator import Allocator, CachingAllocator, Heap, MemoryBlock, OutOfDeviceMemory
from meshwright.planner.plan.buckets import held_of, slots_of, widened_together
from meshwright.planner.plan.memory import Footprint, Memory
from meshwright.planner.plan.passes import tasks_of_stages
from meshwright.planner.plan.recorder import DISTINCT, MemoryEvents, Start, place
from meshwright.planner.plan.recordings import Recording, bytes_of
from meshwright.planner.plan.software import Software
from meshwright.ranks.grid import PIPE
from meshwright.ranks.ledger import MESSAGE, Traffic
from meshwright.ranks.mailbox import AHEAD
from meshwright.strategies.memory.offload import moment_bytes, state_bytes
from meshwright.strategies.pipeline.pipeline import sides_of
from meshwright.strategies.pipeline.task import Task, TaskKind

if TYPE_CHECKING:
    from meshwright.config import Config
    from meshwright.planner.plan.compose import ChunkPlan, Composition
    from meshwright.planner.plan.timed_run import TimedRun

REPLAYED_STEPS = 2

_NOTHING: tuple[Hashable, int] = (None, 0)


class StageReplay:
    """The allocations of a stage's first rank. `ahead`: messages of a side with memory allocated before they are
    received."""

    def __init__(self, run: Composition, stage: int, ahead: int, allocator: Allocator, software: Software) -> None:
        self._run, self._ahead, self._software = run, ahead, software
        self._plan, self._buckets = run.stages[stage], run.buckets[run.like[stage]]
        self._messages: dict[str, Iterator[tuple[Hashable, int]]] = {}
        self._allocator = allocator
        self._live: dict[Hashable, MemoryBlock] = {}
        self._units = [[_Unit(unit.whole()) for unit in chunk.units] for chunk in self._plan.chunks]

    def run(self, tasks: Sequence[Task], num_microbatches: int) -> Footprint:
        """Replay steps of these tasks. Return the peaks of allocated and reserved bytes.

        Args:
            tasks: The stage's tasks of a step, shortened to a few microbatches.
            num_microbatches: The number of microbatches in `tasks`.

        Raises:
            OutOfDeviceMemory: The device has no room.
        """
        self._build()
        for step in range(REPLAYED_STEPS):
            for name, task_kind in (("activation", TaskKind.FORWARD), ("gradient", TaskKind.BACKWARD)):
                messages = [(task, self._message_bytes(task)) for task in tasks if task.kind is task_kind]
                # Receives are posted before the sizes are known: each has room for the largest message (mailbox.py).
                most = max((size for _, size in messages), default=0)
                keys = [((name, task.chunk, task.microbatch), most) for task, size in messages if size]
                self._messages[name] = iter(keys)
                for _ in range(self._ahead):
                    self._take(*next(self._messages[name], _NOTHING))
            self._take("passing", held_of(self._run.config, self._buckets).passing)
            for task in tasks:
                last = task.microbatch == num_microbatches - 1
                # The last replayed microbatch is the step's last, which completes the gradients.
                index = self._run.config.num_microbatches - 1 if last else task.microbatch
                self._task(task, place(index, self._run.config.num_microbatches))
            self._drop(["passing"])
            self._optimize(first=step == 0)
        return Footprint(self._allocator.peak_allocated, self._allocator.peak_reserved)

    def _build(self) -> None:
        config = self._run.config
        whole = self._software.builds == "whole"
        for parameter in self._plan.parameters if whole else ():
            self._take(("parameter", parameter.name), parameter.weight_bytes)
        sizes = {} if whole else {each.name: each.weight_bytes for each in self._plan.parameters}
        for index, bucket in enumerate(self._buckets):
            for name in bucket.names if not whole else ():
                self._take(("parameter", name), sizes[name])
            held = held_of(config, [bucket])
            self._take(("values", index), held.weights)
            self._take(("gradients", index), held.gradients)
            self._take(("half gradients", index), self._software.apart_bytes(config, held))
            # As in the run's own assembly, only one bucket at a time exists twice: in its parameters and in flat
            # memory. A program that builds parts has no other parameters then.
            self._drop(("parameter", name) for name in bucket.names)
        if config.memory.offload.to == "none":
            for index, bucket in enumerate(self._buckets):
                self._take(("master", index), bucket.stepped_elements * bucket.master_bytes(config))
        else:
            half = state_bytes(config, slots_of(self._buckets)) // 2
            self._take(("staging", 0), half)
            self._take(("staging", 1), half)
        self._take(("tied",), self._plan.apart_bytes(config))
        self._take(("buffers",), self._software.beside_bytes(config))

    def _message_bytes(self, task: Task) -> int:
        """Return the bytes of the message that a task receives first."""
        chunk = self._plan.chunks[task.chunk]
        if task.kind is TaskKind.FORWARD:
            return bytes_of(chunk.incoming) if chunk.handed_bytes is None else 0
        return bytes_of(chunk.outgoing) if not chunk.hands_on else 0

    def _task(self, task: Task, which: int) -> None:
        chunk, units = self._plan.chunks[task.chunk], self._units[task.chunk]
        if task.kind is not TaskKind.WEIGHT and self._message_bytes(task):  # received; more may follow
            self._take(*next(self._messages["activation" if task.kind is TaskKind.FORWARD else "gradient"], _NOTHING))
        if task.kind is TaskKind.FORWARD:
            for index, unit in enumerate(units):
                self._replay(task, index, unit, which)
                if index and not unit.recording.holds_input:  # else freed in the backward pass
                    self._drop(self._given(units[index - 1], task.kind, task.chunk, index - 1, task.microbatch, which))
            if not chunk.hands_on:  # the chunk's output was sent
                self._drop(self._given(units[-1], task.kind, task.chunk, len(units) - 1, task.microbatch, which))
            return
        for index in reversed(range(len(units))):
            unit = units[index]
            self._replay(task, index, unit, which)
            # Inputs and gradients kept for a pending W are freed after this W.
            waits = {TaskKind.BACKWARD: unit.recording, TaskKind.WEIGHT: None}[task.kind]
            if waits is None or not waits.kept_input_bytes:
                self._drop(self._inputs(chunk, units, task, index, which))
            if waits is None or not waits.kept_gradient_bytes:
                self._drop(self._gradients(chunk, units, task, index, which))
        if chunk.handed_bytes is None and task.kind is TaskKind.BACKWARD:  # the input's gradient was sent
            self._drop(self._given(units[0], TaskKind.BACKWARD, task.chunk, 0, task.microbatch, which))

    def _inputs(
        self, chunk: ChunkPlan, units: Sequence[_Unit], task: Task, index: int, which: int
    ) -> Iterable[Hashable]:
        """Return the storages of a unit's input: an output of the unit before, a message, or an output of the stage's
        chunk before."""
        if index:
            return self._given(units[index - 1], TaskKind.FORWARD, task.chunk, index - 1, task.microbatch, which)
        if chunk.handed_bytes is None:
            return [("activation", task.chunk, task.microbatch)]
        before = self._units[task.chunk - 1]
        return self._given(before[-1], TaskKind.FORWARD, task.chunk - 1, len(before) - 1, task.microbatch, which)

    def _gradients(
        self, chunk: ChunkPlan, units: Sequence[_Unit], task: Task, index: int, which: int
    ) -> Iterable[Hashable]:
        """Return the storages of the gradient of a unit's output: from the unit after, a message, or the stage's chunk
        after."""
        if index < len(units) - 1:
            return self._given(units[index + 1], TaskKind.BACKWARD, task.chunk, index + 1, task.microbatch, which)
        if not chunk.hands_on:
            return [("gradient", task.chunk, task.microbatch)]
        after = self._units[task.chunk + 1]
        return self._given(after[0], TaskKind.BACKWARD, task.chunk + 1, 0, task.microbatch, which)

    def _given(
        self, unit: _Unit, task_kind: TaskKind, chunk: int, index: int, microbatch: int, which: int
    ) -> list[Hashable]:
        """Return the storages that a unit passes to its neighbour and does not keep."""
        return [
            (chunk, index, storage_id) if storage_id in unit.crossing else (chunk, index, storage_id, microbatch)
            for storage_id in unit.recording.leaving[task_kind][which]
        ]

    def _replay(self, task: Task, index: int, unit: _Unit, which: int) -> None:
        # A third of a search's seconds: eight million events for 110,000 layouts, so attribute look-ups are hoisted.
        live, allocate, free = self._live, self._allocator.allocate, self._allocator.free
        unit_key, crossing = (task.chunk, index), unit.crossing
        for storage_id, size in unit.recording.programs[task.kind][which].memory:
            key = (*unit_key, storage_id) if storage_id in crossing else (*unit_key, storage_id, task.microbatch)
            left = live.pop(key, None)  # left by the microbatch before, if the event allocates
            if left is not None:
                free(left)
            if size > 0:
                live[key] = allocate(size)

    def _optimize(self, *, first: bool) -> None:
        """Sum gradients and step."""
        config = self._run.config
        for bucket in self._buckets:
            self._transient(bucket.reduce.memory)
            self._transient(bucket.across.memory)
        if config.memory.offload.to == "none":
            for index, bucket in enumerate(self._buckets) if first else ():
                for tensor_index, size in enumerate(moment_bytes(config.optimizer, bucket.stepped)):
                    self._take(("state", tensor_index, index), size)
        for sizes in widened_together(config, self._buckets, self._software):
            for tensor_index, size in enumerate(sizes):
                self._take(("widened", tensor_index), size)
            self._drop(("widened", tensor_index) for tensor_index in range(len(sizes)))
        for bucket in self._buckets:
            self._transient(bucket.publish.memory)

    def _transient(self, events: MemoryEvents) -> None:
        for storage_id, size in events:
            if size > 0:
                self._take(("transient", storage_id), size)
            else:
                self._drop([("transient", storage_id)])
        self._drop(("transient", storage_id) for storage_id, _ in events)

    def _take(self, key: Hashable, size: int) -> None:
        if size:
            assert key not in self._live, f"{key} is there already"
            self._live[key] = self._allocator.allocate(size)

    def _drop(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            if key in self._live:
                self._allocator.free(self._live.pop(key))


class _Unit:
    """A part's recording. `crossing`: storages that the microbatch which allocated them does not free."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        # For example a layer's gathered weights: gathered in the step's first microbatch, freed in the last one.
        came: dict[int, int] = {}
        went: dict[int, int] = {}
        for task_kind, programs in recording.programs.items():
            for which, program in enumerate(programs):
                for storage_id, size in program.memory:
                    (came if size > 0 else went)[storage_id] = which
                for storage_id in recording.leaving.get(task_kind, [()] * len(programs))[which]:
                    went[storage_id] = which
        self.crossing = frozenset(storage_id for storage_id, which in came.items() if went.get(storage_id) != which)


MIB = 2**20
PAIR_CHANNEL, GROUP_CHANNEL = 544 * MIB // 24, 688 * MIB // 24
DIRECT_CHANNEL = 12 * MIB
"""Bytes of a channel: rings and trees of two ranks, of more ranks; one rank that receives directly."""

NET_POOL = 2 * 16 * 128 * 2**10
"""Bytes of a channel shared by all sends and receives to ranks of other nodes: 16 chunks of 128 KiB for each direction
(NCCL's src/transport/net.cc, sharedNetBuffersInit)."""

DIRECT = frozenset(("all_to_all", "gather", "scatter", "send"))
"""Verbs in which each rank sends to each other rank, or to one."""

READ = {"all_reduce": 2, "reduce_scatter": 1}
"""Sums over shared memory of a machine's ranks: the number of pieces that a rank reads of each other rank's n-th part.
A reduce-scatter reads the rank's own piece; an all-reduce also reads the piece summed by the other rank."""


def held_by_processes(
    run: TimedRun, memory: Sequence[Memory], sent: Sequence[Mapping[tuple[str, str], Traffic]]
) -> tuple[Memory, ...]:
    """Return the memory of each stage's first rank, with the bytes of its process beyond tensors.

    The allocations of the fullest stage are replayed. The other stages' caches are taken to have the same share.
    """
    channels, device = run.network.channels, run.cluster.device
    memory = [
        replace(
            stage_memory,
            # Only ranks of a pipeline plan stages, and planning loads torch's compiler.
            context=stage_memory.context + device.staged_bytes * (len(memory) > 1),
            communicators=channels and communicator_bytes(run, stage, sent[stage]),
            read=read_bytes(run, stage),
        )
        for stage, stage_memory in enumerate(memory)
    ]
    fullest = max(range(len(memory)), key=lambda stage: memory[stage].total)
    room = device.memory_bytes - memory[fullest].context - memory[fullest].communicators
    # Tensors alone do not fit, so the cache does not matter.
    if memory[fullest].allocated > room:
        return tuple(memory)
    # Enough microbatches to fill the stages: 1F1B holds no more later, GPipe more in proportion. One stage runs the
    # first, the last, and one for all between, which leave the same free blocks.
    positions = run.placement.num_positions
    some = min(run.config.num_microbatches, DISTINCT if positions == 1 else positions + 3)
    tasks = tasks_of_stages(run.config, run.cost, run.latency, some)[fullest]
    replay = partial(StageReplay, run, fullest, AHEAD[device.kind], software=run.software)
    try:
        limited = Heap() if device.kind == "cpu" else CachingAllocator(room)
        footprint = replay(allocator=limited).run(tasks, some)
    except OutOfDeviceMemory:
        # The cached bytes do not fit: a replay without a limit gives the size.
        footprint = replay(allocator=CachingAllocator()).run(tasks, some)
    # One replay for all stages, since each takes 0.04 to 0.1 s and the fullest stage alone decides whether the run
    # fits.
    share = footprint.reserved / footprint.allocated - 1
    return tuple(replace(stage_memory, cached=round(share * stage_memory.allocated)) for stage_memory in memory)


def read_bytes(run: TimedRun, stage: int) -> int:
    """Return the bytes of other ranks' gradients that a rank reads in shared memory, on a machine of CPUs
    (ranks/window_comm.py)."""
    if run.cluster.device.kind != "cpu" or run.cluster.cores is None or not run.config.layout.data.strategy.over_mpi:
        return 0
    sums = (
        event for bucket in run.buckets[run.like[stage]] for event in bucket.reduce.events if isinstance(event, Start)
    )
    return sum(
        READ[each.verb] * each.payload_bytes * (ranks - 1) // ranks
        for each in sums
        if each.verb in READ and (ranks := run.network.ranks(each.axes)) > 1
    )


def group_bytes(ranks: int, neighbours: int, channels: int, *, direct: bool) -> int:
    """Return the bytes of a rank's NCCL communicator: rings and trees, and connections for messages to each other rank.

    Connections inside of a node have buffers of their own, those to other nodes share NET_POOL. All peers have as many
    channels as a peer of another node: two, or one if 2 `ranks` messages exceed four a channel (NCCL's
    src/graph/paths.cc, ncclTopoGetNchannels).

    Args:
        ranks: Ranks of the communicator.
        neighbours: Other ranks of the communicator on the node.
        channels: Channels of a communicator.
        direct: True: the ranks send messages (DIRECT).
    """
    rings = channels * (PAIR_CHANNEL if ranks == 2 else GROUP_CHANNEL)
    if not direct:
        return rings
    if neighbours == ranks - 1:
        return rings + neighbours * channels * DIRECT_CHANNEL
    per_peer = min(channels, 2 if 2 * ranks <= 4 * channels else 1)
    return rings + neighbours * per_peer * DIRECT_CHANNEL + channels * NET_POOL


def communicator_bytes(run: TimedRun, stage: int, sent: Mapping[tuple[str, str], Traffic]) -> int:
    """Return the bytes of a rank's NCCL communicators."""
    world, channels = "+".join(run.grid.names), run.network.channels
    verbs: dict[str, set[str]] = {world: set()}
    for axes, verb in sent:
        verbs.setdefault(axes, set()).add(verb)
    total = 0
    for axes, used in verbs.items():
        ranks = run.network.ranks(axes)
        if axes == PIPE and MESSAGE in used:
            # Two communicators for each neighbour stage; torch creates both by a sum of two ranks.
            total += 2 * len(sides_of(stage, run.placement)) * group_bytes(2, 1, channels, direct=True)
            used -= {MESSAGE}
        if ranks > 1 and (used or axes == world):
            neighbours = run.network.neighbours(axes) if used & DIRECT else 0
            total += group_bytes(ranks, neighbours, channels, direct=bool(used & DIRECT))
    return total


def least_communicator_bytes(config: Config, channels: int) -> int:
    """Return a lower bound of communicator_bytes on each rank, without recordings: the world's, and one for the ranks
    that sum gradients, for each axis that cuts a layer, and for one neighbour stage."""
    layout, sizes = config.layout, dict(config.layout.axes)
    world = math.prod(sizes.values())
    summed = math.prod(sizes[axis] for axis in layout.token_axes)
    cuts = (*layout.context.axes, *layout.tensor.axes)  # a stage may have layers without experts
    groups = [world, summed * (summed < world), *(size for axis, size in cuts if axis != "depth")]
    total = sum(group_bytes(ranks, 0, channels, direct=False) for ranks in groups if ranks > 1)
    return total + 2 * group_bytes(2, 1, channels, direct=True) * (layout.pipeline.size > 1)
