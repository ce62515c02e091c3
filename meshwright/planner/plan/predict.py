"""Predictions of a run on a cluster: a step's seconds, every stage's memory, the bytes sent. Nothing is trained.

A run's `auto` fields are decided by the run's own functions (decisions.py). The cluster's memory replaces the
machine's, and recordings replace built stages.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from meshwright.compute.model import Costs
from meshwright.compute.models.chain import split_name
from meshwright.config import Config
from meshwright.config.layout import DataParallel
from meshwright.config.section import with_field
from meshwright.planner.plan.buckets import Buckets, held_of, slots_of, streams
from meshwright.planner.plan.cluster import Cluster
from meshwright.planner.plan.compose import Composition, StagePlan, compose_stages
from meshwright.planner.plan.memory import Memory, fits
from meshwright.planner.plan.passes import Passes, PlannedStep, finish
from meshwright.planner.plan.process import held_by_processes
from meshwright.planner.plan.recordings import Recordings, check
from meshwright.planner.plan.remembered import COUNTS, PARTS, remembered, replaced
from meshwright.planner.plan.site import Site
from meshwright.planner.plan.software import OWN_SOFTWARE, Software
from meshwright.planner.plan.timed_run import TimedRun
from meshwright.ranks.ledger import Traffic
from meshwright.ranks.machine import SLOW_SHARE, Machine
from meshwright.strategies.memory.offload import state_bytes
from meshwright.strategies.pipeline.partition import fastest
from meshwright.strategies.pipeline.span import Timeline
from meshwright.strategies.pipeline.stages import placement_of, rule_of
from meshwright.training.decisions import resolve_layout
from meshwright.training.phases import PASSES
from meshwright.training.stage_costs import microbatch_bytes, shared_work

if TYPE_CHECKING:
    from meshwright.planner.plan.kept import KeptRecordings

STAGES = (*PARTS, *COUNTS, "memory.recompute", "layout.pipeline")
"""The fields that determine a stage's tasks, apart from replicas' messages during them."""

PHASE = (*STAGES, "layout.data", "layout.transport", "layout.order", "memory.offload", "optimizer")
"""The fields that determine a step's pipeline phase."""


@dataclass(frozen=True)
class Prediction:
    """The prediction of a run's step."""

    config: Config
    """The run, with its `auto` fields decided."""
    cluster: Cluster
    seconds: float
    phases: dict[str, float]
    """Seconds by name (training/phases.py)."""
    memory: tuple[Memory, ...]
    """Memory of the first rank of each stage."""
    traffic: tuple[Mapping[tuple[str, str], Traffic], ...]
    """A step's ledger of the first rank of each stage."""
    timeline: Timeline
    """The step's tasks; in a long step the first microbatches' alone."""
    idle_share: float
    """The share of the pipeline phase without a task, over all microbatches."""
    flops: float
    """Floating-point operations of the busiest rank's products in a step."""
    reference_seconds: float | None = None
    """Seconds of the first weights' log-probabilities of a batch of pairs, once before the first step; None: no pairs.
    The head's part is that of a training step, with the gradients."""

    @property
    def fullest(self) -> Memory:
        """The memory of the rank with the most bytes."""
        return max(self.memory, key=lambda memory: memory.total)

    @property
    def worst_memory(self) -> int:
        """Bytes on the fullest rank."""
        return self.fullest.total

    @property
    def measured_memory(self) -> int:
        """The bytes that a run reports (training/metrics.py): on a GPU torch's allocations, on a CPU all resident
        memory."""
        return self.fullest.allocated if self.cluster.device.kind == "cuda" else self.worst_memory + self.fullest.read

    @property
    def fits(self) -> bool:
        return all(fits(memory, self.cluster) for memory in self.memory)


@dataclass
class Planner:
    """Predicts runs on one cluster, and caches the results that runs share."""

    cluster: Cluster
    software: Software = OWN_SOFTWARE
    kept: KeptRecordings | None = None
    """Recordings on disk, to read first and to extend."""
    recordings: Recordings = field(init=False)
    site: Site = field(init=False)
    buckets: Buckets = field(init=False)
    _last: tuple[Config, TimedRun] | None = None

    def __post_init__(self) -> None:
        device = self.cluster.device
        self.software = self.software.on(device)
        self.recordings = Recordings(device.kind, self.software, device.capability, kept=self.kept)
        self.site = Site(self.cluster, self.software)
        self.buckets = Buckets(
            self.software.slice_dtype == "float32",
            self.software.low_weight(device),
            self.software.rounding == "nearest",
            self.software.sums,
        )

    def on(self, cluster: Cluster) -> Planner:
        """Return a planner for a cluster with the same kind of devices and other speeds of links or devices."""
        # Programs and buckets do not depend on speeds, so nothing is recorded again.
        planner = Planner(cluster, self.software)
        planner.recordings, planner.buckets = self.recordings, self.buckets
        return planner

    def keep(self) -> None:
        """Write new recordings to disk, if recordings are kept."""
        if self.kept is not None:
            self.kept.save()

    def predict(self, config: Config) -> Prediction:
        """Predict a run's step.

        Raises:
            ConfigError: The run cannot be planned: sync server-loss, O1, a partition that is measured when the run
                begins, or a
                dtype or transport that the cluster file does not describe.
        """
        run = self.run(config)
        config, passes, step = run.config, self.passes(run.phase_config), self._step(run)
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
            None if config.loss is None else run.forward_only(),
        )

    def _step(self, run: TimedRun) -> PlannedStep:
        passes = self.passes(run.phase_config)
        sums = {
            stage: run.sums(stage, run.tasks.places[stage][passes.last[stage].chunk][0], passes.chunk_ends[stage])
            for stage in run.buckets
        }
        every = [sums[like] for like in run.like]
        beside = {"overlaps": run.overlap("sums"), "publishes": run.overlap("gathers"), "tax": run.network.tax}
        step, counting = finish(passes, every, run.norm(), streams=streams(run.config), **beside), run.counting()
        phases = step.phases | {PASSES: step.phases[PASSES] + counting}
        return replace(step, seconds=step.seconds + counting, phases=phases)

    def least_memory(self, config: Config) -> Memory:
        """Return the fullest rank's memory in a step's first microbatches: tensors and context, without the replay of a
        prediction."""
        run = self.run(config)
        return max(run.memory(self.passes(run.phase_config, True)), key=lambda each: each.total)

    def seconds(self, config: Config, cutoff: float = math.inf) -> float:
        """Return a prediction's seconds, without its memory. From `cutoff` on, a lower bound may be returned."""
        run = self.run(config)
        if cutoff < math.inf and (least := self.least_passes(run.phase_config) + run.least_ending()) >= cutoff:
            return least
        return self._step(run).seconds

    @remembered(*PHASE)
    def least_passes(self, config: Config) -> float:
        """Return PipelinePhase.least_seconds of a TimedRun's `phase_config`."""
        return self._timed(config).phase.least_seconds()

    def run(self, config: Config) -> TimedRun:
        """Return the resolved run. The last run is cached."""
        # A search calls `least_memory` and then `predict` for the same layout.
        if self._last is None or self._last[0] != config:
            check(config)
            resolved = self.resolved(config)
            # If gradients are slices, the buckets are part of the phase, so its buckets are reused.
            known = self._timed(resolved).buckets if resolved.layout.data.strategy.slices else None
            self._last = config, TimedRun(self.site, self.buckets, resolved, self.stages(resolved), known)
        return self._last[1]

    @remembered(*PHASE)
    def passes(self, config: Config, brief: bool = False) -> Passes:
        """Return the pipeline phase of a TimedRun's `phase_config`. `brief`: only its beginning."""
        phase = self._timed(config).phase
        return phase.beginning.shown() if brief else phase.whole

    @remembered(*PHASE, last=True)
    def _timed(self, config: Config) -> TimedRun:
        """Return the run with the tasks of all runs with this `phase_config`."""
        return TimedRun(self.site, self.buckets, config, self.stages(config))

    def resolved(self, config: Config) -> Config:
        """Return the config with its `auto` fields decided as on a machine like the cluster, with a device's memory for
        each rank."""
        device = self.cluster.device
        half, single = (device.peak_of(name, tf32=False) for name in (config.precision.dtype, "float32"))
        slow = device.kind == "cpu" and half is not None and single is not None and half < SLOW_SHARE * single
        # The facts that the run would read of its machine: a device's memory less the context is free.
        machine = Machine(
            cores=self.cluster.cores or 1, memory=device.memory_bytes - self.site.context(config), shared=False,
            slow_halves=slow,
        )  # fmt: skip
        return resolve_layout(config, machine, self).config

    @remembered(
        "model", "data", "loss", "precision.products", "micro", "num_microbatches", "layout.pipeline",
        "layout.data.expert", "layout.data.exchange",
    )  # fmt: skip
    def partition(self, config: Config) -> tuple[int, ...]:
        """Return the number of layers at each position of the chain."""
        pipeline = config.layout.pipeline
        if pipeline.size == 1:
            return (config.model.num_blocks,)
        if not isinstance(pipeline.partition, str):
            return pipeline.partition
        assert pipeline.partition == "auto", "refused before"
        each, rest = divmod(config.model.num_blocks, pipeline.size * pipeline.chunks)
        if self.software.stages == "even" and each and not rest:
            return (each,) * (pipeline.size * pipeline.chunks)
        # The run's own function, so planned and real stages are equal.
        return fastest(self.work(config), placement_of(config), rule_of(config), config.num_microbatches)

    def work(self, config: Config) -> Costs:
        """Return the counted work of the chain's parts."""
        return shared_work(config, self.recordings.outline(config).parameters, self.cluster.device.kind)

    def fixed_bytes(self, config: Config) -> list[int]:
        """Return the bytes of weights, gradients and optimizer states of each stage's first rank."""
        run, device_type = Composition(config, self.stages(config), self.buckets), self.cluster.device.kind
        each = [run.buckets[like] for like in run.like]
        return [
            sum(held_of(config, buckets))
            + stage.apart_bytes(config)
            + state_bytes(config, slots_of(buckets), on_cpu=device_type == "cpu")
            for stage, buckets in zip(run.stages, each, strict=True)
        ]

    def block_bytes(self, config: Config) -> list[list[int]]:
        """Return the bytes of the rank's block of each weight in 2-D products, by stage."""
        return [
            [
                parameter.weight_bytes
                for parameter in stage.parameters
                if split_name(parameter.name)[0] is not None and {"row", "col"} <= parameter.spec.axes
            ]
            for stage in self.stages(config)
        ]

    @remembered(*PARTS, "micro", "memory.recompute", "layout.pipeline", "layout.order")
    def microbatch_bytes(self, config: Config) -> Sequence[int]:
        """Count a microbatch's bytes by the run's own function, so planned and real decisions agree: recordings differ
        by some percent."""
        # Replicas hold microbatches of equal shapes, and meta tensors have no values.
        data = config.layout.data
        replica = DataParallel(size=data.expert, expert=data.expert, exchange=data.exchange)
        for field_name, value in (("layout.data", replica), ("batch.micro", config.micro), ("seed", 0)):
            config = with_field(config, field_name, value)
        return microbatch_bytes(config, self.cluster.device.kind, self.software.attention or "torch")

    @remembered(*STAGES, "layout.order", last=True)
    def stages(self, config: Config) -> list[StagePlan]:
        """Return a layout's stages. Before the operands of 2-D products are decided (`memory.summa`), stages keep no
        gathered weights."""
        # Replicas change no stage.
        config = replaced(config, "layout.data.sync", DataParallel().sync, *COUNTS)
        if config.memory.summa == "auto":
            # The decision on `memory.summa` needs the stages' memory first.
            config = replaced(config, "memory.summa", "whole", *COUNTS)
        return compose_stages(config, self.recordings, self.partition(config))
