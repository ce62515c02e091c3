"""One run on its way to a prediction: its stages on the cluster's devices and links.

Stages that do and hold the same are looked at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

from meshwright.config import Config
from meshwright.pipeline.clock import undisturbed
from meshwright.pipeline.task import Kind
from meshwright.ranks.grid import PIPE, Grid
from meshwright.ranks.ledger import Ledger
from meshwright.ranks.mailbox import AHEAD, FURTHER, MESSAGE, Side
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.memory import Memory, memory_of, moved_bytes, streams, touched_bytes
from meshwright.tools.plan.program import Kernel, Program
from meshwright.tools.plan.recordings import splits
from meshwright.tools.plan.stage import Cost, Sent, StagePlan, include, microbatch_places
from meshwright.tools.plan.step import Passes, Step, Sum, finish, run_passes
from meshwright.tools.plan.synchronising import Buckets, PlannedBucket, share_program
from meshwright.tools.plan.timing import Pace
from meshwright.tools.plan.wires import Wires


class Site(Protocol):
    """A cluster, and what is remembered of other runs on it."""

    cluster: Cluster
    buckets: Buckets
    passes: dict[Hashable, Passes]

    def wires(self, config: Config) -> Wires: ...

    def pace(self, config: Config) -> Pace: ...


def _work(stage: StagePlan, tied: set[str]) -> Hashable:
    """What tells a stage's work from another's: programs, how often, and whether it has a tied parameter."""
    shared = any(parameter.name in tied for parameter in stage.parameters)
    return tuple((id(unit.link.programs), unit.layers) for unit in stage.units), shared


def first_rank(grid: Grid, stage: int) -> int:
    """The first rank of a stage."""
    return grid.rank(dict.fromkeys(grid.names, 0) | {PIPE: stage})


def tied_between(stages: list[StagePlan]) -> set[str]:
    """Names of the parameters that the first and the last stage both hold."""
    names = [{parameter.name for parameter in stage.parameters} for stage in stages]
    return names[0] & names[-1] if len(stages) > 1 else set()


class Run:
    """One resolved run on its way to a prediction."""

    def __init__(self, site: Site, config: Config, stages: list[StagePlan]) -> None:
        self.config, self.cluster, self.stages = config, site.cluster, stages
        self.known_passes = site.passes
        self.grid = Grid(config.layout.axes)
        self.wires = site.wires(config)
        self.pace = site.pace(config)
        self.kinds = (Kind.FORWARD, Kind.BACKWARD, *([Kind.WEIGHT] if splits(config) else []))
        self.peers = "+".join(name for name, _ in self.grid.axes if name in dict(config.layout.tensor.axes))
        tied = tied_between(stages)
        first: dict[Hashable, int] = {}
        self.like = [first.setdefault(_work(own, tied), stage) for stage, own in enumerate(stages)]
        """Of each stage the first one that does and holds the same."""
        self.buckets = {
            stage: site.buckets.of(config, self.rank(stage), stages[stage].parameters, tied) for stage in first.values()
        }
        self.costs: dict[tuple[int, Kind, int], Cost] = {}

    def rank(self, stage: int) -> int:
        return first_rank(self.grid, stage)

    def seconds(self, program: Program) -> float:
        return self.pace.seconds(program, self.wires)

    def memory(self, passes: Passes) -> tuple[Memory, ...]:
        """Of the first rank of each stage."""
        return tuple(
            memory_of(
                self.config, self.buckets[like], peak.beside(self.posted_bytes(stage)), self.cluster.device.reserved
            )
            for like, peak, stage in zip(self.like, passes.peaks, self.stages, strict=True)
        )

    def step(self, passes: Passes) -> Step:
        """All of it, from the first task to the last parameter that is published."""
        sums = {stage: self.sums(stage) for stage in self.buckets}
        every = [sums[like] for like in self.like]
        return finish(passes, every, self.norm(), streams=streams(self.config), overlaps=self.wires.overlaps)

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
        server deals them out, the step report, the norm."""
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
        return [
            self.sum(bucket, passed if bucket.blocks else max(ready[name] for name in bucket.names)) for bucket in own
        ]

    def sum(self, bucket: PlannedBucket, ready: float) -> Sum:
        device, config = self.cluster.device, self.config
        rate = device.host_link if config.memory.offload.to == "host" else min(device.host_link, device.disk)
        touched = touched_bytes(config, bucket)
        kernel = Kernel("element", 0.0, touched, bucket.stepped_elements, "float32")
        steps = self.pace.kernels.seconds(kernel) if touched else 0.0
        reduce, publish = self.seconds(bucket.reduce), self.seconds(bucket.publish)
        return Sum(ready, reduce, publish, steps, moved_bytes(config, bucket) / rate)

    def traffic(self, stage: int) -> Sent:
        """What the stage's first rank sends in a step: its kit in tasks, messages, agreements, sums."""
        plan, count = self.stages[stage], self.config.num_microbatches
        total: Sent = {}
        for which, times in enumerate(microbatch_places(count)):
            for kind in self.kinds:
                include(total, plan.sent(kind, which), times)
        ledger = Ledger()
        sizes: dict[Side, int] = {"before": plan.incoming_bytes, "after": plan.outgoing_bytes}
        with ledger.repeated(count):
            for side, size in sizes.items():
                if size:
                    ledger.record(PIPE, MESSAGE, size, FURTHER[side])
        if self.agrees:
            with ledger.repeated(count * len(self.kinds)):
                ledger.record(self.peers, "broadcast", 8 * (self.grid.size(*self.peers.split("+")) - 1), 0)
        include(total, ledger.traffic)
        for bucket in self.buckets[self.like[stage]]:
            include(total, bucket.reduce.traffic)
            include(total, bucket.publish.traffic)
        return total

    @property
    def most_flops(self) -> float:
        """Products of the busiest rank in a step."""
        return max(self.flops(self.stages[stage]) for stage in self.buckets)

    def flops(self, plan: StagePlan) -> float:
        return sum(
            times * plan.cost(kind, which, lambda program: 0.0).flops
            for which, times in enumerate(microbatch_places(self.config.num_microbatches))
            for kind in self.kinds
        )
