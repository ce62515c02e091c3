"""What a run would cost on a cluster: a step's seconds, every stage's memory, what its ranks send. Nothing is trained.

What a run decides when it begins (the partition, how 2-D operands travel, how many microbatches a message-driven stage
holds) is decided here as it would be there, with the cluster's memory for the machine's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.build import SCHEDULES
from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.grid import PIPE, Grid
from meshwright.ledger import Traffic
from meshwright.mailbox import AHEAD, FURTHER
from meshwright.model import Stretch
from meshwright.pipeline.clock import undisturbed
from meshwright.pipeline.partition import balanced, ranges_of
from meshwright.pipeline.schedule import MESSAGE_DRIVEN
from meshwright.pipeline.span import Timeline
from meshwright.pipeline.task import Kind
from meshwright.plan.cluster import Backend, Cluster
from meshwright.plan.kernels import Kernels
from meshwright.plan.memory import Memory, memory_of, moved_bytes, touched_bytes
from meshwright.plan.program import Kernel, Program
from meshwright.plan.recordings import Parameter, Recordings, splits
from meshwright.plan.stage import Cost, Sent, StagePlan, include, microbatch_places, plan_stretches
from meshwright.plan.step import Passes, Sum, finish, run_passes
from meshwright.plan.synchronising import Buckets, PlannedBucket, share_program
from meshwright.plan.timing import Pace
from meshwright.plan.wires import Wires
from meshwright.stages import shared_work
from meshwright.tensor.gathered import choose_form

MESSAGE = "message"
"""The mailboxes' verb in the ledger."""


@dataclass(frozen=True)
class Prediction:
    """`config`: as it was resolved. `phases`: seconds by name (train/phases.py). `memory`, `traffic`: of the first rank
    of each stage; a step's ledger. `timeline`: where microbatches are many, of the first ones. `flops`: products of
    the busiest rank in a step."""

    config: Config
    cluster: Cluster
    seconds: float
    phases: dict[str, float]
    memory: tuple[Memory, ...]
    traffic: tuple[Mapping[tuple[str, str], Traffic], ...]
    timeline: Timeline
    flops: float

    @property
    def worst_memory(self) -> int:
        """Bytes on the rank that holds most."""
        return max(memory.total for memory in self.memory)

    @property
    def fits(self) -> bool:
        return self.worst_memory <= self.cluster.device.memory


@dataclass
class Planner:
    """Predicts runs on one cluster, and remembers what they have in common."""

    cluster: Cluster
    recordings: Recordings = field(default_factory=Recordings)
    _buckets: Buckets = field(default_factory=Buckets)
    _paces: dict[int, Pace] = field(default_factory=dict)
    _partitions: dict[tuple[object, int], tuple[int, ...]] = field(default_factory=dict)
    _passes: dict[Hashable, Passes] = field(default_factory=dict)
    _wires: dict[tuple[Backend, tuple[tuple[str, int], ...]], Wires] = field(default_factory=dict)

    def predict(self, config: Config) -> Prediction:
        """Raises ConfigError for what cannot be planned: sync fsdp and the parameter servers, O1, a partition that is
        measured when the run begins, a dtype or a transport that the cluster knows nothing about."""
        check(config)
        config = self.resolved(config)
        return _Run(self, config, self.stages(config)).prediction()

    def pace(self, config: Config) -> Pace:
        ranks = min(config.layout.world_size, self.cluster.devices_per_node)
        if self.cluster.cores is not None:
            ranks = config.layout.world_size  # a machine: all start here
        if ranks not in self._paces:
            self._paces[ranks] = Pace(Kernels(self.cluster, ranks))
        return self._paces[ranks]

    def wires(self, config: Config) -> Wires:
        key = self.backend(config), config.layout.axes
        if key not in self._wires:
            self._wires[key] = Wires(self.cluster, key[0], Grid(key[1]))
        return self._wires[key]

    def resolved(self, config: Config) -> Config:
        """With the decisions that a run takes when it begins."""
        layout = config.layout
        pipeline = layout.pipeline.model_copy(update={"partition": self.partition(config)})
        config = config.model_copy(update={"layout": layout.model_copy(update={"pipeline": pipeline})})
        if layout.tensor.kind == "tesseract" and config.memory.summa == "auto":
            config = config.model_copy(
                update={"memory": config.memory.model_copy(update={"summa": self._summa(config)})}
            )
        if pipeline.size > 1 and pipeline.limit == "auto" and SCHEDULES[pipeline.schedule] is MESSAGE_DRIVEN:
            pipeline = pipeline.model_copy(update={"limit": self._limit(config)})
            config = config.model_copy(update={"layout": layout.model_copy(update={"pipeline": pipeline})})
        return config

    def partition(self, config: Config) -> tuple[int, ...]:
        """Layers a stage."""
        pipeline = config.layout.pipeline
        if pipeline.size == 1:
            return (config.model.num_blocks,)
        if pipeline.partition == "auto":
            costs = shared_work(config, self.recordings.outline(config).parameters)
            if (costs, pipeline.size) not in self._partitions:
                self._partitions[costs, pipeline.size] = balanced(costs, pipeline.size)
            return self._partitions[costs, pipeline.size]
        assert pipeline.partition != "measured", "refused before"
        return pipeline.partition

    def stages(self, config: Config) -> list[StagePlan]:
        """Of a resolved config."""
        runs = ranges_of(self.partition(config))
        last = len(runs) - 1
        stretches = [Stretch(run, stage == 0, stage == last) for stage, run in enumerate(runs)]
        return plan_stretches(config, self.cluster.device, self.recordings, stretches)

    def _summa(self, config: Config) -> str:
        """How operands travel where free memory decides, which is what weights and gradients leave."""
        anyhow = config.model_copy(update={"memory": config.memory.model_copy(update={"summa": "whole"})})
        q = dict(config.layout.axes)["row"]
        forms = [
            choose_form("auto", _blocks(stage.parameters), q, self._free_bytes(stage)) for stage in self.stages(anyhow)
        ]
        if all(form.keeps for form in forms):
            return "gather"
        return "stream" if any(form.streams for form in forms) else "whole"

    def _limit(self, config: Config) -> int:
        """Microbatches that every stage can hold in half of the free memory, with as much again for W's work."""
        own = [
            self._free_bytes(stage) // 2 // max(1, 2 * stage.cost(Kind.FORWARD, 0, lambda program: 0.0).kept_bytes)
            for stage in self.stages(config)
        ]
        return max(1, min(config.num_microbatches, *own))

    def _free_bytes(self, stage: StagePlan) -> int:
        held = 2 * sum(parameter.num_elements * parameter.dtype.itemsize for parameter in stage.parameters)
        return max(0, self.cluster.device.memory - self.cluster.device.reserved - held)

    def backend(self, config: Config) -> Backend:
        """As `auto` chooses on a machine that has what the cluster's file tells of."""
        if config.layout.transport != "auto":
            return config.layout.transport
        return "mpi" if self.cluster.device.kind == "cpu" and "mpi" in self.cluster.links else "torch"


def predict(config: Config, cluster: Cluster, recordings: Recordings | None = None) -> Prediction:
    """A run on a cluster. `recordings`: of earlier predictions for the same kind of device. Raises as Planner does."""
    return Planner(cluster, Recordings() if recordings is None else recordings).predict(config)


def check(config: Config) -> None:
    """Raises ConfigError for what cannot be planned."""
    if config.layout.data.sync == "fsdp":
        raise ConfigError.of("layout.data.sync", "fsdp", "is laid out by torch: it cannot be planned", "another sync")
    if config.precision.level == "O1":
        raise ConfigError.of("precision.level", "O1", "casts by operator: it cannot be planned", "O0, O2")
    if config.layout.pipeline.partition == "measured":
        rule = "is known when the run begins: it cannot be planned"
        raise ConfigError.of("layout.pipeline.partition", "measured", rule, "auto, or layers a stage")


def _blocks(parameters: Sequence[Parameter]) -> list[int]:
    """Bytes of the weights of 2-D products."""
    return [
        parameter.num_elements * parameter.dtype.itemsize
        for parameter in parameters
        if parameter.name.startswith("blocks.") and {"row", "col"} <= parameter.spec.axes
    ]


def _work(stage: StagePlan, tied: set[str]) -> Hashable:
    """What tells a stage's work from another's: programs, how often, and whether it has a tied parameter."""
    shared = any(parameter.name in tied for parameter in stage.parameters)
    return tuple((id(unit.link.programs), unit.layers) for unit in stage.units), shared


class _Run:
    """One resolved run on its way to a prediction."""

    def __init__(self, planner: Planner, config: Config, stages: list[StagePlan]) -> None:
        self.config, self.cluster, self.stages = config, planner.cluster, stages
        self.known_passes = planner._passes
        self.grid = Grid(config.layout.axes)
        self.wires = planner.wires(config)
        self.pace = planner.pace(config)
        self.kinds = (Kind.FORWARD, Kind.BACKWARD, *([Kind.WEIGHT] if splits(config) else []))
        self.peers = "+".join(name for name, _ in self.grid.axes if name in dict(config.layout.tensor.axes))
        names = [{parameter.name for parameter in stage.parameters} for stage in stages]
        tied = names[0] & names[-1] if len(stages) > 1 else set()
        first: dict[Hashable, int] = {}
        self.like = [first.setdefault(_work(own, tied), stage) for stage, own in enumerate(stages)]
        """Of each stage the first one that does and holds the same."""
        self.buckets = {
            stage: planner._buckets.of(config, self.rank(stage), stages[stage].parameters, tied)
            for stage in first.values()
        }
        self.costs: dict[tuple[int, Kind, int], Cost] = {}

    def rank(self, stage: int) -> int:
        """The first of a stage's."""
        return self.grid.rank(dict.fromkeys(self.grid.names, 0) | {PIPE: stage})

    def seconds(self, program: Program) -> float:
        return self.pace.seconds(program, self.wires)

    def prediction(self) -> Prediction:
        config = self.config
        passes = self.passes()
        device = self.cluster.device
        memory = tuple(
            memory_of(config, self.buckets[like], peak.beside(self.posted_bytes(stage)), device.reserved)
            for like, peak, stage in zip(self.like, passes.peaks, self.stages, strict=True)
        )
        streams = config.memory.offload.to != "none" and config.optimizer.clip is None
        streams = streams and config.precision.dtype != "fp16"  # whose loss scale waits for the norm
        sums = {stage: self.sums(stage) for stage in self.buckets}
        step = finish(
            passes, [sums[like] for like in self.like], self.norm(), streams=streams, overlaps=self.wires.overlaps
        )
        traffic = tuple(self.traffic(stage) for stage in range(len(self.stages)))
        flops = max(self.flops(self.stages[stage]) for stage in self.buckets)
        return Prediction(config, self.cluster, step.seconds, step.phases, memory, traffic, step.timeline, flops)

    def passes(self) -> Passes:
        """The pipeline phase, which other ways to sum gradients and to keep states have in common."""
        config, layout = self.config, self.config.layout
        key = (
            config.model, config.data, config.precision, config.memory.recompute, config.memory.summa, config.micro,
            config.num_microbatches, layout.tensor, layout.axes, layout.pipeline, layout.transport,
        )  # fmt: skip
        if key not in self.known_passes:
            ranks, kernels = self.grid.world_size // len(self.stages), self.pace.kernels
            pace = undisturbed if self.cluster.cores is None else lambda busy: kernels.gain(busy * ranks)
            self.known_passes[key] = run_passes(config, self.cost, self.latency, pace)
        return self.known_passes[key]

    def cost(self, stage: int, kind: Kind, which: int) -> Cost:
        """Of a task, with what its ranks tell each other before it (pipeline.agreed)."""
        key = self.like[stage], kind, which
        if key not in self.costs:
            cost = self.stages[stage].cost(kind, which, self.seconds)
            self.costs[key] = Cost(self.tell() + cost.seconds, cost.kept_bytes, cost.peak_bytes, cost.flops)
        return self.costs[key]

    def tell(self) -> float:
        """Seconds until a stage's ranks agree on a task."""
        return self.wires.collective(self.peers, "broadcast", 8) if self.agrees else 0.0

    @property
    def agrees(self) -> bool:
        return len(self.stages) > 1 and self.grid.size(*(self.peers.split("+") if self.peers else ())) > 1

    def posted_bytes(self, stage: StagePlan) -> int:
        """Of the messages that are waited for from both sides: their memory is there before they come (mailbox.py)."""
        ahead = min(AHEAD[self.cluster.device.kind], self.config.num_microbatches)
        return ahead * (stage.incoming_bytes + stage.outgoing_bytes)

    def latency(self, start: int, end: int) -> float:
        lower = min(start, end)
        return self.wires.message(self.rank(start), self.rank(end), self.stages[lower].outgoing_bytes)

    def norm(self) -> float:
        """Seconds of what ranks tell each other between backward pass and optimizer: the next batch's rows, where a
        server deals them out, the pulse, the norm."""
        world = "+".join(self.grid.names)
        if self.grid.world_size == 1:
            return 0.0
        told = self.seconds(share_program(self.config))
        return told + self.wires.collective(world, "all_reduce", 8) + self.wires.collective(world, "all_gather", 1024)

    def sums(self, stage: int) -> list[Sum]:
        plan, own = self.stages[stage], self.buckets[stage]
        kind, last = self.kinds[-1], len(microbatch_places(self.config.num_microbatches)) - 1
        passed = self.tell()
        ready: dict[str, float] = {}
        order = plan.units[::-1]
        for unit, cost in zip(order, plan.costs(kind, last, self.seconds), strict=True):
            passed += cost.seconds
            ready |= dict.fromkeys(unit.names, passed)
        return [self.sum(bucket, max(ready[name] for name in bucket.names)) for bucket in own]

    def sum(self, bucket: PlannedBucket, ready: float) -> Sum:
        device, config = self.cluster.device, self.config
        rate = device.host_link if config.memory.offload.to == "host" else min(device.host_link, device.disk)
        touched = touched_bytes(config, bucket)
        kernel = Kernel("element", 0.0, touched, bucket.stepped_elements, "float32")
        steps = self.pace.kernels.seconds(kernel) if touched else 0.0
        reduce, publish = self.seconds(bucket.reduce), self.seconds(bucket.publish)
        return Sum(ready, reduce, publish, steps, moved_bytes(config, bucket) / rate)

    def traffic(self, stage: int) -> Sent:
        plan, count = self.stages[stage], self.config.num_microbatches
        total: Sent = {}
        for which, times in enumerate(microbatch_places(count)):
            for kind in self.kinds:
                include(total, plan.sent(kind, which), times)
        for side, size in (("after", plan.outgoing_bytes), ("before", plan.incoming_bytes)):
            if size:
                part = Traffic(count, count * size)
                message = Traffic(count, count * size)
                message.by_peer[FURTHER["after" if side == "after" else "before"]] = part
                include(total, {(PIPE, MESSAGE): message})
        if self.agrees:
            tasks = count * len(self.kinds)
            sent = tasks * 8 * (self.grid.size(*self.peers.split("+")) - 1)
            told = Traffic(tasks, sent)
            told.by_peer[0] = Traffic(tasks, sent)
            include(total, {(self.peers, "broadcast"): told})
        for bucket in self.buckets[self.like[stage]]:
            include(total, bucket.reduce.traffic)
            include(total, bucket.publish.traffic)
        return total

    def flops(self, plan: StagePlan) -> float:
        return sum(
            times * plan.cost(kind, which, lambda program: 0.0).flops
            for which, times in enumerate(microbatch_places(self.config.num_microbatches))
            for kind in self.kinds
        )
