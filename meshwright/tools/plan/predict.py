"""Predictions of a run on a cluster: a step's seconds, every stage's memory, what its ranks send. Nothing is trained.

A run's `auto` fields are resolved as the run itself resolves them (decisions.py), with the cluster's memory for the
machine's and recordings for built stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.config import Config
from meshwright.decisions import resolve_layout
from meshwright.errors import ConfigError
from meshwright.machine import Machine
from meshwright.model import Costs
from meshwright.models.chain import split_name
from meshwright.parts import placement_of, rule_of
from meshwright.pipeline.clock import undisturbed
from meshwright.pipeline.partition import fastest
from meshwright.pipeline.span import Timeline
from meshwright.pipeline.task import TaskKind
from meshwright.ranks.grid import REPLICA_AXES, Grid, grid_of_run
from meshwright.ranks.ledger import Traffic
from meshwright.ranks.mailbox import AHEAD
from meshwright.registry import entries
from meshwright.section import with_field
from meshwright.stage_costs import all_state_bytes, microbatch_bytes, shared_work
from meshwright.tools.plan.buckets import (
    Buckets,
    Memory,
    PlannedBucket,
    memory_of,
    passing_bytes,
    share_program,
    slots_of,
    streams,
)
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.compose import Composition, Cost, StagePlan, compose_stages
from meshwright.tools.plan.network import ClusterNetwork
from meshwright.tools.plan.passes import Passes, run_passes
from meshwright.tools.plan.recorder import Kernel, Program
from meshwright.tools.plan.recordings import Recordings
from meshwright.tools.plan.software import OWN_SOFTWARE, STEPPED_BYTES, STEPS_OF_ADAMW, Communication, Software
from meshwright.tools.plan.step import Sum, finish
from meshwright.tools.plan.timing import Timer

SYNC = "layout.data.sync"


@dataclass(frozen=True)
class Prediction:
    """A run's step. `config`: as it was resolved. `phases`: seconds by name. `memory`, `traffic`: of
    the first rank of each stage; a step's ledger. `timeline`: where microbatches are many, of the first ones.
    `idle_share`: of the pipeline phase, over all of them. `flops`: floating-point operations of the busiest rank's
    products in a step."""

    config: Config
    cluster: Cluster
    seconds: float
    phases: dict[str, float]
    memory: tuple[Memory, ...]
    traffic: tuple[Mapping[tuple[str, str], Traffic], ...]
    timeline: Timeline
    idle_share: float
    flops: float

    @property
    def fullest(self) -> Memory:
        """The memory of the rank that holds most."""
        return max(self.memory, key=lambda memory: memory.total)

    @property
    def worst_memory(self) -> int:
        """Bytes on the rank that holds most."""
        return self.fullest.total

    @property
    def fits(self) -> bool:
        return self.worst_memory <= self.cluster.device.memory


@dataclass
class Planner:
    """Predicts runs on one cluster, and remembers what they have in common."""

    cluster: Cluster
    software: Software = OWN_SOFTWARE
    recordings: Recordings = field(init=False)
    buckets: Buckets = field(default_factory=Buckets)
    passes: dict[Hashable, Passes] = field(default_factory=dict)
    _timers: dict[tuple[int, bool], Timer] = field(default_factory=dict)
    _partitions: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    _microbatches: dict[Hashable, Sequence[int]] = field(default_factory=dict)
    _networks: dict[tuple[str, Grid], ClusterNetwork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.software = self.software.on(self.cluster.device)
        self.recordings = Recordings(self.cluster.device.kind, self.software)

    def predict(self, config: Config) -> Prediction:
        """Raises ConfigError for what cannot be planned: sync fsdp and server-loss, O1, a partition that is
        measured when the run begins, a dtype or a transport that the cluster knows nothing about."""
        check(config)
        config = self.resolved(config)
        run = TimedRun(self, config, self.stages(config))
        passes = run.passes()
        sums = {stage: run.sums(stage, passes.last[stage].chunk) for stage in run.buckets}
        every = [sums[like] for like in run.like]
        beside = {"overlaps": run.overlap("sums"), "publishes": run.overlap("gathers")}
        step = finish(passes, every, run.norm(), streams=streams(config), **beside)
        return Prediction(
            config,
            self.cluster,
            step.seconds,
            step.phases,
            run.memory(passes),
            tuple(run.traffic(stage) for stage in range(len(run.stages))),
            step.timeline,
            passes.idle_share,
            run.most_flops,
        )

    def timer(self, config: Config) -> Timer:
        """A rank's pace. On a machine (with `cores`) all ranks share it, elsewhere as many as a node has."""
        ranks = config.layout.world_size
        if self.cluster.cores is None:
            ranks = min(ranks, self.cluster.devices_per_node)
        key = ranks, config.precision.tf32
        if key not in self._timers:
            self._timers[key] = Timer(self.cluster, ranks, tf32=config.precision.tf32)
        return self._timers[key]

    def network(self, config: Config) -> ClusterNetwork:
        """The links between the ranks; over the transport that `auto` takes on a machine like the cluster's."""
        backend = config.layout.transport
        if backend == "auto":
            carried = self.cluster.device.kind == "cpu" and config.layout.data.strategy.over_mpi
            backend = "mpi" if carried and "mpi" in self.cluster.links else "torch"
        key = backend, grid_of_run(config)
        if key not in self._networks:
            self._networks[key] = ClusterNetwork(self.cluster, backend, key[1])
        return self._networks[key]

    def resolved(self, config: Config) -> Config:
        """The config as a run resolves it on a machine like the cluster, where each rank has a device's memory."""
        device = self.cluster.device
        machine = Machine(cores=self.cluster.cores or 1, memory=device.memory - device.reserved, shared=False)
        return resolve_layout(config, machine, self).config

    def partition(self, config: Config) -> tuple[int, ...]:
        """Layers of each position of the chain."""
        pipeline = config.layout.pipeline
        if pipeline.size == 1:
            return (config.model.num_blocks,)
        if not isinstance(pipeline.partition, str):
            return pipeline.partition
        assert pipeline.partition == "auto", "refused before"
        costs = self.work(config)
        placement, count = placement_of(config), config.num_microbatches
        key = costs, placement, pipeline.schedule, pipeline.limit, count
        if key not in self._partitions:
            self._partitions[key] = fastest(costs, placement, rule_of(config), count)
        return self._partitions[key]

    def work(self, config: Config) -> Costs:
        """The counted work of the chain's parts."""
        return shared_work(config, self.recordings.outline(config).parameters, self.cluster.device.kind)

    def fixed_bytes(self, config: Config) -> list[int]:
        """Weights, gradients and the optimizer's states in the memory of each stage's first rank."""
        run, kind = Composition(config, self.stages(config), self.buckets), self.cluster.device.kind
        each = [run.buckets[like] for like in run.like]
        return [
            sum(bucket.size_bytes + bucket.gradient_bytes for bucket in buckets)
            + passing_bytes(buckets)
            + stage.apart_bytes(config)
            + all_state_bytes(config, slots_of(buckets), kind)
            for stage, buckets in zip(run.stages, each, strict=True)
        ]

    def block_bytes(self, config: Config) -> list[list[int]]:
        """The rank's block of each weight that takes part in 2-D products, by stage."""
        return [
            [
                parameter.weight_bytes
                for parameter in stage.parameters
                if split_name(parameter.name)[0] is not None and {"row", "col"} <= parameter.spec.axes
            ]
            for stage in self.stages(config)
        ]

    def microbatch_bytes(self, config: Config) -> Sequence[int]:
        """Counted by the run's own function, so that both decide alike: recordings differ by some percent."""
        layout, device = config.layout, self.cluster.device
        axes = tuple(axis for axis in layout.axes if axis[0] not in REPLICA_AXES)
        key = (
            config.model, config.data, config.precision, config.micro, config.memory, layout.layer, axes,
            layout.pipeline.partition, layout.pipeline.placement,
        )  # fmt: skip
        if key not in self._microbatches:
            self._microbatches[key] = microbatch_bytes(config, device.kind, self.software.attention or "torch")
        return self._microbatches[key]

    def stages(self, config: Config) -> list[StagePlan]:
        """A layout's stages. Until somebody has decided how 2-D operands travel, they keep no gathered weights."""
        if config.memory.summa == "auto":
            config = with_field(config, "memory.summa", "whole")
        return compose_stages(config, self.recordings, self.partition(config))


def check(config: Config) -> None:
    """Raises ConfigError for what cannot be predicted."""
    check_recorded(config)
    if unplanned := config.layout.data.strategy.unplanned:
        planned = ", ".join(name for name, entry in entries("syncs").items() if not entry.unplanned)
        raise ConfigError.of(SYNC, config.layout.data.sync, f"{unplanned}: it cannot be planned", planned)
    if config.layout.pipeline.partition == "measured":
        rule = "is known when the run begins: it cannot be planned"
        raise ConfigError.of("layout.pipeline.partition", "measured", rule, "auto, or layers a stage")


def check_recorded(config: Config) -> None:
    """Raises ConfigError for what cannot be recorded on meta tensors."""
    data = config.layout.data
    if data.strategy.whole:
        raise ConfigError.of(SYNC, data.sync, f"{data.strategy.unplanned}: it cannot be planned", "another sync")
    if config.precision.level == "O1":
        raise ConfigError.of("precision.level", "O1", "casts by operator: it cannot be planned", "O0, O2")


class TimedRun(Composition):
    """A resolved run on a planner's cluster: how long what it is composed of takes there."""

    def __init__(self, planner: Planner, config: Config, stages: list[StagePlan]) -> None:
        super().__init__(config, stages, planner.buckets)
        self.cluster, self.known_passes, self.software = planner.cluster, planner.passes, planner.software
        self.network, self.timer = planner.network(config), planner.timer(config)
        self.costs: dict[tuple[int, int, TaskKind, int], Cost] = {}

    def seconds(self, program: Program) -> float:
        return self.timer.seconds(program, self.network, self.overlap("layers"))

    def overlap(self, communication: Communication) -> float:
        """The part of a communication that goes on under computation."""
        return self.software.overlap(communication, self.network.overlaps)

    def memory(self, passes: Passes) -> tuple[Memory, ...]:
        """The memory of each stage's first rank."""
        return tuple(
            memory_of(
                self.config,
                self.buckets[self.like[stage]],
                peak.beside(self.awaited_bytes(stage) + plan.apart_bytes(self.config)),
                self.cluster.device.reserved,
            )
            for stage, (peak, plan) in enumerate(zip(passes.peaks, self.stages, strict=True))
        )

    def awaited_bytes(self, stage: int) -> int:
        """Messages that a rank waits for have memory before they come; all from a side as much as the largest
        (mailbox.py)."""
        most, count = AHEAD[self.cluster.device.kind], self.config.num_microbatches
        sides = [sizes for sizes in self.messages(stage).values() if sizes]
        return sum(min(most, count * len(sizes)) * max(sizes) for sizes in sides)

    def passes(self) -> Passes:
        """The pipeline phase, which other ways to sum gradients and to keep states have in common."""
        config, layout = self.config, self.config.layout
        key = (
            config.model, config.data, config.precision, config.memory.recompute, config.memory.summa, config.micro,
            config.num_microbatches, layout.layer, layout.axes, layout.pipeline, layout.transport,
            (layout.data, config.memory.offload) if layout.data.strategy.slices else None,
        )  # fmt: skip
        if key not in self.known_passes:
            ranks = self.grid.world_size // len(self.stages)
            pace = undisturbed if self.cluster.cores is None else lambda busy: self.timer.gain(busy * ranks)
            self.known_passes[key] = run_passes(config, self.cost, self.latency, pace)
        return self.known_passes[key]

    def cost(self, position: int, kind: TaskKind, which: int) -> Cost:
        """The cost of a task at a position of the chain, with what its ranks tell each other before it."""
        stage = self.placement.stage_of(position)
        key = self.like[stage], position // self.placement.num_stages, kind, which
        if key not in self.costs:
            cost = self.chunk(position).cost(kind, which, self.seconds)
            seconds = self.agreement() + cost.seconds + self.moved_beside(stage, kind, which, cost.seconds)
            self.costs[key] = Cost(seconds, cost.kept_bytes, cost.peak_bytes, cost.flops)
        return self.costs[key]

    def moved_beside(self, stage: int, kind: TaskKind, which: int, seconds: float) -> float:
        """Seconds that a task takes longer as slices travel beside it: weights that are gathered, the first of them
        before it begins, and gradients that are summed in every microbatch; the step's last has its own account
        (`sums`)."""
        buckets = self.buckets[self.like[stage]]
        gathered = [self.seconds(buckets[index].gather) for index in self.gathers(stage, which).get(kind, ())]
        summed = 0.0
        if kind is self.kinds[-1] and which < len(self.counts) - 1:
            summed = sum(self.seconds(bucket.reduce) for bucket in buckets if bucket.sums > 1)
        before = sum(gathered) if not self.overlap("gathers") else max(gathered[:1], default=0.0)
        after = 0.0 if self.overlap("sums") else summed
        beside = sum(gathered) + summed - before - after
        return before + after + max(0.0, beside - self.network.overlaps * seconds)

    def agreement(self) -> float:
        """Seconds until a stage's ranks agree on a task."""
        return self.network.collective(self.peers, "broadcast", 8) if self.agrees else 0.0

    def latency(self, start: int, end: int) -> float:
        """Seconds of a message from a position of the chain to the one beside it, on another stage."""
        sender, receiver = (self.rank(self.placement.stage_of(position)) for position in (start, end))
        return self.network.message(sender, receiver, self.chunk(min(start, end)).outgoing_bytes)

    def norm(self) -> float:
        """Seconds of what ranks tell each other between backward pass and optimizer: the next batch's rows, where a
        server scatters them, the step report, the norm."""
        world = "+".join(self.grid.names)
        if self.grid.world_size == 1:
            return 0.0
        shared = self.seconds(share_program(self.config))
        return (
            shared
            + self.network.collective(world, "all_reduce", 8)
            + self.network.collective(world, "all_gather", 1024)
        )

    def sums(self, stage: int, chunk: int) -> list[Sum]:
        """The stage's buckets, in the order in which they leave. `chunk`: the one whose task is the stage's last; other
        chunks' gradients are there before it."""
        plan = self.stages[stage].chunks[chunk]
        passed = self.agreement()
        ready = dict.fromkeys((parameter.name for parameter in self.stages[stage].parameters), 0.0)
        costs = plan.costs(self.kinds[-1], len(self.counts) - 1, self.seconds)
        for unit, cost in zip(plan.units[::-1], costs, strict=True):
            passed += cost.seconds
            ready |= {parameter.name: passed for parameter in unit.parameters}
        read: dict[str, float] = {}
        passed_forward = self.agreement()
        for each in self.stages[stage].chunks:  # a stage's chunks go forward for the first time in their order
            for unit, cost in zip(each.units, each.costs(self.kinds[0], 0, self.seconds), strict=True):
                for parameter in unit.parameters:
                    read.setdefault(parameter.name, passed_forward)
                passed_forward += cost.seconds
        return [
            self.sum(
                bucket,
                passed if bucket.blocks else max(ready[name] for name in bucket.names),
                min(read[name] for name in bucket.names),
            )
            for bucket in self.buckets[stage]
        ]

    def sum(self, bucket: PlannedBucket, ready: float, read: float = 0.0) -> Sum:
        device, config = self.cluster.device, self.config
        rate = device.host_link if config.memory.offload.to == "host" else min(device.host_link, device.disk)
        steps = self.step_seconds(bucket) if bucket.touched_bytes(config) else 0.0
        reduce, publish = self.seconds(bucket.reduce) + self.seconds(bucket.across), self.seconds(bucket.publish)
        return Sum(ready, reduce, publish, steps, bucket.moved_bytes(config) / rate, read)

    def step_seconds(self, bucket: PlannedBucket) -> float:
        """Seconds in which the optimizer steps a bucket's slot."""
        elements, count = bucket.stepped_elements, 1
        touched = bucket.touched_bytes(self.config)
        if self.software.optimizer == "steps":
            count = STEPS_OF_ADAMW * len(bucket.names)
            elements //= len(bucket.names)
            touched = elements * STEPPED_BYTES // STEPS_OF_ADAMW
        kernel = Kernel("element", 0.0, touched, elements, "float32")
        return count * max(self.timer.kernel_seconds(kernel), self.cluster.device.issue if count > 1 else 0.0)
