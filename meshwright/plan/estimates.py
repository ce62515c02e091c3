"""What the search asks before it predicts: what a layout holds at least, and how long a step takes at least.

Held: the real kit's parameters in the real buckets, with nothing computed. A step: as predict.py has it, but with a
bound in place of the simulated pipeline. With f, b, w the seconds of a stage's tasks, of m microbatches:

| stage s                                   | ends at least at                                                        |
|-------------------------------------------|-------------------------------------------------------------------------|
| after those ahead have made one F         | f_0 + ... + f_(s-1) + m (f_s + b_s + w_s)                               |
| after a later stage t has ended its last B | f_0 + ... + f_(t-1) + m (f_t + b_t) + b_(t-1) + ... + b_s + w_s        |

The first stage holds as many microbatches as its limit lets it, and no fewer than there are stages, before it ends one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from meshwright.build import build_kit, build_model
from meshwright.config import Config
from meshwright.grid import PIPE, Grid
from meshwright.mesh import Mesh, planned_mesh
from meshwright.model import Stretch
from meshwright.pipeline.partition import ranges_of
from meshwright.pipeline.span import Span, Timeline
from meshwright.pipeline.task import Kind
from meshwright.plan.bounds import least_seconds
from meshwright.plan.cluster import Cluster
from meshwright.plan.memory import Memory, memory_of
from meshwright.plan.predict import Planner, Prediction, _Run
from meshwright.plan.recordings import Parameter, splits
from meshwright.plan.scaled import Scaled
from meshwright.plan.stage import Cost, StagePlan, microbatch_places
from meshwright.plan.step import Passes, Peak, finish, rule_of
from meshwright.shard import shard_specs

NOTHING = Peak(0, 0)

SURE = 0.9
"""The part of a rough estimate that is taken for certain."""


@dataclass(frozen=True)
class Least:
    """Of a step: seconds, and the memory of the rank that holds most of those that were looked at."""

    seconds: float
    memory: Memory


@dataclass(frozen=True)
class _Rest:
    """What comes after the tasks, of the stage that holds most: the seconds of its buckets."""

    reduce: float
    steps: float
    publish: float
    norm: float
    overlaps: float


@dataclass(frozen=True)
class _Way:
    """Through a step's tasks, at least: when all have ended, when each stage has; each one's last backward pass; what
    a microbatch keeps on the first."""

    total: float
    ends: tuple[float, ...]
    last: tuple[float, ...]
    kept_bytes: float


def streams(config: Config) -> bool:
    """Whether an optimizer steps each bucket as it comes; fp16's loss scale waits for the norm."""
    return config.memory.offload.to != "none" and config.optimizer.clip is None and config.precision.dtype != "fp16"


class Estimates:
    """For layouts of one run on one cluster; remembers what they have in common."""

    def __init__(self, cluster: Cluster) -> None:
        self.planner = Planner(cluster)
        self._links: dict[Hashable, dict[int, list[Parameter]]] = {}
        self._ways: dict[Hashable, _Way] = {}
        self._rests: dict[Hashable, _Rest] = {}
        self._held: dict[Hashable, tuple[int, Memory]] = {}
        self._partitions: dict[Hashable, tuple[int, ...]] = {}
        self.scaled = Scaled(self.planner)

    def predict(self, config: Config) -> Prediction:
        return self.planner.predict(config)

    def glance(self, config: Config) -> float:
        """Seconds at least, by its products and its pipeline."""
        return least_seconds(config, self.planner.cluster)

    def held(self, config: Config) -> Memory:
        """Of the stage that holds most: weights, gradients, states."""
        return self._fullest(config)[1]

    def rough(self, config: Config) -> Least:
        """By tasks scaled from recordings of two sizes of microbatch. Groups that are recomputed go forward again, half
        of them at least; what they keep is not told."""
        way = self._way(config)
        rest = self._rest_of(config)
        fullest, held = self._fullest(config)
        end = way.ends[fullest]
        summed = end + max(0.0, rest.reduce - rest.overlaps * way.last[fullest])
        seconds = max(way.total, summed) + rest.norm + (0.0 if streams(config) else rest.steps) + rest.publish
        activations = int(SURE * _flying(config, 0, len(way.ends)) * way.kept_bytes)
        return Least(SURE * seconds, replace(held, activations=activations))

    def _way(self, config: Config) -> _Way:
        """Through the tasks."""
        layout, again, split = config.layout, config.memory.recompute not in ("none", "selective"), splits(config)
        strides = self.scaled.strides(config)
        partition, count = self._partition(config), config.num_microbatches
        key = layout.tensor, strides, partition, config.micro, count, again, config.memory.recompute == "none", split
        if key not in self._ways:
            links, runs = self.scaled.links(config), ranges_of(partition)
            alike, last = self.planner.recordings.outline(config).alike, config.model.num_blocks
            stages = [[links[alike[layer]] for layer in run] for run in runs]
            stages[0] = [links[-1], *stages[0]]
            stages[-1] = [*stages[-1], links[last]]
            forward = [sum(link.forward for link in stage) for stage in stages]
            backward = [sum(link.backward + again * link.forward / 2 for link in stage) for stage in stages]
            nothing = [0.0] * len(stages)  # how much of it is for weights, and need not be waited for, is not told
            total, _, _ = least_ends(count, forward, *((nothing, backward) if split else (backward, nothing)))
            ahead = accumulate(forward, initial=0.0)
            ends = tuple(before + count * (f + b) for before, f, b in zip(ahead, forward, backward, strict=False))
            told = config.memory.recompute == "none" and layout.tensor.kind != "tesseract"
            kept = sum(link.kept_bytes for link in stages[0]) if told else 0.0
            self._ways[key] = _Way(total, ends, tuple(backward), kept)
        return self._ways[key]

    def least(self, config: Config) -> Least:
        """With recordings."""
        config = self.planner.resolved(config)
        stages = self.planner.stages(config)
        ends = stages if len(stages) == 1 else [stages[0], stages[-1]]
        run = _Run(self.planner, config, ends)
        passes = _least_passes(config, stages, run)
        sums = [run.sums(stage) for stage in range(len(ends))]
        step = finish(passes, sums, run.norm(), streams=streams(config), overlaps=run.wires.overlaps)
        reserved = self.planner.cluster.device.reserved
        memory = [memory_of(config, own, peak, reserved) for own, peak in zip(run.buckets, passes.peaks, strict=True)]
        return Least(step.seconds, max(memory, key=lambda of: of.total))

    def _fullest(self, config: Config) -> tuple[int, Memory]:
        """The stage, and what it holds. The order of the axes does not matter."""
        layout = config.layout
        key = layout.tensor, layout.data, self._partition(config), config.memory.offload
        if key not in self._held:
            usual = config.model_copy(update={"layout": layout.model_copy(update={"order": "auto"})})
            self._held[key] = self._held_by(usual, *self._parameters_of_fullest(usual))
        return self._held[key]

    def _held_by(self, config: Config, stage: int, parameters: list[Parameter]) -> tuple[int, Memory]:
        """Where weights and gradients alone are too much, nobody needs to know of buckets."""
        device = self.planner.cluster.device
        weights = sum(parameter.num_elements * parameter.dtype.itemsize for parameter in parameters)
        if 2 * weights + device.reserved > device.memory:
            return stage, Memory(weights, weights, 0, 0, 0, device.reserved)
        buckets = self.planner._buckets.of(config, 0, parameters, set())
        return stage, memory_of(config, buckets, NOTHING, device.reserved)

    def _rest_of(self, config: Config) -> _Rest:
        layout = config.layout
        key = layout.tensor, layout.axes, layout.data, self._partition(config), config.memory.offload
        if key not in self._rests:
            _, parameters = self._parameters_of_fullest(config)
            stage = StagePlan(Stretch(range(0), False, False), (), tuple(parameters), (), ())
            run = _Run(self.planner, config, [stage])
            sums = [run.sum(bucket, 0.0) for bucket in run.buckets[0]]
            self._rests[key] = _Rest(
                sum(one.reduce for one in sums),
                sum(max(one.steps, one.lane) for one in sums),
                sum(one.publish for one in sums),
                run.norm(),
                run.wires.overlaps,
            )
        return self._rests[key]

    def _parameters_of_fullest(self, config: Config) -> tuple[int, list[Parameter]]:
        """The stage with the most, and its parameters."""
        links, runs = self._parameters(config), ranges_of(self._partition(config))
        alike = self.planner.recordings.outline(config).alike

        def size(place: int) -> int:
            return sum(each.num_elements for each in links[place])

        sizes = [sum(size(alike[layer]) for layer in run) for run in runs]
        sizes[0] += size(-1)
        sizes[-1] += size(len(alike))  # a tied table of one stage is counted twice, and held once
        stage = sizes.index(max(sizes))
        held = {each.name: each for each in links[-1]} if stage == 0 else {}
        for layer in runs[stage]:
            held |= {f"{layer} {each.name}": replace(each, name=f"{layer} {each.name}") for each in links[alike[layer]]}
        if stage == len(runs) - 1:
            held |= {each.name: each for each in links[len(alike)]}
        return stage, list(held.values())

    def _partition(self, config: Config) -> tuple[int, ...]:
        key = config.layout.pipeline.size, config.layout.pipeline.partition, config.replica_batch
        if key not in self._partitions:
            self._partitions[key] = self.planner.partition(config)
        return self._partitions[key]

    def _parameters(self, config: Config) -> dict[int, list[Parameter]]:
        """Of the first of each layers that are alike; of the beginning under -1, of the end under their number."""
        layout, count = config.layout, config.model.num_blocks
        if layout.tensor not in self._links:
            grid = Grid(tuple((name, 1 if name in ("data", PIPE) else size) for name, size in layout.axes))
            mesh = planned_mesh(grid, 0, layout.token_axes)
            firsts = sorted(set(self.planner.recordings.outline(config).alike))
            stretches = {-1: Stretch(range(0), True, False), count: Stretch(range(0), False, True)}
            stretches |= {first: Stretch(range(first, first + 1), False, False) for first in firsts}
            self._links[layout.tensor] = {
                place: _parameters_of(config, mesh, stretch) for place, stretch in stretches.items()
            }
        return self._links[layout.tensor]


def least_ends(
    count: int, forward: Sequence[float], backward: Sequence[float], weight: Sequence[float]
) -> tuple[float, float, float]:
    """When all stages, the first, the last have done their tasks of `count` microbatches, at least."""
    ahead = list(accumulate(forward, initial=0.0))
    behind = list(accumulate(backward, initial=0.0))
    stages = range(len(forward))
    busy = [ahead[s] + count * (forward[s] + backward[s] + weight[s]) for s in stages]
    turned = max(ahead[s] + count * (forward[s] + backward[s]) + behind[s] for s in stages)
    first = max(busy[0], turned + weight[0])
    return max(first, *busy), first, busy[-1]


def _parameters_of(config: Config, mesh: Mesh, stretch: Stretch) -> list[Parameter]:
    model = build_model(config, build_kit(config, mesh), mesh, stretch)
    specs = shard_specs(model)
    return [
        Parameter(name, parameter.numel(), parameter.dtype, specs[name]) for name, parameter in model.named_parameters()
    ]


def _least_passes(config: Config, stages: Sequence[StagePlan], run: _Run) -> Passes:
    """The first and the last stage's last tasks as early as can be, and the least that they hold."""
    count, kinds = config.num_microbatches, run.kinds
    places = range(len(microbatch_places(count)))
    known: dict[Hashable, dict[Kind, Cost]] = {}
    tasks: list[dict[Kind, Cost]] = []
    for stage in stages:
        key = tuple((id(unit.link.programs), unit.layers) for unit in stage.units)
        if key not in known:
            known[key] = {kind: _cheapest([stage.cost(kind, which, run.seconds) for which in places]) for kind in kinds}
        tasks.append(known[key])

    def seconds(kind: Kind) -> list[float]:
        return [own[kind].seconds if kind in own else 0.0 for own in tasks]

    total, first, end = least_ends(count, seconds(Kind.FORWARD), seconds(Kind.BACKWARD), seconds(Kind.WEIGHT))
    ends = [first] if len(stages) == 1 else [first, end]
    outer = tasks[:1] if len(stages) == 1 else [tasks[0], tasks[-1]]
    last = tuple(
        Span(index, "", "", end - own[kinds[-1]].seconds, end, count - 1)
        for index, (end, own) in enumerate(zip(ends, outer, strict=True))
    )
    peaks = tuple(_least_peak(config, index, len(stages), own) for index, own in zip((0, len(stages) - 1), outer))
    return Passes(total, Timeline(len(outer), ()), last, peaks)


def _cheapest(costs: Sequence[Cost]) -> Cost:
    """The least in everything of a task at the places of a step."""
    return Cost(
        min(cost.seconds for cost in costs),
        min(cost.kept_bytes for cost in costs),
        min(cost.peak_bytes for cost in costs),
    )


def _flying(config: Config, stage: int, num_stages: int) -> int:
    """Microbatches that a stage holds at least when it goes backward for the first time."""
    count, pipeline = config.num_microbatches, config.layout.pipeline
    if pipeline.schedule == "message-driven" and pipeline.limit == "auto":
        return 1
    limit = min(rule_of(config).limit(stage, num_stages, count), count)
    return limit if pipeline.schedule == "gpipe" and num_stages > 1 else min(limit, num_stages - stage)


def _least_peak(config: Config, stage: int, num_stages: int, tasks: dict[Kind, Cost]) -> Peak:
    """While it goes backward for the first time."""
    flying = _flying(config, stage, num_stages)
    live = flying * tasks[Kind.FORWARD].kept_bytes
    dearest = max(
        live - tasks[Kind.FORWARD].kept_bytes + tasks[Kind.FORWARD].peak_bytes, live + tasks[Kind.BACKWARD].peak_bytes
    )
    return Peak(live, dearest)
