"""Predictions of a run on a cluster: a step's seconds, every stage's memory, what its ranks send. Nothing is trained.

A run's `auto` fields are resolved as the run itself resolves them (decisions.py), with the cluster's memory for the
machine's and recordings for built stages.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.compute.model import Costs
from meshwright.compute.models.chain import split_name
from meshwright.config import Config
from meshwright.config.section import with_field
from meshwright.planner.plan.buckets import Buckets, held_of, slots_of, streams
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.compose import Composition, StagePlan, compose_stages
from meshwright.planner.plan.memory import Memory
from meshwright.planner.plan.network import ClusterNetwork
from meshwright.planner.plan.passes import Passes, PlannedStep, finish
from meshwright.planner.plan.process import held_by_processes
from meshwright.planner.plan.recordings import Recordings, check
from meshwright.planner.plan.software import OWN_SOFTWARE, Software
from meshwright.planner.plan.timed_run import TimedRun
from meshwright.planner.plan.timing import Timer
from meshwright.ranks.grid import REPLICA_AXES, Grid
from meshwright.ranks.ledger import Traffic
from meshwright.ranks.machine import SLOW_SHARE, Machine
from meshwright.ranks.transports import TransportName
from meshwright.strategies.memory.offload import state_bytes
from meshwright.strategies.pipeline.partition import fastest
from meshwright.strategies.pipeline.span import Timeline
from meshwright.strategies.pipeline.stages import placement_of, rule_of
from meshwright.training.decisions import resolve_layout
from meshwright.training.phases import PASSES
from meshwright.training.stage_costs import microbatch_bytes, shared_work


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
    def measured_memory(self) -> int:
        """The bytes that a run measures (training/metrics.py): on a GPU what torch has allocated, on a CPU all that is
        resident."""
        return self.fullest.allocated if self.cluster.device.kind == "cuda" else self.worst_memory + self.fullest.read

    @property
    def fits(self) -> bool:
        return self.worst_memory <= self.cluster.device.memory_bytes


@dataclass
class Planner:
    """Predicts runs on one cluster, and remembers what they have in common."""

    cluster: Cluster
    software: Software = OWN_SOFTWARE
    recordings: Recordings = field(init=False)
    buckets: Buckets = field(default_factory=Buckets)
    passes: dict[Hashable, Passes] = field(default_factory=dict)
    _last: tuple[Config, TimedRun] | None = None
    _timers: dict[tuple[int, bool, int], Timer] = field(default_factory=dict)
    _partitions: dict[Hashable, tuple[int, ...]] = field(default_factory=dict)
    _microbatches: dict[Hashable, Sequence[int]] = field(default_factory=dict)
    _networks: dict[tuple[TransportName, Grid], ClusterNetwork] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # The attention that this software has on such a device.
        device = self.cluster.device
        attention = self.software.attention or ("torch" if device.attention_efficiency is None else "fused")
        self.software = self.software.model_copy(update={"attention": attention})
        self.recordings = Recordings(self.cluster.device.kind, self.software)

    def on(self, cluster: Cluster) -> Planner:
        """A planner for a cluster with the same kind of devices, whose links or devices are of another speed."""
        # Programs and buckets do not depend on how fast a cluster is, so nothing is recorded again.
        other = Planner(cluster, self.software)
        other.recordings, other.buckets = self.recordings, self.buckets
        return other

    def predict(self, config: Config) -> Prediction:
        """Raises ConfigError for what cannot be planned: sync server-loss, O1, a partition that is
        measured when the run begins, a dtype or a transport that the cluster knows nothing about."""
        run = self._run(config)
        config, passes, step = run.config, run.passes(), self._step(run)
        sent = tuple(run.traffic(stage) for stage in range(len(run.stages)))
        return Prediction(
            config,
            self.cluster,
            step.seconds,
            step.phases,
            held_by_processes(run, run.memory(passes), sent),
            sent,
            step.timeline,
            passes.idle_share,
            run.most_flops,
        )

    def _step(self, run: TimedRun) -> PlannedStep:
        passes = run.passes()
        sums = {
            stage: run.sums(stage, run.tasks.places[stage][passes.last[stage].chunk][0], passes.chunk_ends[stage])
            for stage in run.buckets
        }
        every = [sums[like] for like in run.like]
        beside = {"overlaps": run.overlap("sums"), "publishes": run.overlap("gathers")}
        step, counting = finish(passes, every, run.norm(), streams=streams(run.config), **beside), run.counting()
        phases = step.phases | {PASSES: step.phases[PASSES] + counting}
        return replace(step, seconds=step.seconds + counting, phases=phases)

    def least_memory(self, config: Config) -> Memory:
        """The memory of the fullest rank's tensors and context in a step's first microbatches, in a fraction of a
        prediction's time."""
        run = self._run(config)
        return max(run.memory(run.passes(brief=True)), key=lambda each: each.total)

    def seconds(self, config: Config) -> float:
        """A prediction's seconds, without its memory."""
        return self._step(self._run(config)).seconds

    def _run(self, config: Config) -> TimedRun:
        """The resolved run; the last one is at hand."""
        # A search asks for least_memory first, then for the prediction of the same layout.
        if self._last is None or self._last[0] != config:
            check(config)
            resolved = self.resolved(config)
            self._last = config, TimedRun(self, resolved, self.stages(resolved))
        return self._last[1]

    def timer(self, config: Config, devices_per_host: int = 1) -> Timer:
        """A rank's pace. On a machine (with `cores`) all ranks share it, elsewhere as many as a node has."""
        ranks = config.layout.world_size
        if self.cluster.cores is None:
            # Between nodes ranks share no cores.
            ranks = min(ranks, self.cluster.devices_per_node)
        key = ranks, config.precision.tf32, devices_per_host
        if key not in self._timers:
            self._timers[key] = Timer(
                self.cluster, ranks, tf32=key[1], devices_per_host=devices_per_host,
                attention=self.software.attention_kernel,
            )  # fmt: skip
        return self._timers[key]

    def network(self, config: Config) -> ClusterNetwork:
        """The links between the ranks."""
        key = self._transport(config), config.grid
        if key not in self._networks:
            self._networks[key] = ClusterNetwork(self.cluster, *key)
        return self._networks[key]

    def message_seconds(self, config: Config, sender: int, receiver: int, size: int) -> float:
        """Seconds until a stage has so many bytes of the one beside it, one rank of each."""
        network, alike = self.network(config), config.layout.tensor.same_activation
        parts = dict(config.layout.axes).get(alike, 1) if self.software.messages == "split" else 1
        if parts == 1:
            return network.message(sender, receiver, size)
        # Peers have the same activation: each sends its part over its own link, and they gather the parts.
        gathered = network.collective(alike, "all_gather", size)
        return network.message(sender, receiver, -(-size // parts)) + gathered

    def _transport(self, config: Config) -> TransportName:
        """The run's; of `auto` the one that it becomes on a machine like the cluster."""
        if config.layout.transport != "auto":
            return config.layout.transport
        # As the run's own auto decides: MPI on CPUs where there is any, never for what lives inside torch.distributed.
        carried = self.cluster.device.kind == "cpu" and config.layout.data.strategy.over_mpi
        return "mpi" if carried and "mpi" in self.cluster.links else "torch"

    def context(self, config: Config) -> int:
        """Bytes that each of a run's processes holds on its device beyond tensors."""
        device, links = self.cluster.device, self.cluster.links.get(self._transport(config))
        # MPI's libraries take other memory than gloo's, so a measured figure of the transport goes first.
        measured = None if links is None else links.reserved_bytes
        return (device.reserved_bytes if measured is None else measured) + device.workspaces_bytes

    def resolved(self, config: Config) -> Config:
        """The config as a run resolves it on a machine like the cluster, where each rank has a device's memory."""
        device = self.cluster.device
        half, single = (device.peak_of(name, tf32=False) for name in (config.precision.dtype, "float32"))
        slow = device.kind == "cpu" and half is not None and single is not None and half < SLOW_SHARE * single
        # What the run would read of its own machine, of which a device's share beside its context is free.
        machine = Machine(
            cores=self.cluster.cores or 1, memory=device.memory_bytes - self.context(config), shared=False,
            slow_halves=slow,
        )  # fmt: skip
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
            # The run's own function, so that planned and real stages are the same.
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
            sum(held_of(config, buckets))
            + stage.apart_bytes(config)
            + state_bytes(config, slots_of(buckets), on_cpu=kind == "cpu")
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
        # Replicas hold the same microbatches, so their number is no part of the key.
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
            # What decides the operands' way asks for the stages' memory first.
            config = with_field(config, "memory.summa", "whole")
        return compose_stages(config, self.recordings, self.partition(config))
