"""A resolved run on a planner's cluster: seconds of tasks, sums and the optimizer, and bytes held by ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property

from meshwright.config import Config
from meshwright.config.layout import DataParallel
from meshwright.config.schema import Offload
from meshwright.config.section import with_field
from meshwright.planner.plan.buckets import Buckets, PlannedBucket, memory_of, streams
from meshwright.planner.plan.compose import Composition, StagePlan
from meshwright.planner.plan.memory import Memory
from meshwright.planner.plan.passes import Passes, PipelinePhase, Sum, phase_of
from meshwright.planner.plan.pieces import piece_costs
from meshwright.planner.plan.recorder import Cost, Kernel, PieceCosts, Program, Start
from meshwright.planner.plan.recordings import bytes_of
from meshwright.planner.plan.remembered import remembered
from meshwright.planner.plan.site import Site, transport_on
from meshwright.planner.plan.software import STEPPED_BYTES, STEPS_OF_ADAMW, Communication
from meshwright.planner.plan.timing import Timer, slowed
from meshwright.ranks.mailbox import AHEAD
from meshwright.strategies.memory.offload import SINGLE, moment_bytes
from meshwright.strategies.pipeline.clock import Pace
from meshwright.strategies.pipeline.schedule import FORWARD_ONLY
from meshwright.strategies.pipeline.task import TaskKind


class TimedRun(Composition):
    """A resolved run at a site, with the seconds of tasks, sums and the optimizer."""

    def __init__(
        self,
        site: Site,
        buckets: Buckets,
        config: Config,
        stages: list[StagePlan],
        known: dict[int, list[PlannedBucket]] | None = None,
    ) -> None:
        super().__init__(config, stages, buckets, known)
        self.site, self.cluster, self.software = site, site.cluster, site.software
        self.transport = transport_on(site.cluster, config)
        self.network = site.network(self.transport, config.grid, site.rows(config))
        world_size, tf32 = config.layout.world_size, config.precision.tf32
        self.timer = site.timer(world_size, tf32)
        self.devices_per_host = self.timer.ranks_per_node if self.software.one_process else 1
        # One process issues the forward kernels of all devices in turn; backward passes have one thread per device.
        self.forward_timer = site.timer(world_size, tf32, self.devices_per_host)
        self.agreement = self.network.collective(self.peers, "broadcast", 8) if self.agrees else 0.0
        """Seconds until a stage's ranks agree on a task."""
        self.pace: Pace | None = None
        if self.cluster.cores is not None:
            # A waiting stage leaves its cores to the others, unless every rank has a device.
            ranks, timer = self.grid.world_size // len(stages), self.timer
            self.pace = lambda busy: timer.gain(busy * ranks)

    def seconds(self, program: Program) -> float:
        return self._seconds(program, self.timer)

    def _seconds(self, program: Program, timer: Timer, *, alone: bool = False) -> float:
        return self.site.program_seconds(program, timer, self.network, self.transport, self.config, alone=alone)

    def overlap(self, communication: Communication) -> float:
        """Return the share of a communication that runs during computation."""
        # Links cannot hide a communication that the program does not overlap.
        return self.network.overlaps if communication in self.software.overlapped else 0.0

    def memory(self, passes: Passes) -> tuple[Memory, ...]:
        """Return the memory of each stage's first rank."""
        memory = []
        for stage, (peak, plan) in enumerate(zip(passes.peaks, self.stages, strict=True)):
            beside = self.awaited_bytes(stage) + plan.apart_bytes(self.config) + self.software.beside_bytes(self.config)
            most, buckets = replace(peak, total_bytes=peak.total_bytes + beside), self.buckets[self.like[stage]]
            memory.append(memory_of(self.config, buckets, most, self.site))
        return tuple(memory)

    def awaited_bytes(self, stage: int) -> int:
        """Return the bytes of messages that have memory before arrival; a side's messages all have the size of the
        largest (mailbox.py)."""
        most, count = AHEAD[self.cluster.device.kind], self.config.num_microbatches
        sides = [sizes for sizes in self.messages(stage).values() if sizes]
        return sum(min(most, count * len(sizes)) * max(sizes) for sizes in sides)

    @cached_property
    def phase_config(self) -> Config:
        """The config with default values in fields that do not affect the pipeline phase: other syncs and places of
        states share one phase."""
        data = self.config.layout.data
        if data.strategy.slices:  # slices are sent during the phase's tasks
            return self.config
        usual = DataParallel(size=data.size, shard=data.shard, expert=data.expert, exchange=data.exchange)
        return with_field(with_field(self.config, "layout.data", usual), "memory.offload", Offload())

    @cached_property
    def phase(self) -> PipelinePhase:
        pieces = self.pieces if self.config.layout.data.in_pieces else None
        return phase_of(self.config, self.tasks, self.cost, self.latency, self.pace, pieces)

    def counting(self) -> float:
        """Return the seconds of the pass before the step that counts routers' loads, for a balance over the batch; else
        0."""
        if not self.config.model.routing.counts_first:
            return 0.0
        return self.forward_only() + max(self.seconds(self.loads(stage)) for stage in range(len(self.stages)))

    def forward_only(self) -> float:
        """Return the seconds of the forward passes of a step's microbatches."""
        count = self.config.num_microbatches
        return PipelinePhase(FORWARD_ONLY, self.placement, count, self.cost, self.latency, self.pace).whole.seconds

    @remembered()
    def pieces(self, position: int, task_kind: TaskKind, which: int) -> PieceCosts:
        """Return the pieces of a task at a position of the chain, if rows are sent to experts as messages."""
        if self.alike[position] != position:
            return self.pieces(self.alike[position], task_kind, which)
        return piece_costs(
            self.chunk(position), task_kind, which, self.cost(position, task_kind, which), self.seconds,
            lambda start: start.times * self.network.collective(start.axes, start.verb, start.payload_bytes),
        )  # fmt: skip

    @remembered()
    def cost(self, position: int, task_kind: TaskKind, which: int) -> Cost:
        """The cost of a task at a position of the chain, with the messages by which its ranks agree on it."""
        if self.alike[position] != position:
            return self.cost(self.alike[position], task_kind, which)
        timer = self.forward_timer if task_kind is TaskKind.FORWARD else self.timer
        # Nothing is computed beside the first forward and the last backward pass of a step.
        alone = which == (0 if task_kind is TaskKind.FORWARD else len(self.counts) - 1)
        cost = self.chunk(position).cost(
            task_kind,
            which,
            lambda program: timer.part + self._seconds(program, timer, alone=alone),
        )
        stage, chunk = self.placement.stage_of[position], position // self.placement.num_stages
        seconds = self.agreement + cost.seconds + self.moved_beside(stage, chunk, task_kind, which, cost.seconds)
        return cost._replace(seconds=seconds)

    def moved_beside(self, stage: int, chunk: int, task_kind: TaskKind, which: int, seconds: float) -> float:
        """Return the seconds that transfers of slices add to a task of a stage's chunk.

        Weights are gathered, the first of them before the task begins. Gradients are summed in every microbatch except
        the step's last, which `sums` times.
        """
        if not self.config.layout.data.strategy.slices:
            return 0.0
        buckets = self.buckets[stage]
        gathered = [
            self.seconds(buckets[index].gather) for index in self.gathers(stage)[which].get((task_kind, chunk), ())
        ]
        copied = sum(
            self.copied(buckets[index], back=False) for index in self.gathers(stage)[which].get((task_kind, chunk), ())
        )
        summed = 0.0
        if task_kind is self.kinds[-1] and which < len(self.counts) - 1:
            chunk_buckets = [bucket for bucket in buckets if bucket.kind.chunks in ((), (chunk,)) and not bucket.waits]
            summed = sum(self.seconds(bucket.reduce) for bucket in chunk_buckets)
            copied += sum(self.copied(bucket, back=True) for bucket in chunk_buckets)
        # No kernels precede a task's first gather, so nothing hides it.
        before = sum(gathered) if not self.overlap("gathers") else max(gathered[:1], default=0.0)
        after = 0.0 if self.overlap("sums") else summed
        # The rest is exposed only if the task is shorter than the transfers.
        beside = sum(gathered) + summed - before - after
        exposed = max(0.0, beside - self.network.overlaps * seconds)
        return copied + before + after + exposed + slowed(beside - exposed, self.network.tax)

    def copied(self, bucket: PlannedBucket, *, back: bool) -> float:
        """Return the seconds of a cast before a gather and of copies from its result to parameters or, with `back`,
        of copies from gradients to a sum's input."""
        value, elements, touched = bucket.kind.dtype.itemsize, 0, 0
        if self.software.slices == "copies" and self.config.layout.data.strategy.slices:
            elements = bucket.num_elements
            touched = elements * (value + (bucket.summed_in.itemsize if back else value))
        if bucket.casts and not back:
            elements += bucket.stepped_elements
            touched += bucket.stepped_elements * (SINGLE + value)
        return self.timer.kernel_seconds(Kernel("element", 0.0, touched, elements, "float32")) if elements else 0.0

    def latency(self, start: int, end: int) -> float:
        """Return the seconds of a message between neighbouring positions of the chain on two stages."""
        sender, receiver = (self.ranks[self.placement.stage_of[position]] for position in (start, end))
        size = bytes_of(self.chunk(min(start, end)).outgoing)
        return self.site.message_seconds(self.config, self.network, sender, receiver, size)

    def norm(self) -> float:
        """Return the seconds of messages between backward pass and optimizer: the next batch's rows (if a server
        scatters them), the step report, the norm."""
        world = "+".join(self.grid.names)
        # A lone rank sends nothing.
        if self.grid.world_size == 1:
            return 0.0
        shared = self.seconds(self._buckets.share(self.config))
        return (
            shared
            # The norm's square, then a row of every rank's step report (training/step_report.py).
            + self.network.collective(world, "all_reduce", 8)
            + self.network.collective(world, "all_gather", 1024)
        )

    def least_ending(self) -> float:
        """Return a lower bound of a step's seconds beside its pipeline phase: the norm and the optimizer (finish)."""
        stages = []
        for buckets in self.buckets.values():
            sums = [self.sum(bucket, 0.0) for bucket in buckets if bucket.kind.rule.trained]
            stages.append(sum(max(bucket.steps, bucket.lane) for bucket in sums))
        # Streaming stages step while others compute; any stage may be the last.
        return self.norm() + self.counting() + (min if streams(self.config) else max)(stages)

    def sums(self, stage: int, chunk: int, ends: Mapping[int, float]) -> list[Sum]:
        """Return the stage's buckets in the order of sending.

        Args:
            stage: The stage.
            chunk: The chunk of the stage's last task.
            ends: As Passes.chunk_ends; gradients of other chunks are complete before that task.
        """
        plan = self.stages[stage].chunks[chunk]
        passed = self.agreement
        ready = {
            parameter.name: max((ends.get(each, 0.0) for each in parameter.chunks), default=0.0)
            for parameter in self.stages[stage].parameters
        }
        costs = plan.costs(self.kinds[-1], len(self.counts) - 1, self.seconds)
        for unit, cost in zip(plan.units[::-1], costs, strict=True):
            passed += cost.seconds
            ready |= {parameter.name: passed for parameter in unit.parameters}
        read: dict[str, float] = {}
        passed_forward = self.agreement
        for each in self.stages[stage].chunks:  # the first forward passes of a stage's chunks are in order
            for unit, cost in zip(each.units, each.costs(self.kinds[0], 0, self.seconds), strict=True):
                for parameter in unit.parameters:
                    # The first of two chunks reads a shared parameter first.
                    read.setdefault(parameter.name, passed_forward)
                passed_forward += cost.seconds
        sums = [
            self.sum(
                bucket,
                # A blocking sum follows the whole task; others begin with the last gradient of their bucket.
                passed if bucket.blocks else max(ready[name] for name in bucket.names),
                min(read[name] for name in bucket.names),
            )
            for bucket in self.buckets[stage]
            if bucket.kind.rule.trained
        ]
        # With several chunks, buckets that are full first are sent first, while other chunks compute.
        return sorted(sums, key=lambda bucket: bucket.ready) if len(self.stages[stage].chunks) > 1 else sums

    def sum(self, bucket: PlannedBucket, ready: float, read: float = 0.0) -> Sum:
        device, config = self.cluster.device, self.config
        lane = 0.0
        if config.memory.offload.to != "none":
            rate = device.host_link_bytes_per_second
            if config.memory.offload.to != "host":
                rate = min(rate, device.disk_bytes_per_second)
            # The optimizer's states (master and moments) are copied to the device and back.
            states = bucket.stepped_elements * bucket.master_bytes(config)
            lane = 2 * (states + sum(moment_bytes(config.optimizer, bucket.stepped))) / rate
        steps = self.step_seconds(bucket) if bucket.stepped_elements else 0.0
        reduce = self.copied(bucket, back=True) + self.seconds(bucket.reduce) + self.seconds(bucket.across)
        publish = self.published(bucket)
        if self.software.one_process:
            # torch's DataParallel creates every parameter of every replica again, with one call each.
            publish += self.devices_per_host * len(bucket.names) * device.issue_seconds
        return Sum(ready, reduce, publish, steps, lane, read)

    def published(self, bucket: PlannedBucket) -> float:
        """Return the seconds until all ranks have a bucket's stepped weights."""
        starts = [event for event in bucket.publish.events if isinstance(event, Start)]
        if self.software.publishes == "gathers" or not starts:
            return self.seconds(bucket.publish)
        # A rank's slices of all buckets are one message, followed by the other ranks' messages.
        (start,), buckets = starts, next(buckets for buckets in self.buckets.values() if bucket in buckets)
        ranks, total = (
            self.network.ranks(start.axes),
            sum(each.num_elements for each in buckets if each.kind.rule.trained),
        )
        every = start.payload_bytes * total // bucket.num_elements
        return bucket.num_elements / total * ranks * self.network.collective(start.axes, "broadcast", every // ranks)

    def step_seconds(self, bucket: PlannedBucket) -> float:
        """Return the seconds of the optimizer step of a bucket's slot."""
        elements, count = bucket.stepped_elements, 1
        touched = bucket.touched_bytes(self.config, self.cluster.device.kind)
        if self.software.optimizer == "steps":
            # Each parameter is stepped separately by small kernels, so the host that issues these may be slower than
            # the device.
            count = STEPS_OF_ADAMW * len(bucket.names)
            elements //= len(bucket.names)
            touched = elements * STEPPED_BYTES // STEPS_OF_ADAMW
        kernel = Kernel("element", 0.0, touched, elements, "float32")
        return count * max(self.timer.kernel_seconds(kernel), self.cluster.device.issue_seconds if count > 1 else 0.0)
