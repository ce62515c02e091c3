"""What a run would cost on a cluster: a step's seconds, every stage's memory, what its ranks send. Nothing is trained.

What a run decides when it begins (the partition, how 2-D operands travel, how many microbatches a message-driven stage
holds) is decided here as it would be there, with the cluster's memory for the machine's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.machine import Machine
from meshwright.model import Chunk
from meshwright.pipeline.partition import balanced, ranges_of
from meshwright.pipeline.span import Timeline
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import Traffic
from meshwright.resolve import resolve_layout
from meshwright.section import with_field
from meshwright.stage_costs import BuiltStages, all_state_bytes, shared_work
from meshwright.tools.plan.cluster import Backend, Cluster
from meshwright.tools.plan.kernels import Kernels
from meshwright.tools.plan.memory import Memory, slots_of
from meshwright.tools.plan.recordings import Parameter, Recordings
from meshwright.tools.plan.run import Run, first_rank, tied_between
from meshwright.tools.plan.stage import StagePlan, plan_stretches
from meshwright.tools.plan.step import Passes
from meshwright.tools.plan.synchronising import Buckets, PlannedBucket
from meshwright.tools.plan.timing import Pace
from meshwright.tools.plan.wires import Wires


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
    recordings: Recordings = field(default_factory=Recordings)
    buckets: Buckets = field(default_factory=Buckets)
    _paces: dict[int, Pace] = field(default_factory=dict)
    _partitions: dict[tuple[object, int], tuple[int, ...]] = field(default_factory=dict)
    _microbatches: dict[Hashable, Sequence[int]] = field(default_factory=dict)
    passes: dict[Hashable, Passes] = field(default_factory=dict)
    _wires: dict[tuple[Backend, tuple[tuple[str, int], ...]], Wires] = field(default_factory=dict)

    def predict(self, config: Config) -> Prediction:
        """Raises ConfigError for what cannot be planned: sync fsdp and server-loss, O1, a partition that is
        measured when the run begins, a dtype or a transport that the cluster knows nothing about."""
        check(config)
        config = self.resolved(config)
        run = Run(self, config, self.stages(config))
        passes = run.passes()
        step = run.step(passes)
        traffic = tuple(run.traffic(stage) for stage in range(len(run.stages)))
        return Prediction(
            config, self.cluster, step.seconds, step.phases, run.memory(passes), traffic, step.timeline, run.most_flops
        )

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
        """With what a run decides before it begins, on a machine like the cluster's."""
        return resolve_layout(config, self.machine, self).config

    @property
    def machine(self) -> Machine:
        """The cluster, as `resolve` asks a machine: each rank has the memory of a device."""
        device = self.cluster.device
        return Machine(cores=self.cluster.cores or 1, memory=device.memory - device.reserved, shared=False)

    def partition(self, config: Config) -> tuple[int, ...]:
        """Layers a stage."""
        pipeline = config.layout.pipeline
        if pipeline.size == 1:
            return (config.model.num_blocks,)
        if not isinstance(pipeline.partition, str):
            return pipeline.partition
        assert pipeline.partition == "auto", "refused before"
        costs = shared_work(config, self.recordings.outline(config).parameters)
        if (costs, pipeline.size) not in self._partitions:
            self._partitions[costs, pipeline.size] = balanced(costs, pipeline.size)
        return self._partitions[costs, pipeline.size]

    def fixed_bytes(self, config: Config) -> list[int]:
        stages, grid = self.stages(config), Grid(config.layout.axes)
        tied = tied_between(stages)
        return [
            self._fixed_bytes(config, self.buckets.of(config, first_rank(grid, stage), plan.parameters, tied))
            for stage, plan in enumerate(stages)
        ]

    def _fixed_bytes(self, config: Config, buckets: Sequence[PlannedBucket]) -> int:
        held = sum(bucket.size_bytes + bucket.gradient_bytes for bucket in buckets)
        return held + all_state_bytes(config, slots_of(buckets), self.cluster.device.kind)

    def block_bytes(self, config: Config) -> list[list[int]]:
        return [_blocks(stage.parameters) for stage in self.stages(config)]

    def microbatch_bytes(self, config: Config) -> Sequence[int]:
        """Counted as a run counts it, so that both decide alike: recordings know more than what autograd keeps."""
        layout = config.layout
        axes = tuple(axis for axis in layout.axes if axis[0] != "data")
        key = config.model, config.data, config.precision, config.micro, layout.tensor, axes, layout.pipeline.partition
        if key not in self._microbatches:
            self._microbatches[key] = BuiltStages().microbatch_bytes(config)
        return self._microbatches[key]

    def stages(self, config: Config) -> list[StagePlan]:
        """A layout's stages. Until somebody has decided how 2-D operands travel, they keep no gathered weights."""
        if config.memory.summa == "auto":
            config = with_field(config, "memory.summa", "whole")
        runs = ranges_of(self.partition(config))
        last = len(runs) - 1
        chunks = [Chunk(run, stage == 0, stage == last) for stage, run in enumerate(runs)]
        return plan_stretches(config, self.cluster.device, self.recordings, chunks)

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
    data = config.layout.data
    if data.strategy.whole:
        rule = f"{data.strategy.unplanned}: it cannot be planned"
        raise ConfigError.of("layout.data.sync", data.sync, rule, "another sync")
    if config.precision.level == "O1":
        raise ConfigError.of("precision.level", "O1", "casts by operator: it cannot be planned", "O0, O2")
    if config.layout.pipeline.partition == "measured":
        rule = "is known when the run begins: it cannot be planned"
        raise ConfigError.of("layout.pipeline.partition", "measured", rule, "auto, or layers a stage")


def _blocks(parameters: Sequence[Parameter]) -> list[int]:
    """Bytes of the weights of 2-D products."""
    return [
        parameter.weight_bytes
        for parameter in parameters
        if parameter.name.startswith("blocks.") and {"row", "col"} <= parameter.spec.axes
    ]
