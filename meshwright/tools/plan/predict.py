"""What a run would cost on a cluster: a step's seconds, every stage's memory, what its ranks send. Nothing is trained.

What a run decides when it begins (the partition, how 2-D operands travel, how many microbatches a message-driven stage
holds) is decided here as it would be there, with the cluster's memory for the machine's.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from meshwright.config import Config
from meshwright.errors import ConfigError
from meshwright.model import Stretch
from meshwright.pipeline.partition import balanced, ranges_of
from meshwright.pipeline.span import Timeline
from meshwright.pipeline.task import Kind
from meshwright.ranks.grid import Grid
from meshwright.ranks.ledger import Traffic
from meshwright.stages import shared_work
from meshwright.tensor.gathered import choose_form
from meshwright.tools.plan.cluster import Backend, Cluster
from meshwright.tools.plan.kernels import Kernels
from meshwright.tools.plan.memory import Memory
from meshwright.tools.plan.recordings import Parameter, Recordings
from meshwright.tools.plan.run import Run
from meshwright.tools.plan.stage import StagePlan, plan_stretches
from meshwright.tools.plan.step import Passes
from meshwright.tools.plan.synchronising import Buckets
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
        """With the decisions that a run takes when it begins."""
        layout = config.layout
        pipeline = layout.pipeline.model_copy(update={"partition": self.partition(config)})
        config = config.model_copy(update={"layout": layout.model_copy(update={"pipeline": pipeline})})
        if "memory.summa" in layout.tensor.gives_effect_to and config.memory.summa == "auto":
            config = config.model_copy(
                update={"memory": config.memory.model_copy(update={"summa": self._summa(config)})}
            )
        if pipeline.limit_by_memory:
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
            choose_form("auto", _blocks(stage.parameters), q, self._free_bytes(config, stage))
            for stage in self.stages(anyhow)
        ]
        if all(form.keeps for form in forms):
            return "gather"
        return "stream" if any(form.streams for form in forms) else "whole"

    def _limit(self, config: Config) -> int:
        """Microbatches that every stage can hold in half of the free memory, with as much again for W's work."""
        own = [
            self._free_bytes(config, stage)
            // 2
            // max(1, 2 * stage.cost(Kind.FORWARD, 0, lambda program: 0.0).kept_bytes)
            for stage in self.stages(config)
        ]
        return max(1, min(config.num_microbatches, *own))

    def _free_bytes(self, config: Config, stage: StagePlan) -> int:
        held = sum(parameter.weight_bytes + parameter.gradient_bytes(config) for parameter in stage.parameters)
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
