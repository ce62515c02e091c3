"""A process's memory on its device beyond tensors: what its allocator caches, its context, communicators' buffers.

NCCL gives each communicator buffers, for every channel and neighbour that it sends through; a process group of torch
has a communicator of its own. A channel's bytes after two facts: on four A100 joined by NVLink (24 channels) a group of
two took 544 MiB and a larger one 688 MiB (github.com/NVIDIA/nccl, issue 964), rings and trees together; between two
ranks that send to each other directly, a channel takes 10 MiB to receive and 2 MiB to send (issue 1685).

| communicators of a rank                  | buffers of                                            |
|------------------------------------------|-------------------------------------------------------|
| one for each set of axes that it used    | rings and trees; under direct verbs every other rank  |
| the world's: norm, step report           | rings and trees                                       |
| two for each neighbour stage             | rings and trees of two (they are born by a sum); one  |
|                                          | neighbour                                             |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from meshwright.pipeline.pipeline import sides_of
from meshwright.ranks.grid import PIPE
from meshwright.ranks.ledger import MESSAGE, Traffic
from meshwright.ranks.mailbox import AHEAD
from meshwright.tools.plan.allocator import Allocator, CachingAllocator, Heap, OutOfDeviceMemory
from meshwright.tools.plan.buckets import Memory
from meshwright.tools.plan.recorder import Start
from meshwright.tools.plan.replay import Footprint, StageReplay
from meshwright.tools.plan.timed_run import TimedRun

MIB = 2**20
PAIR_CHANNEL, GROUP_CHANNEL = 544 * MIB // 24, 688 * MIB // 24
DIRECT_CHANNEL = 12 * MIB
"""Bytes of a channel: rings and trees of two ranks, and of more; a rank that is sent to directly."""

DIRECT = frozenset(("all_to_all", "gather", "scatter", "send"))
"""Verbs in which each rank sends to each other one, or to one."""

READ = {"all_reduce": 2, "reduce_scatter": 1}
"""Sums of what lies in memory that the ranks of a machine share: of each other rank's n-th part, a rank of n reads its
own piece, and in an all-reduce the piece that the other has summed."""


def held_by_processes(
    run: TimedRun, memory: Sequence[Memory], sent: Sequence[Mapping[tuple[str, str], Traffic]]
) -> tuple[Memory, ...]:
    """The memory of each stage's first rank with what its process holds beyond tensors. The fullest one's allocations
    are replayed; the others' allocators are taken to hold as much more, in proportion."""
    channels, device = run.network.channels, run.cluster.device
    memory = [
        replace(
            own,
            # Only a pipeline's ranks plan stages, which loads torch's compiler.
            context=own.context + device.staged_bytes * (len(memory) > 1),
            communicators=channels and channels * channel_bytes(run, stage, sent[stage]),
            read=read_bytes(run, stage),
        )
        for stage, own in enumerate(memory)
    ]
    fullest = max(range(len(memory)), key=lambda stage: memory[stage].total)
    room = device.memory_bytes - memory[fullest].context - memory[fullest].communicators
    # Tensors alone do not fit, so nobody needs to know what is cached beside them.
    if memory[fullest].allocated > room:
        return tuple(memory)
    if fullest not in run.footprints:
        try:
            run.footprints[fullest] = replayed(run, fullest, Heap() if device.kind == "cpu" else CachingAllocator(room))
        except OutOfDeviceMemory:
            # It does not fit by what is cached: how much it would take, a device without a limit says.
            run.footprints[fullest] = replayed(run, fullest, CachingAllocator())
    footprint = run.footprints[fullest]
    # One replay, not one a stage: 0.04 to 0.1 s each, and only the fullest decides what fits.
    share = footprint.reserved / footprint.allocated - 1
    return tuple(replace(own, cached=round(share * own.allocated)) for own in memory)


def read_bytes(run: TimedRun, stage: int) -> int:
    """Bytes of other ranks' gradients that a rank reads where they lie, on a machine of CPUs (ranks/window_comm.py)."""
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


def replayed(run: TimedRun, stage: int, allocator: Allocator) -> Footprint:
    """A stage's memory in steps of few microbatches. Raises OutOfDeviceMemory."""
    tasks, some = run.first_tasks
    return StageReplay(run, stage, AHEAD[run.cluster.device.kind], allocator, run.software).run(tasks[stage], some)


def channel_bytes(run: TimedRun, stage: int, sent: Mapping[tuple[str, str], Traffic]) -> int:
    """Bytes of a channel of each of a rank's communicators together."""
    world = "+".join(run.grid.names)
    verbs: dict[str, set[str]] = {world: set()}
    for axes, verb in sent:
        verbs.setdefault(axes, set()).add(verb)
    total = 0
    for axes, used in verbs.items():
        ranks = run.network.ranks(axes)
        if axes == PIPE and MESSAGE in used:
            # Two communicators for each neighbour stage, which torch makes by a sum of two ranks.
            total += 2 * len(sides_of(stage, run.placement)) * (PAIR_CHANNEL + DIRECT_CHANNEL)
            used -= {MESSAGE}
        if ranks > 1 and (used or axes == world):
            total += PAIR_CHANNEL if ranks == 2 else GROUP_CHANNEL
            total += (ranks - 1) * DIRECT_CHANNEL * bool(used & DIRECT)
    return total
