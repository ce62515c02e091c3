"""What the search asks before it predicts: what a layout holds at least, and about how long a step takes.

Held: the real kit's parameters in the real buckets, with nothing computed. A step: as predict.py has it, from
recordings of two sizes of microbatch (scaled.py), and for the simulated pipeline the longest of these. Stage s takes f,
b, w for its tasks and h for a message, with k microbatches in flight at most, of m:

| a step lasts until                                     | seconds                                            |
|--------------------------------------------------------|----------------------------------------------------|
| s has done all, begun when those ahead had done one    | sum of f + h ahead of s, m (f + b + w)             |
| the gradients of its last backward pass have come back | the same without w, sum of b + h ahead of s, w_0   |
| its limit has let all microbatches pass                | m / k times to the end and back: sum of f + b + 2h |
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from meshwright.build import build_kit, build_model, recomputed_group, rule_of
from meshwright.config import Config
from meshwright.model import Stretch
from meshwright.pipeline.partition import ranges_of
from meshwright.pipeline.task import Kind
from meshwright.ranks.grid import PIPE, Grid
from meshwright.ranks.mesh import planned_mesh
from meshwright.tools.plan.bounds import least_seconds
from meshwright.tools.plan.cluster import Cluster
from meshwright.tools.plan.memory import Memory, memory_of, streams
from meshwright.tools.plan.predict import Planner, Prediction
from meshwright.tools.plan.recordings import Parameter, parameters_in, splits
from meshwright.tools.plan.run import Run
from meshwright.tools.plan.scaled import Rough, Scaled
from meshwright.tools.plan.stage import StagePlan
from meshwright.tools.plan.step import Peak

NOTHING = Peak(0, 0)

SURE = 0.95
"""The part of an estimate that is taken for certain."""

AGAIN = 0.9
"""The part of a group's forward pass that is done again at least: its last layer's is cut short."""


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
    """Through a step's tasks, about: when all have ended; each stage's last task; what microbatches keep at most."""

    total: float
    last: tuple[float, ...]
    activation_bytes: float


class Estimates:
    """For layouts of one run on one cluster; remembers what they have in common."""

    def __init__(self, cluster: Cluster) -> None:
        self.planner = Planner(cluster)
        self._links: dict[Hashable, dict[int, tuple[Parameter, ...]]] = {}
        self._ways: dict[Hashable, _Way] = {}
        self._rests: dict[Hashable, _Rest] = {}
        self._held: dict[Hashable, tuple[int, Memory]] = {}
        self._partitions: dict[Hashable, tuple[int, ...]] = {}
        self.scaled = Scaled(self.planner)

    def predict(self, config: Config) -> Prediction:
        return self.planner.predict(config)

    def least_memory(self, config: Config) -> Memory:
        """Of the stage that holds most, from its own recordings: what it holds at least when it goes backward for the
        first time."""
        config = self.planner.resolved(config)
        stages = self.planner.stages(config)
        run = Run(self.planner, config, stages)
        return max((self._least_memory(run, stage) for stage in run.buckets), key=lambda memory: memory.total)

    def _least_memory(self, run: Run, stage: int) -> Memory:
        forward, backward = (run.cost(stage, kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD))
        live = _flying(run.config, stage, len(run.stages)) * forward.kept_bytes
        peak = Peak(live, max(live - forward.kept_bytes + forward.peak_bytes, live + backward.peak_bytes))
        return memory_of(run.config, run.buckets[run.like[stage]], peak, self.planner.cluster.device.reserved)

    def glance(self, config: Config) -> float:
        """Seconds at least, by its products and its pipeline."""
        return least_seconds(config, self.planner.cluster)

    def held(self, config: Config) -> Memory:
        """Of the stage that holds most: weights, gradients, states."""
        return self._fullest(config)[1]

    def line(self, config: Config) -> float:
        """Seconds of the pipeline phase, about, which other ways to sum gradients and to keep states have in common."""
        return SURE * self._way(config).total

    def rough(self, config: Config) -> Least:
        """By tasks scaled from recordings of two sizes of microbatch."""
        way = self._way(config)
        rest = self._rest_of(config)
        _, held = self._fullest(config)
        summed = way.total + max(0.0, rest.reduce - rest.overlaps * max(way.last))
        seconds = summed + rest.norm + (0.0 if streams(config) else rest.steps) + rest.publish
        return Least(SURE * seconds, replace(held, activations=int(SURE * way.activation_bytes)))

    def _way(self, config: Config) -> _Way:
        """Through the tasks."""
        pipeline, recompute = config.layout.pipeline, config.memory.recompute
        partition, count = self._partition(config), config.num_microbatches
        strides = self.scaled.strides(config, PIPE)
        key = (
            config.layout.tensor, strides, partition, config.micro, count, recompute, pipeline.schedule, pipeline.limit
        )  # fmt: skip
        if key not in self._ways:
            stages = self._stages(config, partition)
            again = AGAIN if recompute not in ("none", "selective") else 0.0
            split = splits(config)
            forward = [sum(link.forward for link in stage) for stage in stages]
            backward = [
                sum((link.inputs if split else link.backward) + again * link.forward for link in stage)
                for stage in stages
            ]
            weights = [sum(link.weights for link in stage) if split else 0.0 for stage in stages]
            limits = [rule_of(config).limit(stage, len(stages), count) for stage in range(len(stages))]
            line = Line(forward, backward, weights, self._hops(config, stages), limits)
            fullest = {0, partition.index(max(partition))}
            held = (
                _flying(config, stage, len(stages)) * self._kept_bytes(config, stages[stage], partition[stage])
                for stage in fullest
            )
            self._ways[key] = _Way(line.seconds(count), tuple(weights if split else backward), max(held))
        return self._ways[key]

    def _stages(self, config: Config, partition: tuple[int, ...]) -> list[list[Rough]]:
        """Each stage's links."""
        links, alike = self.scaled.links(config), self.planner.recordings.outline(config).alike
        stages = [[links[alike[layer]] for layer in run] for run in ranges_of(partition)]
        stages[0] = [links[-1], *stages[0]]
        stages[-1] = [*stages[-1], links[config.model.num_blocks]]
        return stages

    def _kept_bytes(self, config: Config, stage: Sequence[Rough], num_layers: int) -> float:
        """What a microbatch leaves on a stage of so many layers: of a group that is recomputed one input."""
        setting = config.memory.recompute
        if setting == "none":
            return sum(link.kept_bytes for link in stage)
        layers = [link for link in stage if link.layer]
        if setting == "selective":
            return self.scaled.kept_share(config) * sum(link.kept_bytes for link in layers)
        return sum(link.outgoing_bytes for link in layers) / max(1, recomputed_group(config, num_layers))

    def _hops(self, config: Config, stages: Sequence[Sequence[Rough]]) -> list[float]:
        """Seconds of a message from each stage to the next."""
        grid, wires = Grid(config.layout.axes), self.planner.wires(config)
        ranks = grid.group(0, PIPE)
        sizes = [stage[-1].outgoing_bytes for stage in stages[:-1]]
        return [wires.message(start, end, size) for (start, end), size in zip(pairwise(ranks), sizes, strict=True)]

    def _fullest(self, config: Config) -> tuple[int, Memory]:
        """The stage, and what it holds. The order of the axes does not matter."""
        layout = config.layout
        key = layout.tensor, layout.data, self._partition(config), config.memory.offload, config.widens_gradients
        if key not in self._held:
            usual = config.model_copy(update={"layout": layout.model_copy(update={"order": "auto"})})
            self._held[key] = self._held_by(usual, *self._parameters_of_fullest(usual))
        return self._held[key]

    def _held_by(self, config: Config, stage: int, parameters: list[Parameter]) -> tuple[int, Memory]:
        """Where weights and gradients alone are too much, nobody needs to know of buckets."""
        device = self.planner.cluster.device
        weights = sum(parameter.weight_bytes for parameter in parameters)
        gradients = sum(parameter.gradient_bytes(config) for parameter in parameters)
        if weights + gradients + device.reserved > device.memory:
            return stage, Memory(weights, gradients, 0, 0, 0, device.reserved)
        buckets = self.planner.buckets.of(config, 0, parameters, set())
        return stage, memory_of(config, buckets, NOTHING, device.reserved)

    def _rest_of(self, config: Config) -> _Rest:
        layout = config.layout
        key = (
            layout.tensor,
            layout.axes,
            layout.data,
            self._partition(config),
            config.memory.offload,
            config.widens_gradients,
        )
        if key not in self._rests:
            _, parameters = self._parameters_of_fullest(config)
            stage = StagePlan((), tuple(parameters), (), ())
            run = Run(self.planner, config, [stage])
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

    def _parameters(self, config: Config) -> dict[int, tuple[Parameter, ...]]:
        """Of the first of each layers that are alike; of the beginning under -1, of the end under their number."""
        layout, count = config.layout, config.model.num_blocks
        if layout.tensor not in self._links:
            grid = Grid(tuple((name, 1 if name in ("data", PIPE) else size) for name, size in layout.axes))
            mesh = planned_mesh(grid, 0, layout.token_axes)
            firsts = sorted(set(self.planner.recordings.outline(config).alike))
            stretches = {-1: Stretch(range(0), True, False), count: Stretch(range(0), False, True)}
            stretches |= {first: Stretch(range(first, first + 1), False, False) for first in firsts}
            self._links[layout.tensor] = {
                place: parameters_in(build_model(config, build_kit(config, mesh), mesh, stretch))
                for place, stretch in stretches.items()
            }
        return self._links[layout.tensor]


@dataclass(frozen=True)
class Line:
    """A pipeline's stages: seconds of their tasks (no `weights` where B does the work of W), of messages to the next
    one, limits."""

    forward: list[float]
    backward: list[float]
    weights: list[float]
    hops: list[float]
    limits: list[int]

    def seconds(self, count: int) -> float:
        """Of all tasks of so many microbatches: the longest of the table above."""
        ahead, behind = self._ahead(self.forward), self._ahead(self.backward)
        there_and_back = ahead[-1] + self.forward[-1] + self.backward[-1] + behind[-1]
        longest = 0.0
        for s, limit in enumerate(self.limits):
            turned = count * (self.forward[s] + self.backward[s])
            busy = ahead[s] + turned + count * self.weights[s]
            back = ahead[s] + turned + behind[s] + self.weights[0]
            passed = count / limit * (there_and_back - ahead[s] - behind[s])
            longest = max(longest, busy, back, passed)
        return longest

    def _ahead(self, seconds: list[float]) -> list[float]:
        """Until a message has come to each stage, through one task of each before it."""
        return list(accumulate((own + hop for own, hop in zip(seconds, self.hops, strict=False)), initial=0.0))


def _flying(config: Config, stage: int, num_stages: int) -> int:
    """Microbatches that a stage holds when it goes backward for the first time; of a message-driven one most likely."""
    count, pipeline = config.num_microbatches, config.layout.pipeline
    if pipeline.schedule == "message-driven" and pipeline.limit == "auto":
        return 1  # what memory allows
    limit = min(rule_of(config).limit(stage, num_stages, count), count)
    fills = num_stages > 1 and (pipeline.schedule == "gpipe" or (pipeline.schedule == "message-driven" and stage == 0))
    return limit if fills else min(limit, num_stages - stage)
