"""Estimates for the search: a layout's memory and seconds at a hundredth of a prediction's cost.

The memory of weights is that of the real kit's parameters in the real buckets. Seconds are composed as in a prediction
(predict.py), but of interpolated parts (timed_parts.py), and with a formula (`pipeline_seconds`) instead of a simulated
pipeline. Recomputation is not recorded: it lengthens the backward pass and shrinks the kept activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from meshwright.compute.model import EMBEDDINGS, HEAD
from meshwright.config import Config
from meshwright.planner.plan.buckets import PlannedBucket, held_of, memory_of, streams
from meshwright.planner.plan.compose import StagePlan
from meshwright.planner.plan.memory import Memory, Parameter, Peak
from meshwright.planner.plan.passes import Sum
from meshwright.planner.plan.recordings import check
from meshwright.planner.plan.space import CHUNKS
from meshwright.planner.plan.timed_parts import HeldActivations, StageShape, TimedParts, strides
from meshwright.planner.plan.timed_run import TimedRun
from meshwright.ranks.grid import PIPE
from meshwright.strategies.pipeline.partition import balanced, ranges_of
from meshwright.strategies.pipeline.placement import ChunkPlacement
from meshwright.strategies.pipeline.stages import placement_of, rule_of

if TYPE_CHECKING:
    from meshwright.planner.plan.predict import Planner

SURE = 0.95
"""Factor that makes an estimate a lower bound of the prediction."""

MIN_RECOMPUTED_SHARE = 0.9
"""Lower bound of the share of a group's forward pass that is recomputed; the last layer's end is not."""

MAX_KEPT_SHARE = 0.99
"""Recomputing attention is worth trying where a layer then keeps less than this share of its activations."""


@dataclass(frozen=True)
class _Work:
    """A stage's seconds forward, backward, and of weight gradients where these are tasks (W); bytes sent to the next
    stage."""

    forward: float
    backward: float
    weights: float
    outgoing_bytes: int


@dataclass(frozen=True)
class _Passes:
    """The pipeline phase: its seconds, seconds until the end of the last stage's first forward pass, and seconds of the
    longest last task of a stage."""

    seconds: float
    forward: float
    last: float


@dataclass(frozen=True)
class _Ending:
    """Seconds after the pipeline phase on the stage with most parameters: gradients' sums, optimizer, publishing; the
    shares of sums and of publishing that run under computation. `gather`: least seconds to gather sliced weights in a
    pass through the model."""

    gather: float
    reduce: float
    steps: float
    publish: float
    norm: float
    overlaps: float
    publishes: float


class Estimates:
    """Bounds and estimates for layouts of one run on one cluster. Caches what layouts share."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner
        self.parts = TimedParts(planner)
        self._held = HeldActivations(self.parts)
        self._partitions: dict[Hashable, tuple[int, ...]] = {}
        self._weights: dict[Hashable, tuple[Memory, int]] = {}
        self._buckets: dict[Hashable, list[PlannedBucket]] = {}
        self._last: tuple[Config, tuple[Memory, int]] | None = None
        self._fullest: dict[Hashable, list[Parameter]] = {}
        self._stage_shapes: dict[tuple[int, ...], list[StageShape]] = {}
        self._work_of_model: dict[Hashable, _Work] = {}
        self._messages: dict[Hashable, list[float]] = {}
        self._passes: dict[Hashable, _Passes] = {}
        self._endings: dict[Hashable, _Ending] = {}

    def estimated_seconds(self, config: Config) -> float:
        """SURE times the estimated seconds of a step."""
        passes, ending = self._passes_of(config), self._ending_of(config)
        sums = config.num_microbatches if config.layout.data.strategy.slices else 1
        # Slices are summed for every microbatch, whole gradients once, under the last task of the phase. Buckets of
        # other chunks than the last task's have left before.
        reduce = ending.reduce / config.layout.pipeline.chunks
        summed = passes.seconds + sums * max(0.0, reduce - ending.overlaps * passes.last)
        summed += max(0.0, 2 * config.num_microbatches * ending.gather - ending.publishes * passes.seconds)
        published = max(0.0, ending.publish - ending.publishes * passes.forward)
        return SURE * (summed + ending.norm + (0.0 if streams(config) else ending.steps) + published)

    def least_seconds(self, config: Config) -> float:
        """A lower bound of the estimated seconds of all layouts that differ in schedule, limit or sync only: the
        chain's work, shared equally among stages."""
        count, layout = config.num_microbatches, config.layout
        key = layout.layer, strides(config), config.micro, config.widens_gradients, config.memory.recompute
        if key not in self._work_of_model:
            # The whole model as one stage; an equal share of it is at most the slowest stage's work.
            one = self._work(config, self._shapes(config, (config.model.num_blocks,))[0], split=False)
            self._work_of_model[key] = one
        one, stages = self._work_of_model[key], layout.pipeline.size
        # The last stage begins when the first microbatch has passed one chunk of each other stage.
        filled = (stages - 1) * one.forward / max(CHUNKS, layout.pipeline.chunks)
        return SURE * (count * (one.forward + one.backward) + filled) / stages

    def estimated_memory(self, config: Config) -> Memory:
        """SURE times the estimated memory of the fullest rank, in which temporaries reuse the bytes of wider gradients.
        Independent of the order of axes."""
        alone, passing = self._alone_memory(config)
        partition = self._partition(config)
        kept, total = self._held.of(config, partition, self._shapes(config, partition))
        activations = int(SURE * kept)
        most = max(int(SURE * total) + passing, alone.temporaries)
        return replace(alone, activations=activations, temporaries=most - activations)

    def recomputes_for_nothing(self, config: Config) -> bool:
        """Whether the layout recomputes attention although the kernel keeps too little (MAX_KEPT_SHARE)."""
        return config.memory.policy.attention and self.parts.kept_share(config) > MAX_KEPT_SHARE

    def weights_memory(self, config: Config) -> Memory:
        """Weights, gradients and states of the stage with most parameters. Independent of the order of axes."""
        return self._alone_memory(config)[0]

    def _alone_memory(self, config: Config) -> tuple[Memory, int]:
        """(weights_memory, the bytes of it that are not alive at the activations' peak (HeldBytes.passing))."""
        if self._last is not None and self._last[0] is config:  # the search asks twice for each layout
            return self._last[1]
        layout = config.layout
        key = (
            layout.layer, layout.data, self._partition(config), layout.pipeline.placement, config.memory.offload,
            config.widens_gradients, layout.transport,
        )  # fmt: skip
        if key not in self._weights:
            check(config)
            # One entry for all orders of a layout's axes.
            usual = config.model_copy(update={"layout": layout.model_copy(update={"order": "auto"})})
            parameters, context = self._fullest_stage(usual), self.planner.context(usual)
            weights = 0 if layout.data.strategy.gathers else sum(each.weight_bytes for each in parameters)
            gradients = 0 if layout.data.strategy.slices else sum(each.gradient_bytes(usual) for each in parameters)
            memory, passing = Memory(weights, gradients, 0, 0, 0, context), 0
            if memory.total <= self.planner.cluster.device.memory_bytes:  # else nobody needs to know of buckets
                buckets = self._buckets_of_fullest(usual)
                memory = memory_of(usual, buckets, Peak(0, 0), context, self.planner.software)
                passing = held_of(usual, buckets).passing
            self._weights[key] = memory, passing
        self._last = config, self._weights[key]
        return self._weights[key]

    def _passes_of(self, config: Config) -> _Passes:
        pipeline, recompute = config.layout.pipeline, config.memory.recompute
        partition, count = self._partition(config), config.num_microbatches
        key = (
            config.layout.layer, strides(config, PIPE), partition, config.micro, count, recompute, pipeline.schedule,
            pipeline.limit, pipeline.placement,
        )  # fmt: skip
        if key not in self._passes:
            shapes, works, placement = self._shapes(config, partition), {}, placement_of(config)
            rule = rule_of(config)
            for shape in shapes:
                if shape not in works:
                    works[shape] = self._work(config, shape, split=rule.splits)
            chunks = [works[shape] for shape in shapes]
            forward = [chunk.forward for chunk in chunks]
            backward = [chunk.backward for chunk in chunks]
            weights = [chunk.weights for chunk in chunks]
            limits = [rule.limit_at(stage, placement, count) for stage in range(placement.num_stages)]
            hops = self._message_seconds(config, [chunk.outgoing_bytes for chunk in chunks[:-1]])
            seconds = pipeline_seconds(forward, backward, weights, hops, limits, count, placement)
            self._passes[key] = _Passes(seconds, sum(forward) + sum(hops), max(weights if rule.splits else backward))
        return self._passes[key]

    def _shapes(self, config: Config, partition: tuple[int, ...]) -> list[StageShape]:
        """By position of the chain, (distinct part, number of such parts)."""
        if partition not in self._stage_shapes:
            alike, last = self.planner.recordings.outline(config).alike, len(partition) - 1
            shapes = []
            for stage, run in enumerate(ranges_of(partition)):
                parts = Counter(alike[layer] for layer in run)
                parts.update([-1] * (stage == 0) + [len(alike)] * (stage == last))
                shapes.append(tuple(sorted(parts.items())))
            self._stage_shapes[partition] = shapes
        return self._stage_shapes[partition]

    def _work(self, config: Config, shape: StageShape, *, split: bool) -> _Work:
        parts = self.parts.of(config)
        stage = [(parts[place], times) for place, times in shape]
        policy, again = config.memory.policy, 0.0
        layers = sum(times for timed, times in stage if timed.part.is_layer)
        if policy.attention:
            again = MIN_RECOMPUTED_SHARE * layers * self.parts.attention_again(config)
        elif policy.by_groups and not policy.recorded and layers:  # single operations that are kept may leave little
            forward = sum(times * timed.forward for timed, times in stage if timed.part.is_layer)
            again = MIN_RECOMPUTED_SHARE * forward * (policy.wrapped_layers(config, layers) / layers)
        return _Work(
            sum(times * timed.forward for timed, times in stage),
            sum(times * (timed.inputs if split else timed.backward) for timed, times in stage) + again,
            sum(times * timed.weights for timed, times in stage) if split else 0.0,
            stage[-1][0].part.outgoing_bytes,
        )

    def _message_seconds(self, config: Config, sizes: Sequence[int]) -> list[float]:
        """Seconds of a message from each position to the next; 0 within a stage."""
        # Of rank 0's pipeline only; a prediction takes each stage's first rank.
        placement = placement_of(config)
        key = config.layout.nesting, placement, tuple(sizes)
        if key not in self._messages:
            ranks = config.grid.group(0, PIPE)
            holders = [ranks[placement.stage_of[position]] for position in range(placement.num_positions)]
            self._messages[key] = [
                self.planner.message_seconds(config, start, end, size) if start != end else 0.0
                for (start, end), size in zip(pairwise(holders), sizes, strict=True)
            ]
        return self._messages[key]

    def _ending_of(self, config: Config) -> _Ending:
        layout = config.layout
        key = (
            layout.layer, layout.nesting, layout.data, self._partition(config), layout.pipeline.placement,
            config.memory.offload, config.widens_gradients,
        )  # fmt: skip
        if key not in self._endings:
            fullest = StagePlan((), tuple(self._fullest_stage(config)))
            run = TimedRun(self.planner, config, [fullest], {0: self._buckets_of_fullest(config)})
            known: dict[Hashable, Sum] = {}
            sums = []
            for bucket in run.buckets[0]:
                # Buckets of equal layers are equal, and share their programs.
                alike = id(bucket.reduce), len(bucket.names)
                if alike not in known:
                    known[alike] = run.sum(bucket, 0.0)
                sums.append(known[alike])
            gathered = run.buckets[0] if layout.data.strategy.gathers else ()
            gathers = sorted(run.seconds(bucket.gather) for bucket in gathered)
            self._endings[key] = _Ending(
                # Weights of two parts stay gathered between passes: the largest two, for a lower bound.
                sum(gathers[:-2]),
                sum(one.reduce for one in sums), sum(max(one.steps, one.lane) for one in sums),
                sum(one.publish for one in sums), run.norm(), run.overlap("sums"), run.overlap("gathers"),
            )  # fmt: skip
        return self._endings[key]

    def _fullest_stage(self, config: Config) -> list[Parameter]:
        """The parameters of the stage with most elements."""
        key = config.layout.layer, self._partition(config), placement_of(config)
        if key not in self._fullest:
            self._fullest[key] = self._parameters_of_fullest(config)
        return self._fullest[key]

    def _parameters_of_fullest(self, config: Config) -> list[Parameter]:
        parts = {place: part.parameters for place, part in self.parts.untimed(config).items()}
        runs = ranges_of(self._partition(config))
        alike = self.planner.recordings.outline(config).alike
        elements = {place: sum(each.num_elements for each in own) for place, own in parts.items()}
        placement = placement_of(config)
        held = [
            [layer for at in placement.positions[stage] for layer in runs[at]] for stage in range(placement.num_stages)
        ]
        sizes = [sum(elements[alike[layer]] for layer in layers) for layers in held]
        sizes[0] += elements[-1]
        sizes[placement.last_stage] += elements[len(alike)]  # a tied table of one stage is counted twice, and held once
        stage = sizes.index(max(sizes))
        own = {each.name: replace(each, parts=(EMBEDDINGS,)) for each in parts[-1]} if stage == 0 else {}
        for layer in held[stage]:
            own |= {
                f"{layer} {each.name}": replace(each, name=f"{layer} {each.name}", parts=(layer,))
                for each in parts[alike[layer]]
            }
        if stage == placement.last_stage:
            for each in parts[len(alike)]:
                own[each.name] = replace(each, parts=(*(own[each.name].parts if each.name in own else ()), HEAD))
        return list(own.values())

    def _buckets_of_fullest(self, config: Config) -> list[PlannedBucket]:
        """The buckets of the stage with most elements, equal in every order of axes."""
        layout = config.layout
        key = (
            layout.layer, self._partition(config), placement_of(config), layout.data, config.widens_gradients,
            config.memory.offload,
        )  # fmt: skip
        # For one microbatch; `estimated_seconds` multiplies the sums of slices.
        if key not in self._buckets:
            known = config.model, config.precision, *key[:3]  # a planner may have buckets of several runs
            self._buckets[key] = self.planner.buckets.of(config, 0, self._fullest_stage(config), set(), known)
        return self._buckets[key]

    def _partition(self, config: Config) -> tuple[int, ...]:
        """Layers by position. Where the clock would choose them, which takes longer than an estimate: the balanced cut
        that the clock starts from."""
        pipeline = config.layout.pipeline
        key = pipeline.size, pipeline.chunks, pipeline.partition, config.replica_batch
        if key not in self._partitions:
            self._partitions[key] = (
                balanced(self.planner.work(config), pipeline.size * pipeline.chunks)
                if pipeline.size > 1 and isinstance(pipeline.partition, str)
                else self.planner.partition(config)
            )
        return self._partitions[key]


def pipeline_seconds(
    forward: Sequence[float], backward: Sequence[float], weights: Sequence[float], hops: Sequence[float],
    limits: Sequence[int], count: int, placement: ChunkPlacement,
) -> float:  # fmt: skip
    """Estimated seconds of a pipeline for `count` = m microbatches. A position of the chain takes f, b, w for its tasks
    (w = 0 where B includes W) and h for a message to the next position. Stage s, with its first chunk at position s,
    has at most k microbatches in flight, counted once for each chunk.

    | the maximum over s of the seconds until                | seconds                                            |
    |--------------------------------------------------------|----------------------------------------------------|
    | s has done all, begun when those ahead had done one    | sum of f + h ahead of s, m (f + b + w) of chunks   |
    | the gradients of its last backward pass have come back | the same without w, sum of b + h ahead of s, w_0   |
    | its limit has let all microbatches pass                | m / k times from each of its chunks to the end and |
    |                                                        | back: sum of f + b + 2h                            |
    """
    ahead, behind = (
        list(accumulate((own + hop for own, hop in zip(seconds, hops, strict=False)), initial=0.0))
        for seconds in (forward, backward)
    )  # until a message has come to each stage, through one task of each before it
    there_and_back = ahead[-1] + forward[-1] + backward[-1] + behind[-1]
    longest = 0.0
    for s, limit in enumerate(limits):
        own = placement.positions[s]
        turned = count * sum(forward[at] + backward[at] for at in own)
        busy = ahead[s] + turned + count * sum(weights[at] for at in own)
        back = ahead[s] + turned + behind[s] + weights[0]
        passed = count / limit * sum(there_and_back - ahead[at] - behind[at] for at in own)
        longest = max(longest, busy, back, passed)
    return longest
